"""Images with sentences: the JSON lists form, COCO captions, Flickr8k's token file, tables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from ramatch.data.annotations import Request, Row, Summary, locate
from ramatch.data.formats import coco, lists, tables
from ramatch.data.images import load_image
from ramatch.data.records import Paths
from ramatch.data.sources import ImageSource, Locator
from ramatch.errors import RamatchError
from ramatch.files import expect, read_text
from ramatch.labels import tidy

CAPTION_COLUMNS = ("captions", "caption", "sentences", "sentence", "text", "texts", "description", "comment")


@dataclass(frozen=True, slots=True)
class CaptionRecord:
    """One picture and its sentences."""

    key: str
    captions: tuple[str, ...]
    image: ImageSource

    def load(self) -> Image.Image:
        """The picture, upright, RGB."""
        return load_image(self.image.read(), name=str(self.image))


@dataclass
class Captions:
    """Pictures with sentences, and an account of how they were understood."""

    records: list[CaptionRecord]
    summary: Summary


def read_captions(path: str | os.PathLike, images_roots: Paths | None = None, *, split: str | None = None) -> Captions:
    """Read captions from a file, or from a folder with one `captions*.json` (or a single table) in it.

    Forms: `{"images": [[path, [caption, ...]], ...]}`; COCO captions JSON; Karpathy's JSON (`split` picks its
    train, val or test images); Flickr8k's token file (`a.jpg#0<TAB>caption`); CSV, TSV or JSONL with an image and
    a caption column, one or several rows per image.

    images_roots: folders or tar files with the images, beside those next to the file. Missing images and empty
    captions are left out, images listed twice are merged, foreign root paths repaired; all counted.
    """
    file = _caption_file(Path(os.path.expanduser(path)))
    form, rows = _read_rows(Request(file, split))
    given = [images_roots] if isinstance(images_roots, (str, os.PathLike)) else list(images_roots or [])
    locator = Locator([*given, *coco.image_roots(file)], prefer=f"{split or ''} {file.stem}")
    summary = Summary(str(file), form, split)
    found: dict[str, tuple[ImageSource, list[str]]] = {}
    for row in rows:
        image, key = locate(row, locator, summary)
        if image is None:
            continue
        if key in found:
            summary.add_issue("duplicate image", "merged, with the captions of both", key)
        sentences = found.setdefault(key, (image, []))[1]
        for sentence in map(tidy, map(str, row.labels)):
            if sentence:
                sentences.append(sentence)
            else:
                summary.add_issue("empty caption", "skipped", key)
    for key in (key for key, (_, sentences) in found.items() if not sentences):
        summary.add_issue("image without captions", "left out", key)
    records = [CaptionRecord(key, tuple(sentences), image) for key, (image, sentences) in found.items() if sentences]
    if not records:
        raise RamatchError(
            f"{file}: none of its {len(rows):,} images was found with a caption; looked in {locator.describe()}; "
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


def _read_rows(request: Request) -> tuple[str, list[Row]]:
    """The form, and rows whose labels are sentences."""
    content = request.json
    if isinstance(content, dict) and isinstance(content.get("images"), list):
        if "annotations" in content:
            return "COCO captions JSON", _coco(request)
        if content["images"] and isinstance(content["images"][0], dict):
            return "Karpathy JSON", list(_karpathy(request))
        return 'JSON lists {"images"}', lists.read(request).rows
    if request.suffix in (".txt", ".token"):
        first = read_text(request.path).lstrip().split("\n", 1)[0]
        if "#" in first.split("\t")[0] and "\t" in first:
            return "Flickr token file", _tokens(request.path)
    return "captions table", _table(request)


def _coco(request: Request) -> list[Row]:
    rows = {entry["id"]: Row(coco.file_name(entry), []) for _, entry in request.objects("images", "id")}
    for _, entry in request.objects("annotations", "image_id", "caption"):
        if entry["image_id"] in rows:
            rows[entry["image_id"]].labels.append(entry["caption"])
    return list(rows.values())


def _karpathy(request: Request) -> Iterator[Row]:
    wanted = ("train", "restval") if request.split == "train" else (request.split,)
    for where, entry in request.objects("images", "filename"):
        if request.split is None or entry.get("split") in wanted:
            sentences = [expect(s, dict, where) for s in expect(entry.get("sentences"), list, f"{where}: sentences")]
            name = os.path.join(str(entry.get("filepath", "")), str(entry["filename"]))
            yield Row(name, [sentence.get("raw", "") for sentence in sentences])


def _tokens(path: Path) -> list[Row]:
    rows: dict[str, Row] = {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        name, tab, sentence = line.partition("\t")
        if not tab and line.strip():
            raise RamatchError(f"{path}: line {number}: expected image#number, a tab, and the caption")
        if tab:
            key = name.partition("#")[0].strip()
            rows.setdefault(key, Row(key, [])).labels.append(sentence)
    return list(rows.values())


def _table(request: Request) -> list[Row]:
    columns, entries, _ = tables.load_table(request)
    image = tables.find_column(columns, tables.IMAGE_COLUMNS)
    caption = tables.find_column([c for c in columns if c != image], CAPTION_COLUMNS)
    if image is None or caption is None:
        raise RamatchError(
            f"{request.path}: expected a column of images and one of captions; columns are {', '.join(columns[:8])}"
        )
    rows: dict[str, Row] = {}
    for entry in entries:
        key, cell = str(entry.get(image) or "").strip(), entry.get(caption) or ""
        if key or cell:
            rows.setdefault(key, Row(key, [])).labels.extend(cell if isinstance(cell, list) else [cell])
    return list(rows.values())
