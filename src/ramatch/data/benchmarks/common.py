"""What the loaders of distributed data sets share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ramatch.data.formats.tables import read_csv
from ramatch.data.records import loose
from ramatch.errors import RamatchError, require

Pairs = list[tuple[str, list[str]]]  # (path relative to the root, labels)


@dataclass(frozen=True)
class Distribution:
    """A data set as its owners give it out: where it was unpacked, and the page to get it from."""

    root: Path
    page: str

    def need(self, what: str, *choices: str) -> Path:
        """The first of `choices` (relative paths) that exists, or an error that says what is expected where."""
        for choice in choices:
            if (self.root / choice).exists():
                return self.root / choice
        expected = " or ".join(choices)
        raise RamatchError(f"{self.root}: {what} not found: expected {expected}; download it from {self.page}")

    def images(self, *choices: str) -> str:
        """The image folder, as the paths of images begin."""
        return self.need("image folder", *choices).relative_to(self.root).as_posix()


@dataclass
class Owned:
    """A distributed data set: its training and test images with all labels, before any seen/unseen split.

    warning: said when no list of test images is given, because then the test is not the paper's.
    """

    train: Pairs
    test: Pairs
    notes: list[str] = field(default_factory=list)
    warning: str = ""


def check_names(found: Sequence[str], classes: Sequence[str], where: Path, at_least: int | None = None) -> None:
    """Names by position must be ours up to spelling, all of them or at least that many."""
    wrong = [f"{a!r} for {b!r}" for a, b in zip(found, classes, strict=False) if plain(a) != plain(b)]
    allowed = 0 if at_least is None else len(classes) - at_least
    if len(found) != len(classes) or len(wrong) > allowed:
        raise RamatchError(
            f"{where}: expected the {len(classes)} labels {', '.join(classes[:4])}, ..., found {len(found)}; "
            f"differing: {', '.join(wrong[:5]) or 'their number'}"
        )


def plain(name: str) -> str:
    """Spelling for comparison: without the owners' prefixes (`hs-`, `attach-`), case, spaces, `&`."""
    head, dash, tail = name.partition("-")
    if dash and head.lower() in ("hs", "ub", "lb", "shoes", "attach", "action"):
        name = tail
    return loose(name.replace("&", "and"))


def read_one_hot(file: Path, classes: Sequence[str], at_least: int | None = None) -> dict[str, list[str]]:
    """Image → labels, from a table with a header, the image first, then a column of 0 and 1 for each class in order."""
    header, *table = [[cell.strip() for cell in row[: len(classes) + 1]] for row in read_csv(file) if any(row)]
    check_names(header[1:], classes, file, at_least)
    rows: dict[str, list[str]] = {}
    for number, (name, *values) in enumerate(table, start=2):
        if len(values) != len(classes) or not set(values) <= {"0", "1", "0.0", "1.0"}:
            raise RamatchError(f"{file}: line {number} is not {len(classes)} values of 0 and 1")
        rows[name] = [c for c, v in zip(classes, values, strict=True) if v.startswith("1")]
    return rows


def load_mat(path: Path) -> dict[str, Any]:
    scipy_io = require("scipy.io", extra="data")
    try:
        return scipy_io.loadmat(str(path))
    except NotImplementedError as error:  # v7.3 is another format (HDF5)
        raise RamatchError(f"{path}: MATLAB v7.3 file; the owners' file is older, download it again") from error
    except Exception as error:  # the parser raises many kinds on rubbish
        raise RamatchError(f"{path}: not a readable MATLAB file ({error})") from error


def strings(cells: Any) -> list[str]:
    """A MATLAB cell array of strings, however deeply nested."""
    found: list[str] = []
    stack = [cells]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            found.append(item.strip())
        elif isinstance(item, np.ndarray):
            stack.extend(reversed(item.ravel().tolist() if item.dtype.kind in "OU" else []))
    return found


def unwrap(item: Any) -> Any:
    """Strip the 1x1 arrays that MATLAB puts around everything."""
    while isinstance(item, np.ndarray) and item.size == 1 and (item.dtype == object or item.dtype.names):
        item = item.ravel()[0]
    return item


def label_rows(matrix: np.ndarray, classes: Sequence[str]) -> list[list[str]]:
    return [[classes[i] for i in np.flatnonzero(row == 1).tolist()] for row in np.asarray(matrix)]
