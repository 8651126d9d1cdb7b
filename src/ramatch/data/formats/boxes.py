"""JSON boxes by split: `{"train": {path: [[label, [cx, cy, w, h]], ...], ...}, "test": {...}}`, centers and sizes as
shares of the picture. For `eval --localise` on pictures that were resized or squashed after they were annotated."""

from __future__ import annotations

from typing import Any

from ramatch.data.annotations import Box, Reading, Request, Row
from ramatch.errors import RamatchError
from ramatch.files import expect, expect_numbers, shown

DESCRIPTION = "JSON boxes {split: {path: [[label, [cx, cy, w, h]]]}}"
SIDE = 500  # of the square that shares are counted on: of a picture of this size, pixels of the pointing game are


def detect(request: Request) -> bool:
    content = request.json
    if not isinstance(content, dict) or not content or not all(isinstance(part, dict) for part in content.values()):
        return False
    entries = next((entry for part in content.values() for entry in part.values()), None)
    return isinstance(entries, list) and bool(entries) and _is_box(entries[0])


def read(request: Request) -> Reading:
    """The split asked for, or all; a picture of several splits is one picture."""
    parts, reading = request.json, Reading(roots=[request.path.parent])
    if request.split is not None and request.split not in parts:
        raise RamatchError(f"{request.path}: no split '{request.split}'; it has {', '.join(parts)}")
    for name in [request.split] if request.split is not None else list(parts):
        for path, entries in parts[name].items():
            where = f"{name}: {path}"
            boxes = [_box(entry, f"{request.path}: {where}") for entry in expect(entries, list, where)]
            labels = list(dict.fromkeys(box.label for box in boxes))
            reading.rows.append(Row(path, labels, boxes=boxes, size=(SIDE, SIDE), where=where))
    return reading


def _is_box(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list) and len(entry[1]) == 4


def _box(entry: Any, where: str) -> Box:
    if not _is_box(entry):
        raise RamatchError(f"{where}: {shown(entry)} is no box; expected [label, [cx, cy, w, h]]")
    cx, cy, w, h = (SIDE * share for share in expect_numbers(entry[1], where))
    return Box(str(entry[0]), (cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2))
