"""Images with sentences: the JSON lists form, COCO captions, Flickr8k's token file, tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from ramatch.data.annotations import Summary
from ramatch.data.formats import coco, tables
from ramatch.data.formats.request import Request
from ramatch.data.images import MAX_PIXELS, load_image
from ramatch.data.records import Paths, tidy
from ramatch.data.sources import ImageSource, Locator
from ramatch.errors import RamatchError
from ramatch.files import read_text

CAPTION_COLUMNS = ("captions", "caption", "sentences", "sentence", "text", "texts", "description", "comment")

Pairs = list[tuple[str, list[str]]]


@dataclass(frozen=True, slots=True)
class CaptionRecord:
    """One picture and its sentences."""

    key: str
    captions: tuple[str, ...]
    image: ImageSource

    def load(self, max_pixels: int | None = MAX_PIXELS) -> Image.Image:
        """The picture, upright, RGB."""
        return load_image(self.image.read(), max_pixels=max_pixels, name=str(self.image))


@dataclass
class Captions:
    """Pictures with sentences, and an account of how they were understood."""

    records: list[CaptionRecord]
    summary: Summary

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[CaptionRecord]:
        return iter(self.records)

    def pairs(self) -> Pairs:
        """[(key, [caption, ...]), ...]"""
        return [(r.key, list(r.captions)) for r in self.records]


def read_captions(path: str | os.PathLike, images_roots: Paths | None = None, *, split: str | None = None) -> Captions:
    """Read captions from a file, or from a folder with one `captions*.json` (or a single table) in it.

    Forms: `{"images": [[path, [caption, ...]], ...]}`; COCO captions JSON; Karpathy's JSON (`split` picks its
    train, val or test images); Flickr8k's token file (`a.jpg#0<TAB>caption`); CSV, TSV or JSONL with an image and
    a caption column, one or several rows per image.

    images_roots: folders or tar files with the images, beside those next to the file. Missing images and empty
    captions are left out, images listed twice are merged, foreign root paths repaired; all counted.
    """
    file = _caption_file(Path(os.path.expanduser(path)))
    request = Request(file, split)
    form, pairs = _read_pairs(request)
    given = [images_roots] if isinstance(images_roots, (str, os.PathLike)) else list(images_roots or [])
    locator = Locator([*given, *coco.image_roots(file)], prefer=f"{split or ''} {file.stem}")
    summary = Summary(str(file), form, split)
    sources: dict[str, ImageSource] = {}
    captions: dict[str, list[str]] = {}
    for name, sentences in pairs:
        if not name.strip():
            summary.add_issue("empty row", "skipped", str(sentences)[:60])
            continue
        image, key = locator.find(name.strip())
        if image is None:
            summary.add_issue("missing image", "left out", name)
            continue
        if key != name.strip():
            summary.add_issue("foreign root path", "repaired", f"{name} -> {key}")
        if key in sources:
            summary.add_issue("duplicate image", "merged, with the captions of both", key)
        sources[key] = image
        for sentence in map(tidy, sentences):
            if sentence:
                captions.setdefault(key, []).append(sentence)
            else:
                summary.add_issue("empty caption", "skipped", key)
    records = []
    for key, image in sources.items():
        if captions.get(key):
            records.append(CaptionRecord(key, tuple(captions[key]), image))
        else:
            summary.add_issue("image without captions", "left out", key)
    if not records:
        raise RamatchError(
            f"{file}: none of its {len(pairs):,} images was found with a caption; looked in {locator.describe()}; "
            "say where the images are with images_roots"
        )
    summary.images, summary.labels = len(records), sum(len(r.captions) for r in records)
    summary.notes.append(f"{summary.labels:,} captions")
    return Captions(records, summary)


def read_caption_sets(
    paths: str | os.PathLike | Sequence[str | os.PathLike], images_roots: Sequence[str | os.PathLike] = ()
) -> tuple[list[CaptionRecord], list[Summary]]:
    """Records of one or several caption sets, and an account of each; an image that several name has all its
    captions."""
    sets = [read_captions(p, images_roots) for p in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    records: dict[str, CaptionRecord] = {}
    for record in (r for found in sets for r in found.records):
        before = records.get(record.key)
        records[record.key] = replace(record, captions=before.captions + record.captions) if before else record
    return list(records.values()), [found.summary for found in sets]


def _caption_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise RamatchError(f"no such file or folder: {path}")
    everything = sorted(p for place in (path, path / "annotations") if place.is_dir() for p in place.iterdir())
    found = [p for p in everything if p.suffix in (".json", ".txt", ".csv", ".tsv", ".jsonl") and "caption" in p.name]
    found = found or [p for p in everything if p.name.endswith((".token", ".token.txt"))]
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "none"
        raise RamatchError(f"{path}: expected one captions file in it, found {names}; give the file itself")
    return found[0]


def _read_pairs(request: Request) -> tuple[str, Pairs]:
    if request.suffix == ".json":
        content = request.json
        if isinstance(content, dict) and isinstance(content.get("images"), list):
            if "annotations" in content:
                return "COCO captions JSON", _coco(request.path, content)
            images = content["images"]
            if images and isinstance(images[0], dict) and "sentences" in images[0]:
                return "Karpathy JSON", _karpathy(content, request.split)
            return 'JSON lists {"images"}', _lists(request.path, images)
    elif request.suffix in (".txt", ".token"):
        first = read_text(request.path).lstrip().split("\n", 1)[0]
        if "#" in first.split("\t")[0] and "\t" in first:
            return "Flickr token file", _tokens(request.path)
    return "captions table", _table(request)


def _lists(path: Path, images: list[Any]) -> Pairs:
    pairs: Pairs = []
    for number, entry in enumerate(images):
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)):
            raise RamatchError(f"{path}: images[{number}] is {str(entry)[:60]!r}; expected [path, [caption, ...]]")
        pairs.append((entry[0], [entry[1]] if isinstance(entry[1], str) else [str(c) for c in entry[1]]))
    return pairs


def _coco(path: Path, content: dict[str, Any]) -> Pairs:
    try:
        pairs = {image["id"]: (coco.file_name(image), []) for image in content["images"]}  # type: ignore[var-annotated]
        for entry in content["annotations"]:
            if entry["image_id"] in pairs:
                pairs[entry["image_id"]][1].append(str(entry["caption"]))
    except (KeyError, TypeError) as error:
        raise RamatchError(f"{path}: not COCO captions: an entry lacks the field {error}") from error
    return list(pairs.values())


def _karpathy(content: dict[str, Any], split: str | None) -> Pairs:
    wanted = {"train": ("train", "restval")}.get(split or "", (split,))
    return [
        (os.path.join(i.get("filepath", ""), i["filename"]), [s.get("raw", "") for s in i["sentences"]])
        for i in content["images"]
        if split is None or i.get("split") in wanted
    ]


def _tokens(path: Path) -> Pairs:
    pairs: dict[str, list[str]] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        name, tab, sentence = line.partition("\t")
        if not tab:
            raise RamatchError(f"{path}: line {number}: expected image#number, a tab, and the caption")
        pairs.setdefault(name.partition("#")[0].strip(), []).append(sentence)
    return list(pairs.items())


def _table(request: Request) -> Pairs:
    columns, rows, _ = tables.load_table(request)
    image = tables.find_column(columns, tables.IMAGE_COLUMNS)
    caption = tables.find_column([c for c in columns if c != image], CAPTION_COLUMNS)
    if image is None or caption is None:
        raise RamatchError(
            f"{request.path}: expected a column of images and one of captions; columns are {', '.join(columns[:8])}"
        )
    pairs: dict[str, list[str]] = {}
    for row in rows:
        cell = row.get(caption) or ""
        if str(row.get(image) or "").strip() or cell:
            sentences = [str(c) for c in cell] if isinstance(cell, list) else [str(cell)]
            pairs.setdefault(str(row.get(image) or "").strip(), []).extend(sentences)
    return list(pairs.items())
