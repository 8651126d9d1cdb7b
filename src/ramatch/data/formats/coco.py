"""COCO instances JSON: images, annotations with boxes, categories. An image's labels are its categories."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ramatch.data.annotations import Box, Reading, Row
from ramatch.data.formats.request import Request
from ramatch.errors import RamatchError

DESCRIPTION = "COCO instances JSON"


def detect(request: Request) -> bool:
    content = request.json
    return (
        isinstance(content, dict)
        and {"images", "annotations", "categories"} <= content.keys()
        and (not content["images"] or isinstance(content["images"][0], dict))
    )


def read(request: Request) -> Reading:
    """Crowd annotations count as the label being there (their box is marked); images without annotation stay."""
    content: dict[str, Any] = request.json
    reading = Reading(rows=[], roots=image_roots(request.path))
    try:
        names = {c["id"]: str(c["name"]) for c in content["categories"]}
        rows = {i["id"]: Row(file_name(i), [], size=_size(i), where=f"image {i['id']}") for i in content["images"]}
    except (KeyError, TypeError) as error:
        raise RamatchError(f"{request.path}: an image or category lacks the field {error}") from error
    crowds = 0
    for entry in content["annotations"]:
        row, name = rows.get(entry.get("image_id")), names.get(entry.get("category_id"))
        if row is None or name is None:
            what = f"image {entry.get('image_id')}" if row is None else f"category {entry.get('category_id')}"
            reading.issues.append(("dangling annotation", "skipped", f"annotation {entry.get('id')}: no {what}"))
            continue
        if name not in row.labels:
            row.labels.append(name)
        crowd = bool(entry.get("iscrowd"))
        crowds += crowd
        if (box := entry.get("bbox")) and len(box) == 4:
            x, y, w, h = map(float, box)
            row.boxes.append(Box(name, (x, y, x + w, y + h), crowd=crowd))
    reading.rows = list(rows.values())
    reading.classes = list(names.values())
    if crowds:
        reading.notes.append(f"{crowds:,} crowd annotations count as their label being present")
    return reading


def file_name(image: dict[str, Any]) -> str:
    """File name of an image entry; LVIS gives only the address, of which folder and name are taken."""
    if image.get("file_name"):
        return str(image["file_name"])
    return "/".join(str(image.get("coco_url", "")).split("/")[-2:])


def image_roots(path: Path) -> list[Path]:
    """Folders where the images of `annotations/instances_train2017.json` usually lie."""
    folder = path.parent
    base = folder.parent if folder.name.lower() == "annotations" else folder
    subset = re.sub(r"^(instances|captions|person_keypoints)_", "", path.stem)
    places = [folder, base, base / subset, base / "images", base / "images" / subset]
    return [p for p in dict.fromkeys(places) if p.is_dir()]


def _size(image: dict[str, Any]) -> tuple[int, int] | None:
    width, height = image.get("width"), image.get("height")
    return (int(width), int(height)) if width and height else None
