"""What a reader is asked to read, with the JSON content loaded at most once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ramatch.errors import RamatchError
from ramatch.files import expect, read_json


@dataclass
class Request:
    """path: the file or folder; files: several files when a pattern was given; classes: if the caller knows."""

    path: Path
    split: str | None = None
    classes: Sequence[str] | None = None
    files: Sequence[Path] = ()

    @property
    def suffix(self) -> str:
        return self.path.suffix.lower() if self.path.is_file() else ""

    @cached_property
    def json(self) -> Any:
        """Content of a .json file; None for anything else."""
        return read_json(self.path) if self.suffix == ".json" else None

    def entries(self, name: str) -> Iterator[tuple[str, Any]]:
        """(where, entry) of the list `name` in a JSON object."""
        content = expect(self.json, dict, f"{self.path}: the content")
        for number, entry in enumerate(expect(content.get(name), list, f'{self.path}: "{name}"')):
            yield f"{name}[{number}]", entry

    def objects(self, name: str, *fields: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(file and place, object) of such a list; each must have `fields`, of them names and numbers only."""
        for place, entry in self.entries(name):
            where = f"{self.path}: {place}"
            for field in fields:
                if not isinstance(expect(entry, dict, where).get(field), (str, int, float)):
                    raise RamatchError(f"{where} lacks the field '{field}'")
            yield where, expect(entry, dict, where)
