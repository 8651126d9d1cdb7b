"""WebDataset tar shards: members that share a name up to the first dot belong to one sample.

Read in place through an index of member offsets; nothing is unpacked. (Tar shards of images beside a JSON
annotation file are found by `sources.Locator` instead.)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ramatch.data.annotations import Reading, Row
from ramatch.data.formats import tables
from ramatch.data.formats.request import Request
from ramatch.data.formats.sidecars import parse_sidecar
from ramatch.data.images import EXTENSIONS, is_image_name
from ramatch.data.sources import SliceImage, find_tars, is_tar_name, tar_index
from ramatch.errors import RamatchError

DESCRIPTION = "WebDataset tar shards"

LABEL_MEMBERS = ("json", "txt", "cls", "labels")  # in order of preference


def detect(request: Request) -> bool:
    shards = find_shards(request)
    return bool(shards) and any(_has_labels(shard) for shard in shards)


def find_shards(request: Request) -> list[Path]:
    """Shards named by the request; `split` picks those whose name starts with it."""
    if request.path.is_dir():
        shards = find_tars(request.path)
    else:
        shards = [p for p in (request.files or [request.path]) if is_tar_name(p) and p.is_file()]
    if request.split:
        named = [p for p in shards if p.name.lower().startswith(request.split.lower())]
        return named or ([] if request.path.is_dir() else shards)
    return shards


def read(request: Request) -> Reading:
    shards = find_shards(request)
    reading = Reading(rows=[], notes=[f"{len(shards)} shard(s), read in place"], roots=[])
    for shard in shards:
        samples: dict[str, dict[str, str]] = {}
        index = tar_index(shard)
        for name in index:
            folder, base = os.path.split(name)
            stem, _, extension = base.partition(".")
            if stem:
                samples.setdefault(os.path.join(folder, stem), {})[extension.lower()] = name
        for key, members in samples.items():
            image = next((m for e, m in members.items() if f".{e}" in EXTENSIONS or is_image_name(m)), None)
            kind = next((e for e in LABEL_MEMBERS if e in members), None)
            if image is None:
                if kind is not None:
                    reading.issues.append(("missing image", "left out", f"{shard.name}:{key}"))
                continue
            if kind is None:
                reading.issues.append(("image without labels file", "left out", f"{shard.name}:{image}"))
                continue
            source = SliceImage(os.path.abspath(shard), *index[image], image)
            where = f"{shard.name}:{members[kind]}"
            labels = _labels(SliceImage(str(shard), *index[members[kind]], members[kind]), kind, request, where)
            reading.rows.append(Row(image, labels, image=source, where=where))
    return reading


def _labels(source: SliceImage, kind: str, request: Request, where: str) -> list[Any]:
    try:
        text = source.read().decode("utf-8-sig")
        if kind == "json":
            return _json_labels(json.loads(text), request, where)
    except ValueError as error:  # bad UTF-8 or bad JSON
        raise RamatchError(f"{where}: {error}") from error
    if kind == "cls":
        return [int(x) if x.strip().isdecimal() else x.strip() for x in text.replace(",", "\n").splitlines()]
    return parse_sidecar(text)


def _json_labels(content: Any, request: Request, where: str) -> list[Any]:
    if isinstance(content, dict):
        column = tables.find_column([str(k) for k in content], tables.LABEL_COLUMNS)
        if column is None:
            raise RamatchError(f"{where}: none of its fields is called 'labels'; there are {sorted(content)[:8]}")
        content = content[column]
    return tables.parse_labels(content, tables.choose_separator([content], request.classes), request.classes)


def _has_labels(shard: Path) -> bool:
    return any(name.rpartition(".")[2].lower() in LABEL_MEMBERS for name in tar_index(shard))
