"""The authors' JSON: `{"classes": [label, ...], "images": [[path, [label, ...]], ...]}`.

Files we write may also have a "root": the folder the paths start from, when it is not the file's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ramatch.data.annotations import Reading, Row
from ramatch.data.formats.request import Request
from ramatch.errors import RamatchError

DESCRIPTION = 'JSON lists {"classes", "images"}'


def detect(request: Request) -> bool:
    content = request.json
    if not isinstance(content, dict) or not isinstance(content.get("images"), list):
        return False
    images = content["images"]
    return "classes" in content if not images else isinstance(images[0], list)


def read(request: Request) -> Reading:
    content: dict[str, Any] = request.json
    classes = content.get("classes")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(c, (str, int)) for c in classes)):
        raise RamatchError(f'{request.path}: "classes" must be a list of names')
    reading = Reading(
        rows=[],
        classes=None if classes is None else [str(c) for c in classes],
        roots=_roots(request.path, content.get("root")),
    )
    for number, entry in enumerate(content["images"]):
        where = f"images[{number}]"
        if entry in ([], None):
            reading.issues.append(("empty row", "skipped", where))
            continue
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], (str, type(None)))):
            raise RamatchError(f"{request.path}: {where} is {str(entry)[:80]!r}; expected [path, [label, ...]]")
        labels = entry[1]
        if labels is None:
            labels = []
        elif not isinstance(labels, list):
            labels = [labels]
        reading.rows.append(Row(entry[0] or "", labels, where=where))
    return reading


def _roots(path: Path, root: Any) -> list[Path]:
    folder = path.parent
    if isinstance(root, str) and root and os.path.isdir(folder / root):  # gone after a move: not an error
        return [folder / root, folder]
    return [folder]
