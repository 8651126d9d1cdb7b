"""Vocabularies of the server: bundled and registered ones by name, encoded ones in a least-recently-used cache."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ramatch import assets
from ramatch.serve.errors import ApiError

Labels = tuple[str, ...]
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class EncodedVocabularies:
    """LRU of `encode(labels)`, keyed by the labels themselves. Used from the model's thread only, so a vocabulary
    that many requests ask for at once is encoded once."""

    def __init__(self, encode: Callable[[Labels], Any], size: int) -> None:
        self.encode, self.size = encode, size
        self.hits = self.misses = 0
        self._entries: OrderedDict[Labels, Any] = OrderedDict()

    def get(self, labels: Labels) -> Any:
        if labels in self._entries:
            self.hits += 1
            self._entries.move_to_end(labels)
            return self._entries[labels]
        self.misses += 1
        encoded = self.encode(labels)
        self._entries[labels] = encoded
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)
        return encoded

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, labels: Labels) -> bool:
        return labels in self._entries


class NamedVocabularies:
    """Label lists by name. The bundled ones cannot be changed; the others can be put and deleted."""

    def __init__(self, max_registered: int) -> None:
        self.max_registered = max_registered
        self._bundled = {name: tuple(assets.vocabulary(name)) for name in assets.vocabulary_names()}
        self._registered: dict[str, Labels] = {}
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return [*self._bundled, *sorted(self._registered)]

    def is_bundled(self, name: str) -> bool:
        return name in self._bundled

    def get(self, name: str) -> Labels:
        try:
            return self._bundled.get(name) or self._registered[name]
        except KeyError:
            raise ApiError(
                404, "unknown_vocabulary", f"there is no vocabulary '{name[:64]}'",
                f"use one of {', '.join(self.names())}, or register it with PUT /v1/vocabularies/NAME",
            ) from None  # fmt: skip

    def check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ApiError(
                422, "bad_name", f"'{name[:64]}' is not a name for a vocabulary",
                "use 1 to 64 of a-z, 0-9, '.', '_', '-', beginning with a letter or digit",
            )  # fmt: skip
        if self.is_bundled(name):
            raise ApiError(409, "read_only", f"'{name}' comes with ramatch and cannot be changed",
                           "choose another name")  # fmt: skip

    def put(self, name: str, labels: Labels) -> bool:
        """Register or replace; True when the name is new."""
        self.check_name(name)
        with self._lock:
            new = name not in self._registered
            if new and len(self._registered) >= self.max_registered:
                raise ApiError(
                    409, "too_many_vocabularies", f"{self.max_registered} vocabularies are registered already",
                    "delete one with DELETE /v1/vocabularies/NAME, or send the labels with each request",
                )  # fmt: skip
            self._registered[name] = labels
            return new

    def delete(self, name: str) -> None:
        if self.is_bundled(name):
            self.check_name(name)
        self.get(name)
        with self._lock:
            self._registered.pop(name, None)
