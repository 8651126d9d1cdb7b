"""Where data lies, which part of it is meant, and which of its images are held out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import RamatchError
from .annotations import Annotations
from .records import Paths, list_splits, read_annotations


def find_data(path: str | os.PathLike) -> Path:
    """The path itself; or, for a relative one, that name in $RAMATCH_DATA."""
    given = Path(os.path.expanduser(path))
    if not str(path):
        raise RamatchError("no data given: set data.path to an annotation file or a folder")
    if given.exists() or given.is_absolute() or any(c in str(given) for c in "*?["):
        return given
    looked = str(given)
    if folder := os.environ.get("RAMATCH_DATA"):
        place = Path(folder) / given.name
        if place.exists():
            return place
        looked += f", {place}"
    raise RamatchError(f"no such data: {given} (looked at {looked}); set data.path, or RAMATCH_DATA to its folder")


def read_split(path: Path, split: str | None, *, classes: Any = None, images: Paths | None = None) -> Annotations:
    """Annotations of a path; the split only where the path has several."""
    known = list_splits(path) if split is not None and path.exists() else []
    if split is None or path.is_file():
        several = split in known
    else:  # among several files the reader knows which one is meant, or says what there is
        several = bool(known) or (path / split).is_dir() or any(path.glob(f"{split}*.tar"))
    return read_annotations(path, split=split if several else None, classes=classes, images_root=images)


def stable_order(keys: Sequence[str], salt: str = "") -> list[int]:
    """Positions of the keys in an order that depends on their names alone: for splits that outlive a file's order."""
    ranks = [hashlib.blake2b(f"{salt}{key}".encode(), digest_size=8).digest() for key in keys]
    return sorted(range(len(keys)), key=ranks.__getitem__)


def hold_out(keys: Sequence[str], part: float, salt: str = "") -> list[int]:
    """Positions of `part` of the keys, chosen by their names: so many if it is whole, else about that share, at least
    one."""
    count = part if isinstance(part, int) else max(1, round(part * len(keys)))
    return sorted(stable_order(keys, salt)[:count])
