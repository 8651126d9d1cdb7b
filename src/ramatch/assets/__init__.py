"""Files that come with the package: vocabularies (one label per line) and photographs to try things on."""

from __future__ import annotations

from pathlib import Path

from ramatch.errors import RamatchError
from ramatch.labels import read_labels

_HERE = Path(__file__).parent


def vocabulary_names() -> list[str]:
    """Names that `vocabulary` takes."""
    return sorted(path.stem for path in (_HERE / "vocabularies").glob("*.txt"))


def vocabulary(name: str) -> list[str]:
    """Labels of a bundled vocabulary."""
    if name not in vocabulary_names():
        raise RamatchError(f"there is no bundled vocabulary '{name}'; there are: {', '.join(vocabulary_names())}")
    return list(read_labels(_HERE / "vocabularies" / f"{name}.txt").names)


def photo_paths() -> list[Path]:
    """The bundled photographs (sources and licences: photos/SOURCES.md)."""
    return sorted((_HERE / "photos").glob("*.jpg"))
