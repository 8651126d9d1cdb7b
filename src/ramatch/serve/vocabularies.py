"""Vocabularies of the server by name: bundled ones, and those that clients register."""

from __future__ import annotations

import re

from ramatch import assets
from ramatch.serve.errors import ApiError

Labels = tuple[str, ...]
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class NamedVocabularies:
    """Label lists by name. The bundled ones cannot be changed; the others can be put and deleted. Used from the event
    loop only, so it needs no lock."""

    def __init__(self, max_registered: int) -> None:
        self.max_registered = max_registered
        self._bundled = {name: tuple(assets.vocabulary(name)) for name in assets.vocabulary_names()}
        self.general = self._bundled[assets.GENERAL]
        self._registered: dict[str, Labels] = {}

    def names(self) -> list[str]:
        return [*self._bundled, *sorted(self._registered)]

    def is_bundled(self, name: str) -> bool:
        return name in self._bundled

    def get(self, name: str) -> Labels:
        try:
            return self._bundled.get(name) or self._registered[name]
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
