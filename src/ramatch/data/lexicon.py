"""What words have to do with each other: names of things, their synonyms and what stands above them.

The built-in lexicon is `assets/vocabularies/general.tsv`; any table with the columns name, synonyms, parents (lists
separated by commas) will do. Training uses it to turn words that captions say into concepts.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..errors import RamatchError
from ..files import read_text
from .tags import IRREGULAR, Tags

ARTICLE = r"(?:(?:an?|the)\s+)?"
BEFORE = re.compile(
    rf"^(?:{ARTICLE}(?:photo|picture|image|pair|piece|slice|bunch)\s+of\s+)?{ARTICLE}"
)  # a photo of a dog
COUNTED = ("bus", "dress", "glass", "cross")  # end in s and have a plural
PHRASES = ("a {}", "the {}", "a photo of a {}")
BUILT_IN = Path(__file__).parents[1] / "assets" / "vocabularies" / "general.tsv"


@dataclass(frozen=True)
class Entry:
    """One meaning: its usual name, other words for it, and the names of what it is a kind of, nearest first. `common`:
    how many digits the number of images has whose captions name it, of 33,914 (0: no image; at most 4)."""

    name: str
    synonyms: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()
    common: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name, *self.synonyms)


@dataclass(frozen=True)
class Lexicon:
    """Entries by name; a parent that is no entry stands for itself."""

    entries: Mapping[str, Entry]

    @classmethod
    def read(cls, path: str | Path = BUILT_IN) -> Lexicon:
        rows = list(csv.DictReader(io.StringIO(read_text(path)), delimiter="\t"))
        if not rows or not {"name", "synonyms", "parents"} <= set(rows[0]):
            raise RamatchError(f"{path}: a lexicon is a TSV with the columns name, synonyms and parents")
        return cls({r["name"]: _entry(r) for r in rows})

    @classmethod
    def named(cls, name: str | None) -> Lexicon | None:
        """What a setting says: the built-in lexicon, a file, or none."""
        return None if name is None else cls.built_in() if name == "built-in" else cls.read(name)

    @staticmethod
    @lru_cache(1)
    def built_in() -> Lexicon:
        """The built-in lexicon, read once."""
        return Lexicon.read()

    @cached_property
    def _by_word(self) -> dict[str, Entry]:
        entries = reversed(list(self.entries.values()))  # of entries that share a synonym, the first has it
        return {word: entry for entry in entries for word in entry.synonyms} | dict(self.entries)

    def find(self, word: str) -> Entry:
        """The entry a word belongs to; of an unknown word, one of its own."""
        return self._by_word.get(word) or Entry(word)

    def meant(self, label: str) -> Entry | None:
        """The entry of a label as people write it: in capitals, with an article, in the plural, "a photo of a dog", as
        one word or several (tooth brush, sail-boat)."""
        word = BEFORE.sub("", label.strip().casefold())
        return self._by_word.get(word) or self._by_spelling.get(_joined(word))

    @cached_property
    def _by_spelling(self) -> dict[str, Entry]:
        many = {_joined(plural(word)): entry for word, entry in self._by_word.items()}
        return many | {_joined(word): entry for word, entry in self._by_word.items()}

    def below(self, entry: Entry) -> tuple[Entry, ...]:
        """Everything that is a kind of the entry, as listed."""
        return tuple(self._below.get(entry.name, ()))

    @cached_property
    def _below(self) -> dict[str, list[Entry]]:
        found: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            for name in self.above(entry):
                found.setdefault(name, []).append(entry)
        return found

    def above(self, entry: Entry) -> list[str]:
        """Everything the entry is a kind of, nearest first."""
        known = self._above.get(entry.name)
        return self._climb(entry) if known is None else list(known)

    @cached_property
    def _above(self) -> dict[str, list[str]]:
        return {name: self._climb(entry) for name, entry in self.entries.items()}

    def _climb(self, entry: Entry) -> list[str]:
        found: dict[str, None] = {}
        queue = list(entry.parents)
        while queue:
            name = queue.pop(0)
            if name not in found and name != entry.name:
                found[name] = None
                queue += self.entries[name].parents if name in self.entries else ()
        return list(found)


def _joined(word: str) -> str:
    return re.sub(r"[\s\-]", "", word)


def _entry(row: Mapping[str, str]) -> Entry:
    common = row.get("common") or "0"
    if not common.isdigit():
        raise RamatchError(f"a lexicon's column 'common' has whole numbers, not '{common}' (of '{row['name']}')")
    return Entry(row["name"], _listed(row["synonyms"]), _listed(row["parents"]), int(common))


def _listed(cell: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (cell or "").split(",") if part.strip())


@dataclass(frozen=True)
class Concepts:
    """What images are said to show, by meaning. texts: all words for each of the C concepts, its name first; said: bool
    (images, C), by a word of its own; targets: the same, and what stands above what is said; below: bool (C, C),
    whether the second is a kind of the first."""

    texts: tuple[tuple[str, ...], ...]
    said: Tensor
    targets: Tensor
    below: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(words[0] for words in self.texts)


def concepts(tags: Tags, lexicon: Lexicon | None) -> Concepts:
    """Words of one meaning become one concept, there where any of them is said; what a thing is a kind of is there with
    it. Without a lexicon each tag is a concept of its own."""
    lexicon = lexicon or Lexicon({})
    found = [lexicon.find(tag) for tag in tags.names]
    names = dict.fromkeys(entry.name for entry in found)
    names |= dict.fromkeys(name for entry in found for name in lexicon.above(entry))
    column = {name: i for i, name in enumerate(names)}
    said = torch.zeros(len(tags.targets), len(column), dtype=torch.bool)
    below = torch.zeros(len(column), len(column), dtype=torch.bool)
    for tag, entry in enumerate(found):
        said[:, column[entry.name]] |= tags.targets[:, tag]
    targets = said.clone()
    for name, i in column.items():  # parents too are kinds of something
        for higher in lexicon.above(lexicon.find(name)):
            below[column[higher], i] = True
            targets[:, column[higher]] |= said[:, i]
    return Concepts(tuple(lexicon.find(name).words for name in column), said, targets, below)


def unsettled(said: Tensor, there: Tensor, close: Tensor, below: Tensor) -> Tensor:
    """bool (images, C): what cannot be called absent although nobody says that it is there: all too close in meaning to
    something said, and the kinds of something said of which no kind is there (an animal may be a dog; but where a dog
    is there, the animal is that dog, and a cat is absent). close: bool (C, C)."""
    kinds_there = there.float() @ below.T.float() > 0
    return said.float() @ close.float() + (said & ~kinds_there).float() @ below.float() > 0


PLURAL = {"person": "people", "sheep": "sheep", "fish": "fish", "broccoli": "broccoli"}


def plural(word: str) -> str:
    """A plural that people would write; irregular ones that captions use are known."""
    head, space, last = word.rpartition(" ")
    if last in PLURAL:
        return head + space + PLURAL[last]
    for many, one in IRREGULAR.items():
        if last == one and last not in COUNTED:
            return head + space + many
    if last.endswith(("s", "x", "z", "ch", "sh")):
        return f"{word}es"
    return f"{word[:-1]}ies" if last.endswith("y") and last[-2:-1] not in "aeiou" else f"{word}s"


def phrasings(words: Sequence[str]) -> list[str]:
    """A concept's words alone, in the plural and in short phrases; the name alone comes first."""
    out = dict.fromkeys([words[0], *words[1:], *map(plural, words), f"{words[0]}s"])
    return list(out | dict.fromkeys(phrase.replace("{}", word) for phrase in PHRASES for word in words))


def all_words(lexicon: Lexicon, texts: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Words of all concepts and of all entries, each meaning once."""
    found = {words[0]: tuple(words) for words in texts}
    return list(({entry.name: entry.words for entry in lexicon.entries.values()} | found).values())
