"""A folder of images, each with a .txt file of the same name: one label per line, or separated by commas."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ramatch.data.annotations import Reading, Request, Row
from ramatch.data.formats.tables import SEPARATORS
from ramatch.data.images import is_image_name, natural_key
from ramatch.data.sources import FileImage
from ramatch.files import read_lines, read_text

DESCRIPTION = "folder of images with .txt sidecars"

CLASS_FILES = ("classes.txt", "labels.txt", "class_names.txt", "obj.names")
NOT_SIDECARS = (*CLASS_FILES, "readme", "license", "licence", "requirements", "notes", "changelog")
YOLO_LINE = re.compile(r"^\d{1,9}(\s+-?[\d.eE+-]+){4,}$")


def detect(request: Request) -> bool:
    images, sidecars = _walk(request.path)
    return not images.keys().isdisjoint(sidecars)


def read(request: Request) -> Reading:
    root = request.path
    reading = Reading(roots=[root])
    images, sidecars = _walk(root)
    for stem in sorted(images.keys() | sidecars.keys(), key=natural_key):
        image, sidecar = images.get(stem), sidecars.get(stem)
        if sidecar is None:
            reading.issues.append(("image without sidecar", "left out", str(image)))
        else:
            source = FileImage(os.path.abspath(root / image)) if image else None
            labels = parse_sidecar(read_text(sidecar))
            reading.rows.append(Row(image or stem, labels, image=source, where=sidecar.name))
    class_file = next((p for p in (root / name for name in CLASS_FILES) if p.is_file()), None)
    if class_file is not None:
        reading.classes = read_lines(class_file)
        reading.notes.append(f"class names from {class_file}")
    return reading


def _walk(root: Path) -> tuple[dict[str, str], dict[str, Path]]:
    """Images and sidecars under a folder, by their path without extension."""
    images: dict[str, str] = {}
    sidecars: dict[str, Path] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), root)
            stem = os.path.splitext(path)[0]
            if is_image_name(name):
                images[stem] = path
            elif name.lower().endswith(".txt") and not name.lower().startswith(NOT_SIDECARS):
                sidecars[stem] = Path(folder, name)
    return images, sidecars


def parse_sidecar(text: str) -> list[Any]:
    """Labels of a sidecar. Lines of YOLO boxes (`3 0.5 0.5 0.2 0.2`) give class numbers, each once."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and all(YOLO_LINE.match(line) for line in lines):
        return list(dict.fromkeys(int(line.split()[0]) for line in lines))
    separator = next((s for s in SEPARATORS if s in lines[0]), None) if len(lines) == 1 else None
    return [piece.strip() for piece in lines[0].split(separator)] if separator else lines
