"""WebDataset tar shards: members that share a name up to the first dot belong to one sample.

Read in place through an index of member offsets; nothing is unpacked. (Tar shards of images beside a JSON
annotation file are found by `sources.Locator` instead.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ramatch.data.annotations import Reading, Request, Row
from ramatch.data.formats import tables
from ramatch.data.formats.sidecars import parse_sidecar
from ramatch.data.images import is_image_name
from ramatch.data.sources import FileImage, find_tars, is_tar_name, tar_index
from ramatch.errors import RamatchError
from ramatch.files import decode_text, parse_json, shown

DESCRIPTION = "WebDataset tar shards"

LABEL_MEMBERS = ("json", "txt", "cls", "labels")  # in order of preference


def detect(request: Request) -> bool:
    names = (name for shard in find_shards(request) for name in tar_index(shard))
    return any(name.rpartition(".")[2].lower() in LABEL_MEMBERS for name in names)


def find_shards(request: Request) -> list[Path]:
    """Shards named by the request; `split` picks those whose name starts with it."""
    whole = request.path.is_dir()
    named = request.files or [request.path]
    shards = find_tars(request.path) if whole else [p for p in named if is_tar_name(p) and p.is_file()]
    of_split = [p for p in shards if p.name.lower().startswith((request.split or "").lower())]
    return of_split if whole else of_split or shards


def read(request: Request) -> Reading:
    shards = find_shards(request)
    reading = Reading(notes=[f"{len(shards)} shard(s), read in place"])
    for shard in shards:
        samples: dict[str, dict[str, str]] = {}
        index = tar_index(shard)
        for name in index:
            folder, base = os.path.split(name)
            stem, _, extension = base.partition(".")
            if stem:
                samples.setdefault(os.path.join(folder, stem), {})[extension.lower()] = name
        for key, members in samples.items():
            image = next((name for name in members.values() if is_image_name(name)), None)
            kind = next((e for e in LABEL_MEMBERS if e in members), None)
            if image and kind:
                source = FileImage(os.path.abspath(shard), *index[image], image)
                labels = FileImage(str(shard), *index[members[kind]], members[kind])
                where = f"{shard.name}:{members[kind]}"
                reading.rows.append(Row(image, _labels(labels, kind, request), image=source, where=where))
            elif image:
                reading.issues.append(("image without labels file", "left out", f"{shard.name}:{image}"))
            elif kind:
                reading.issues.append(("missing image", "left out", f"{shard.name}:{key}"))
    return reading


def _labels(source: FileImage, kind: str, request: Request) -> list[Any]:
    text = decode_text(source.read(), source)
    if kind == "cls":
        words = [x.strip() for x in text.replace(",", "\n").splitlines()]
        return [int(x) if x.isdecimal() and len(x) < 10 else x for x in words]
    if kind != "json":
        return parse_sidecar(text)
    content = parse_json(text, source)
    if isinstance(content, dict):
        column = tables.find_column(list(content), tables.LABEL_COLUMNS)
        if column is None:
            raise RamatchError(f"{source}: none of its fields is called 'labels'; there are {shown(sorted(content))}")
        content = content[column]
    return tables.parse_labels(content, tables.choose_separator([content], request.classes), request.classes)
