"""Files that come with the package: vocabularies (one label per line) and photographs to try things on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ramatch.errors import RamatchError

_HERE = Path(__file__).parent


def parse_labels(lines: Iterable[str]) -> list[str]:
    """Labels of a vocabulary file: one per line, `#` begins a comment line, repeats dropped, order kept."""
    labels: dict[str, None] = {}
    for line in lines:
        label = " ".join(line.strip().lstrip("\ufeff").split())
        if label and not label.startswith("#"):
            labels.setdefault(label)
    return list(labels)


def vocabulary_names() -> list[str]:
    """Names that `vocabulary` takes."""
    return sorted(path.stem for path in (_HERE / "vocabularies").glob("*.txt"))


def vocabulary(name: str) -> list[str]:
    """Labels of a bundled vocabulary."""
    if name not in vocabulary_names():
        raise RamatchError(f"there is no bundled vocabulary '{name}'; there are: {', '.join(vocabulary_names())}")
    return parse_labels((_HERE / "vocabularies" / f"{name}.txt").read_text(encoding="utf-8").splitlines())


def photo_paths() -> list[Path]:
    """The bundled photographs (sources and licences: photos/SOURCES.md)."""
    return sorted((_HERE / "photos").glob("*.jpg"))
