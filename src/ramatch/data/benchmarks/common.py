"""What the loaders of distributed data sets share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ramatch.data.records import loose
from ramatch.errors import RamatchError

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
