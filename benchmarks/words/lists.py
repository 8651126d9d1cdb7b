"""The words that are asked for, and in which company."""

from __future__ import annotations

import csv
import hashlib
import io
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ramatch.data.lexicon import plural
from ramatch.files import read_text

COCO80 = Path(__file__).with_name("coco80.tsv")
PARTS = ("validation", "test")
PHRASINGS = {"a": "a {}", "the": "the {}", "plural": "", "photo": "a photo of a {}"}
STRINGS = 50  # without meaning


@dataclass(frozen=True)
class Word:
    """A word, the names it stands for, and names for which it is unclear whether it does."""

    kind: str
    word: str
    names: tuple[str, ...]
    unclear: tuple[str, ...] = ()


def part_of(word: str) -> str:
    """Settings are chosen on one part of the words, figures published on the other."""
    return PARTS[hashlib.blake2b(word.encode(), digest_size=8).digest()[0] & 1]


def read_words(path: Path = COCO80, part: str | None = None) -> list[Word]:
    """All names, and the synonyms and hypernyms of one part (or all)."""
    rows = csv.DictReader(io.StringIO(read_text(path)), delimiter="\t")
    words = [Word(r["kind"], r["word"], _listed(r["names"]), _listed(r["unclear"])) for r in rows]
    return [word for word in words if word.kind == "name" or part in (None, part_of(word.word))]


def _listed(cell: str) -> tuple[str, ...]:
    return tuple(name for name in cell.split(", ") if name)


def rounds(names: Sequence[str], words: Iterable[Word]) -> list[list[str]]:
    """Vocabularies in which every name is replaced by its first, second, … synonym as long as there is one: a synonym
    meets the same company as its name does."""
    synonyms: dict[str, list[str]] = {name: [] for name in names}
    for word in words:
        if word.kind == "synonym" and word.names[0] in synonyms:
            synonyms[word.names[0]].append(word.word)
    count = max(map(len, synonyms.values()), default=0)
    return [[found[i] if i < len(found) else name for name, found in synonyms.items()] for i in range(count)]


def phrased(names: Sequence[str]) -> dict[str, list[str]]:
    """The names in each phrasing."""
    return {
        how: [form.replace("{}", name) if form else plural(name) for name in names] for how, form in PHRASINGS.items()
    }


def apart(words: Iterable[Word]) -> list[list[Word]]:
    """Words in groups that have no name in common, so that no word competes with another for its things."""
    groups: list[list[Word]] = []
    for word in words:
        for group in groups:
            if not any({*word.names} & {*other.names} for other in group):
                group.append(word)
                break
        else:
            groups.append([word])
    return groups


def nonsense(part: str, count: int = STRINGS) -> list[str]:
    """Strings without meaning: half of them can be pronounced."""
    draw = random.Random(f"nonsense {part}")
    letters, vowels, others = "abcdefghijklmnopqrstuvwxyz", "aeiou", "bcdfghjklmnprstvwxz"
    plain = ["".join(draw.choices(letters, k=draw.randint(4, 9))) for _ in range(count // 2)]
    spoken = [
        "".join(draw.choice(others) + draw.choice(vowels) for _ in range(draw.randint(2, 4))) + draw.choice(others)
        for _ in range(count - len(plain))
    ]
    return list(dict.fromkeys(plain + spoken))
