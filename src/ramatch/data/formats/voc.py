"""Pascal VOC: one XML file per image, with objects, boxes and the `difficult` flag."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from ramatch.data.annotations import Box, Reading, Request, Row
from ramatch.data.classes import class_list
from ramatch.data.images import natural_key
from ramatch.errors import RamatchError
from ramatch.files import expect_numbers, read_lines

DESCRIPTION = "VOC XML folder"


def detect(request: Request) -> bool:
    return request.path.is_dir() and _layout(request.path) is not None


def read(request: Request) -> Reading:
    """`split` names a list in ImageSets/Main. Objects marked difficult count as present; their box is marked."""
    layout = _layout(request.path)
    if layout is None:
        raise RamatchError(f"{request.path}: no folder of VOC's XML files")
    base, xml_folder = layout
    places = [base / "JPEGImages", base / "images", base, xml_folder]
    reading = Reading(roots=[p for p in dict.fromkeys(places) if p.is_dir()])
    paths = {p.stem: p for p in sorted(xml_folder.glob("*.xml"), key=natural_key)}
    if request.split is not None:
        chosen = _split_stems(base, request.split)
        absent = [stem for stem in chosen if stem not in paths]
        reading.issues += [("missing annotation", "skipped", f"{stem}.xml") for stem in absent]
        paths = {stem: path for stem, path in paths.items() if stem in chosen}
    reading.rows = [_read_file(path) for path in paths.values()]
    twenty = class_list("voc20")
    if {label for row in reading.rows for label in row.labels} <= set(twenty):
        reading.classes = list(twenty)
    difficult = sum(box.difficult for row in reading.rows for box in row.boxes)
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


def _split_stems(base: Path, split: str) -> dict[str, None]:
    listing = base / "ImageSets" / "Main" / f"{split}.txt"
    if listing.is_file():
        return dict.fromkeys(line.split()[0] for line in read_lines(listing))
    known = ", ".join(splits(base)) or "none"
    raise RamatchError(f"{base}: no split {split!r} (no file {listing}); splits here: {known}")


def _read_file(path: Path) -> Row:
    text = path.read_bytes()
    if b"<!ENTITY" in text or b"<!DOCTYPE" in text:  # never needed here, and the way XML bombs are built
        raise RamatchError(f"{path}: XML with a document type or entities is not accepted")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise RamatchError(f"{path}: not a VOC annotation ({error})") from error
    row = Row((root.findtext("filename") or "").strip() or path.stem, [], where=path.name)
    size = [root.findtext("size/width"), root.findtext("size/height")]
    width, height = expect_numbers(size, f"{path}: the size") if all(size) else (0, 0)
    row.size = (int(width), int(height)) if width > 0 and height > 0 else None
    for item in root.iter("object"):
        name = (item.findtext("name") or "").strip()
        if name not in row.labels:
            row.labels.append(name)
        box = item.find("bndbox")
        if box is not None:
            sides = [box.findtext(side) for side in ("xmin", "ymin", "xmax", "ymax")]
            left, top, right, bottom = expect_numbers(sides, f"{path}: the box of {name!r}")
            hard = (item.findtext("difficult") or "0").strip() == "1"
            row.boxes.append(Box(name, (left, top, right, bottom), difficult=hard))
    return row
