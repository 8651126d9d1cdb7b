"""A folder of images, each with a .txt file of the same name: one label per line, or separated by commas."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ramatch.data.annotations import Reading, Row
from ramatch.data.formats.request import Request, read_text
from ramatch.data.formats.tables import SEPARATORS
from ramatch.data.images import is_image_name, natural_key
from ramatch.data.sources import FileImage

DESCRIPTION = "folder of images with .txt sidecars"

CLASS_FILES = ("classes.txt", "labels.txt", "class_names.txt", "obj.names")
NOT_SIDECARS = ("readme", "license", "licence", "requirements", "notes", "changelog")
YOLO_LINE = re.compile(r"^\d+(\s+-?[\d.eE+-]+){4,}$")


def detect(request: Request) -> bool:
    if not request.path.is_dir():
        return False
    stems = set()
    texts = []
    for folder, _, names in os.walk(request.path):
        for name in names:
            if is_image_name(name):
                stems.add(os.path.join(folder, os.path.splitext(name)[0]))
            elif name.lower().endswith(".txt"):
                texts.append(os.path.join(folder, os.path.splitext(name)[0]))
    return any(text in stems for text in texts)


def read(request: Request) -> Reading:
    root = request.path
    reading = Reading(rows=[], classes=_class_file(root), roots=[root])
    images: dict[str, str] = {}
    sidecars: dict[str, Path] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            stem = os.path.normpath(os.path.join(os.path.relpath(folder, root), os.path.splitext(name)[0]))
            if is_image_name(name):
                images[stem] = os.path.normpath(os.path.join(os.path.relpath(folder, root), name))
            elif name.lower().endswith(".txt") and not _is_other_text(name):
                sidecars[stem] = Path(folder, name)
    for stem in sorted(images, key=natural_key):
        if stem not in sidecars:
            reading.issues.append(("image without sidecar", "left out", images[stem]))
            continue
        source = FileImage(os.path.abspath(root / images[stem]))
        labels = parse_sidecar(read_text(sidecars[stem]))
        reading.rows.append(Row(images[stem], labels, image=source, where=sidecars[stem].name))
    for stem in sorted(sidecars.keys() - images.keys(), key=natural_key):
        reading.rows.append(Row(stem, parse_sidecar(read_text(sidecars[stem])), where=sidecars[stem].name))
    if reading.classes is not None:
        reading.notes.append(f"class names from {_class_path(root)}")
    return reading


def parse_sidecar(text: str) -> list[Any]:
    """Labels of a sidecar. Lines of YOLO boxes (`3 0.5 0.5 0.2 0.2`) give class numbers, each once."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and all(YOLO_LINE.match(line) for line in lines):
        return list(dict.fromkeys(int(line.split()[0]) for line in lines))
    if len(lines) == 1:
        separator = next((s for s in SEPARATORS if s in lines[0]), None)
        return [piece.strip() for piece in lines[0].split(separator)] if separator else lines
    return lines


def _is_other_text(name: str) -> bool:
    return name.lower() in CLASS_FILES or name.lower().startswith(NOT_SIDECARS)


def _class_path(root: Path) -> Path | None:
    return next((p for p in (root / name for name in CLASS_FILES) if p.is_file()), None)


def _class_file(root: Path) -> list[str] | None:
    path = _class_path(root)
    return [line.strip() for line in read_text(path).splitlines() if line.strip()] if path else None
