"""COCO instances JSON: images, annotations with boxes, categories. An image's labels are its categories."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from ramatch.data.annotations import Box, Reading, Request, Row
from ramatch.files import expect, expect_numbers

DESCRIPTION = "COCO instances JSON"


def detect(request: Request) -> bool:
    content = request.json
    if not isinstance(content, dict) or not {"images", "annotations", "categories"} <= content.keys():
        return False
    images = content["images"]
    return isinstance(images, list) and (not images or isinstance(images[0], dict))


def read(request: Request) -> Reading:
    """Crowd annotations count as the label being there (their box is marked); images without annotation stay."""
    names = {entry["id"]: str(entry["name"]) for _, entry in request.objects("categories", "id", "name")}
    rows = {
        entry["id"]: Row(file_name(entry), [], size=_size(entry, where), where=f"image {entry['id']}")
        for where, entry in request.objects("images", "id")
    }
    reading = Reading(list(rows.values()), list(names.values()), image_roots(request.path))
    crowds = 0
    for where, entry in request.objects("annotations"):
        image, category = entry.get("image_id"), entry.get("category_id")
        row = rows.get(image) if isinstance(image, Hashable) else None
        name = names.get(category) if isinstance(category, Hashable) else None
        if row is None or name is None:
            what = f"image {image}" if row is None else f"category {category}"
            reading.issues.append(("dangling annotation", "skipped", f"annotation {entry.get('id')}: no {what}"))
            continue
        if name not in row.labels:
            row.labels.append(name)
        crowd = bool(entry.get("iscrowd"))
        crowds += crowd
        if (box := entry.get("bbox")) and len(expect(box, list, f"{where}: bbox")) == 4:
            x, y, w, h = expect_numbers(box, f"{where}: bbox")
            row.boxes.append(Box(name, (x, y, x + w, y + h), crowd=crowd))
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


def _size(image: dict[str, Any], where: str) -> tuple[int, int] | None:
    if not (image.get("width") and image.get("height")):
        return None
    width, height = expect_numbers((image["width"], image["height"]), f"{where}: width and height")
    return int(width), int(height)
