"""Pascal VOC: one XML file per image, with objects, boxes and the `difficult` flag."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

from ramatch.data.annotations import Box, Reading, Row
from ramatch.data.formats.request import Request, read_text
from ramatch.data.images import natural_key
from ramatch.errors import RamatchError

DESCRIPTION = "VOC XML folder"


def detect(request: Request) -> bool:
    return request.path.is_dir() and _layout(request.path) is not None


def read(request: Request) -> Reading:
    """`split` names a list in ImageSets/Main. Objects marked difficult count as present; their box is marked."""
    layout = _layout(request.path)
    assert layout is not None
    base, xml_folder = layout
    stems = _split_stems(base, request.split)
    paths = sorted(xml_folder.glob("*.xml"), key=natural_key)
    reading = Reading(rows=[], roots=_roots(base, xml_folder))
    if stems is not None:
        present = {p.stem for p in paths}
        for stem in stems:
            if stem not in present:
                reading.issues.append(("missing annotation", "skipped", f"{stem}.xml"))
        chosen = set(stems)
        paths = [p for p in paths if p.stem in chosen]
    difficult = 0
    for path in paths:
        row = _read_file(path)
        difficult += sum(box.difficult for box in row.boxes)
        reading.rows.append(row)
    reading.classes = _voc_classes(reading.rows)
    if difficult:
        reading.notes.append(f"{difficult:,} objects marked difficult count as present")
    return reading


def splits(folder: Path) -> list[str]:
    """Names of the image lists, without the per-class ones (`cat_train`)."""
    layout = _layout(folder)
    lists = sorted(p.stem for p in (layout[0] / "ImageSets" / "Main").glob("*.txt")) if layout else []
    return [name for name in lists if "_" not in name]


def _layout(folder: Path) -> tuple[Path, Path] | None:
    """(base, folder of XML files) for a VOC folder, a VOCdevkit around one, or XML files beside the images."""
    years = sorted(folder.glob("VOC20*")) + sorted(folder.glob("VOCdevkit/VOC20*"))
    for base in [folder, *years]:
        for xml_folder in (base / "Annotations", base / "annotations", base):
            if xml_folder.is_dir() and next(xml_folder.glob("*.xml"), None) is not None:
                return base, xml_folder
    return None


def _roots(base: Path, xml_folder: Path) -> list[Path]:
    places = [base / "JPEGImages", base / "images", base, xml_folder]
    return [p for p in dict.fromkeys(places) if p.is_dir()]


def _split_stems(base: Path, split: str | None) -> list[str] | None:
    if split is None:
        return None
    listing = base / "ImageSets" / "Main" / f"{split}.txt"
    if not listing.is_file():
        known = ", ".join(splits(base)) or "none"
        raise RamatchError(f"{base}: no split {split!r} (no file {listing}); splits here: {known}")
    return [line.split()[0] for line in read_text(listing).splitlines() if line.strip()]


def _read_file(path: Path) -> Row:
    text = path.read_bytes()
    if b"<!ENTITY" in text or b"<!DOCTYPE" in text:  # never needed here, and the way XML bombs are built
        raise RamatchError(f"{path}: XML with a document type or entities is not accepted")
    try:
        root = ElementTree.fromstring(text)
        row = Row((root.findtext("filename") or "").strip() or path.stem, [], where=path.name)
        width, height = root.findtext("size/width"), root.findtext("size/height")
        if width and height and float(width) > 0 and float(height) > 0:
            row.size = (int(float(width)), int(float(height)))
        for item in root.iter("object"):
            name = (item.findtext("name") or "").strip()
            if name not in row.labels:
                row.labels.append(name)
            box = item.find("bndbox")
            if box is not None:
                corners = [float(box.findtext(side) or "nan") for side in ("xmin", "ymin", "xmax", "ymax")]
                hard = (item.findtext("difficult") or "0").strip() == "1"
                row.boxes.append(Box(name, (corners[0], corners[1], corners[2], corners[3]), difficult=hard))
    except (ElementTree.ParseError, ValueError) as error:
        raise RamatchError(f"{path}: not a VOC annotation ({error})") from error
    return row


def _voc_classes(rows: list[Row]) -> list[str] | None:
    """VOC's own twenty, in their order, if nothing else occurs."""
    text = (files("ramatch.data") / "classes" / "voc20.txt").read_text(encoding="utf-8")
    twenty = text.split()
    return twenty if {label for row in rows for label in row.labels} <= set(twenty) else None
