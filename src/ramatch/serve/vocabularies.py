"""Vocabularies of the server by name: bundled ones, and those that clients register."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

from ramatch import assets
from ramatch.serve.errors import ApiError

Labels = tuple[str, ...]
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class NamedVocabularies:
    """Label lists by name. The bundled ones cannot be changed; registered ones can be put and deleted, and lie in
    memory or in a file that several workers share. Used by one thread at a time, so it needs no lock."""

    def __init__(self, max_registered: int, file: str | Path = ":memory:") -> None:
        self.max_registered = max_registered
        self._registered = sqlite3.connect(file, timeout=30, isolation_level=None, check_same_thread=False)
        self._registered.execute("CREATE TABLE IF NOT EXISTS vocabularies (name TEXT PRIMARY KEY, labels TEXT)")
        self._bundled = {name: tuple(assets.vocabulary(name)) for name in assets.vocabulary_names()}
        self.general = self._bundled[assets.GENERAL]

    def names(self) -> list[str]:
        registered = self._registered.execute("SELECT name FROM vocabularies ORDER BY name")
        return [*self._bundled, *(name for (name,) in registered)]

    def is_bundled(self, name: str) -> bool:
        return name in self._bundled

    def get(self, name: str) -> Labels:
        if self.is_bundled(name):
            return self._bundled[name]
        asked = (name if _NAME.fullmatch(name) else "",)
        for (labels,) in self._registered.execute("SELECT labels FROM vocabularies WHERE name = ?", asked).fetchall():
            return tuple(json.loads(labels))
        hint = f"use one of {', '.join(self.names())}, or register it with PUT /v1/vocabularies/NAME"
        raise ApiError("unknown_vocabulary", f"there is no vocabulary '{name[:64]}'", hint=hint)

    def check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ApiError("bad_name", f"'{name[:64]}' is not a name for a vocabulary")
        if self.is_bundled(name):
            raise ApiError("read_only", f"'{name}' comes with ramatch and cannot be changed")

    def put(self, name: str, labels: Labels) -> bool:
        """Register or replace; True when the name is new."""
        self.check_name(name)
        known = self.names()
        if name not in known and len(known) - len(self._bundled) >= self.max_registered:
            raise ApiError("too_many_vocabularies", f"{self.max_registered} vocabularies are registered already")
        self._registered.execute("INSERT OR REPLACE INTO vocabularies VALUES (?, ?)", (name, json.dumps(labels)))
        return name not in known

    def delete(self, name: str) -> None:
        if self.is_bundled(name):
            self.check_name(name)
        self.get(name)
        self._registered.execute("DELETE FROM vocabularies WHERE name = ?", (name,))

    def close(self) -> None:
        self._registered.close()
