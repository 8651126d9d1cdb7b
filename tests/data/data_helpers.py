"""Small pictures and shards, written on the spot."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from PIL import Image


def encode(colour: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (8, 6), kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, kind)
    return buffer.getvalue()


def put(root: Path, *names: str) -> Path:
    """Write a picture under each name; the n-th has red = n, so that pictures can be told apart."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (number, 100, 50)).save(path, "PNG")
    return root


def put_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def put_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path
