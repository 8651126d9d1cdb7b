"""The language of searches: `dog beach`, `"hot dog" -person`, `hot dog, beach`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import RamatchError

WORD = re.compile(r'-?"[^"]*"|[^\s",]+')  # or a phrase in quotes, maybe with a minus before it
PIECE = re.compile(r'(?:"[^"]*"|[^",])+')  # between commas


@dataclass(frozen=True)
class Query:
    """Labels that shall be there and labels that shall not; sorted, since their order says nothing."""

    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return self.wanted + self.unwanted


def parse_query(texts: str | Sequence[str], without: Iterable[str] = ()) -> Query:
    """One text without commas: every word is a label, quotes hold words together. With commas, or several texts: each
    part is one label. A minus before a label (or `without`) asks for photos that lack it. Case does not matter."""
    texts = [texts] if isinstance(texts, str) else list(texts)
    for text in texts:
        if text.count('"') % 2:
            raise RamatchError(f"the search '{text}' opens a quote and does not close it")
    several = len(texts) > 1 or any("," in re.sub(r'"[^"]*"', "", text) for text in texts)
    parts = [part.strip() for text in texts for part in (PIECE if several else WORD).findall(text)]
    found: dict[str, tuple[str, bool]] = {}
    for part in [*filter(None, parts), *(f"-{label}" for label in without)]:
        label, minus = " ".join(part.removeprefix("-").replace('"', " ").split()), part.startswith("-")
        if not label:
            raise RamatchError('a label of the search is empty: write a word, a "quoted phrase" or -word')
        before = found.get(label.casefold(), (label, minus))
        if before[1] != minus:
            raise RamatchError(f"the search asks for '{label}' and for its absence; choose one")
        found[label.casefold()] = (min(before[0], label), minus)
    ordered = [found[key] for key in sorted(found)]
    return Query(tuple(name for name, minus in ordered if not minus), tuple(name for name, minus in ordered if minus))
