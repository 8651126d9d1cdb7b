"""The authors' JSON: `{"classes": [label, ...], "images": [[path, [label, ...]], ...]}`.

Files we write may also have a "root": the folder the paths start from, when it is not the file's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ramatch.data.annotations import Reading, Request, Row
from ramatch.errors import RamatchError
from ramatch.files import shown, write_text

DESCRIPTION = 'JSON lists {"classes", "images"}'


def detect(request: Request) -> bool:
    content = request.json
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        return False
    images = content["images"]
    return "classes" in content if not images else isinstance(images[0], list)


def read(request: Request) -> Reading:
    entries, folder = list(request.entries("images")), request.path.parent
    classes, root = request.json.get("classes"), request.json.get("root")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(c, (str, int)) for c in classes)):
        raise RamatchError(f'{request.path}: "classes" must be a list of names')
    reading = Reading(classes=None if classes is None else list(map(str, classes)), roots=[folder])
    if isinstance(root, str) and root and "\0" not in root and os.path.isdir(folder / root):
        home = os.path.abspath(folder)  # gone after a move: no error
        if os.path.abspath(os.path.join(home, root)).startswith(os.path.join(home, "")):
            reading.roots.insert(0, folder / root)
        else:
            reading.notes.append(
                f"its root {shown(root)} lies outside its folder: name it as images root to read there"
            )
    for where, entry in entries:
        if entry in ([], None):
            entry = ["", []]
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], (str, type(None)))):
            raise RamatchError(f"{request.path}: {where} is {shown(entry)}; expected [path, [label or caption, ...]]")
        labels = [] if entry[1] is None else entry[1] if isinstance(entry[1], list) else [entry[1]]
        reading.rows.append(Row(entry[0] or "", labels, where=where))
    return reading


def write(
    path: Path, classes: Sequence[str], images: Iterable[tuple[str, Sequence[str]]], root: Path | None = None
) -> None:
    content: dict[str, Any] = {"classes": list(classes), "images": [[key, list(labels)] for key, labels in images]}
    if root is not None:
        content["root"] = str(root)
    write_text(path, json.dumps(content, ensure_ascii=False, separators=(",", ":")))
