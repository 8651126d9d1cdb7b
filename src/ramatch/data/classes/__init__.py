"""Class lists of the benchmarks, one text file each."""

from __future__ import annotations

from pathlib import Path

from ramatch.errors import RamatchError
from ramatch.files import read_lines


def class_list(name: str) -> tuple[str, ...]:
    """A class list of the package: coco_seen48, coco_unseen17, nuswide_seen925, ..., voc20."""
    lists = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.txt"))}
    if name not in lists:
        raise RamatchError(f"no class list {name!r}; there are {', '.join(lists)}")
    return tuple(read_lines(lists[name]))
