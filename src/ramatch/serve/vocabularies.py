"""Vocabularies of the server by name: bundled ones, and those that clients register."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from ramatch import assets
from ramatch.errors import RamatchError
from ramatch.files import read_lines, write_text
from ramatch.serve.errors import ApiError

Labels = tuple[str, ...]
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class NamedVocabularies:
    """Label lists by name. The bundled ones cannot be changed; those in `registered` can be put and deleted. Used from
    the event loop only, so it needs no lock."""

    def __init__(self, max_registered: int, registered: MutableMapping[str, Labels]) -> None:
        self.max_registered, self._registered = max_registered, registered
        self._bundled = {name: tuple(assets.vocabulary(name)) for name in assets.vocabulary_names()}
        self.general = self._bundled[assets.GENERAL]

    def names(self) -> list[str]:
        return [*self._bundled, *sorted(self._registered)]

    def is_bundled(self, name: str) -> bool:
        return name in self._bundled

    def get(self, name: str) -> Labels:
        try:
            return self._bundled.get(name) or self._registered[name if _NAME.fullmatch(name) else ""]
        except KeyError:
            hint = f"use one of {', '.join(self.names())}, or register it with PUT /v1/vocabularies/NAME"
            raise ApiError("unknown_vocabulary", f"there is no vocabulary '{name[:64]}'", hint=hint) from None

    def check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ApiError("bad_name", f"'{name[:64]}' is not a name for a vocabulary")
        if self.is_bundled(name):
            raise ApiError("read_only", f"'{name}' comes with ramatch and cannot be changed")

    def put(self, name: str, labels: Labels) -> bool:
        """Register or replace; True when the name is new."""
        self.check_name(name)
        new = name not in self._registered
        if new and len(self._registered) >= self.max_registered:
            raise ApiError("too_many_vocabularies", f"{self.max_registered} vocabularies are registered already")
        self._registered[name] = labels
        return new

    def delete(self, name: str) -> None:
        if self.is_bundled(name):
            self.check_name(name)
        self.get(name)
        del self._registered[name]


class SharedVocabularies(MutableMapping[str, Labels]):
    """Registered vocabularies in a folder that all workers see. Their names have been checked."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __getitem__(self, name: str) -> Labels:
        try:
            return tuple(read_lines(self.folder / f"{name}.txt"))
        except RamatchError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, labels: Labels) -> None:
        write_text(self.folder / f"{name}.txt", "\n".join(labels))

    def __delitem__(self, name: str) -> None:
        (self.folder / f"{name}.txt").unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        return iter([path.stem for path in self.folder.glob("[a-z0-9]*.txt")])

    def __len__(self) -> int:
        return len(list(iter(self)))
