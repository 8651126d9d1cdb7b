"""Files that come with the package: vocabularies (one label per line; `general` is a table that also says what its
words have to do with each other, see `ramatch.data.lexicon`) and photographs to try things on."""

from __future__ import annotations

from pathlib import Path

from ramatch.errors import RamatchError
from ramatch.files import read_lines
from ramatch.labels import read_labels

_HERE = Path(__file__).parent
GENERAL = "general"  # looked for when nobody names labels


def vocabulary_names() -> list[str]:
    """Names that `vocabulary` takes."""
    return sorted(path.stem for path in (_HERE / "vocabularies").glob("*.t[sx][vt]"))


def vocabulary(name: str) -> list[str]:
    """Labels of a bundled vocabulary."""
    if name not in vocabulary_names():
        raise RamatchError(f"there is no bundled vocabulary '{name}'; there are: {', '.join(vocabulary_names())}")
    if name == GENERAL:
        lines = read_lines(_HERE / "vocabularies" / f"{name}.tsv")
        return [line.partition("\t")[0] for line in lines[1:]]
    return list(read_labels(_HERE / "vocabularies" / f"{name}.txt").names)


def photo_paths() -> list[Path]:
    """The bundled photographs (sources and licences: photos/SOURCES.md)."""
    return sorted((_HERE / "photos").glob("*.jpg"))
