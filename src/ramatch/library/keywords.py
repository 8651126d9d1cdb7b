"""Which tags of an image are ours and which were made by hand; what a new run makes of both."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..data.lexicon import Lexicon
from ..errors import RamatchError
from ..prediction import Prediction

SURE = 0.7  # probability from which a tag is written, unless told: in a library a wrong tag costs more than none


class Keyword(NamedTuple):
    """A tag of ours. path: what it is a kind of, the most general first, then the tag itself."""

    path: tuple[str, ...]
    probability: float | None = None

    @property
    def label(self) -> str:
        return self.path[-1]

    def __str__(self) -> str:
        """As it is noted in a file, to be recognized by a later run."""
        return f"{'-' if self.probability is None else format(self.probability, '.2f')} {'|'.join(self.path)}"

    @classmethod
    def parse(cls, text: str) -> Keyword:
        number, _, path = text.partition(" ")
        try:
            return cls(tuple(path.split("|")), None if number == "-" else float(number))
        except ValueError:
            raise RamatchError(f"a note of ramatch's that was changed: {text[:80]}") from None


@dataclass(frozen=True)
class Merged:
    """What shall be there of ours. before: what was ours. rejected: tags of ours that somebody has removed, which stay
    away. by_hand: found again, but made by hand, and left so."""

    before: tuple[Keyword, ...]
    after: tuple[Keyword, ...]
    rejected: tuple[str, ...]
    by_hand: tuple[str, ...]

    @property
    def added(self) -> tuple[str, ...]:
        had = {keyword.label for keyword in self.before}
        return tuple(k.label for k in self.after if k.label not in had)

    @property
    def removed(self) -> tuple[str, ...]:
        have = {keyword.label for keyword in self.after} | set(self.rejected)
        return tuple(k.label for k in self.before if k.label not in have)


def merge(
    present: Iterable[str],
    before: Sequence[Keyword],
    rejected: Iterable[str],
    found: Sequence[Keyword] | None,
    elsewhere: Iterable[str] = (),
) -> Merged:
    """`present`: all tags where ours are kept, `elsewhere`: those that the image has in other places; `before` and
    `rejected`: what an earlier run noted; `found`: what shall be there now, None to take away what is ours and forget
    the rest."""
    if found is None:
        return Merged(tuple(before), (), (), ())
    there, ours = list(present), dict.fromkeys(keyword.label for keyword in before)
    by_hand = {_same(word): word for word in (*there, *elsewhere) if word not in ours}
    gone = [*rejected, *(label for label in ours if label not in there)]
    gone = [label for label in dict.fromkeys(gone) if _same(label) not in by_hand]
    away = by_hand.keys() | set(map(_same, gone))
    after = {_same(k.label): k for k in reversed(found) if _same(k.label) not in away}
    again = tuple(by_hand[_same(k.label)] for k in found if _same(k.label) in by_hand)
    return Merged(tuple(before), tuple(reversed(after.values())), tuple(gone), again)


def _same(word: str) -> str:
    return unicodedata.normalize("NFC", word).casefold()


def keywords_of(
    prediction: Prediction, *, top: int | None = None, threshold: float | None = None, under: str | None = None
) -> list[Keyword]:
    """An image's best tags (at most `top`, at least `threshold`) with what stands above them by the lexicon, below
    `under` if given. Of a calibrated model those are left out whose probability is but a guess."""
    tags = prediction.tags() if threshold is None else prediction.above(threshold)
    tags = [tag for tag in tags if tag.trusted or not prediction.calibrated][:top]
    lexicon, root = Lexicon.built_in(), [under] if under else []
    paths = [tuple(map(_plain, (*root, *_above(tag.label, lexicon), tag.label))) for tag in tags]
    numbers = [tag.value if tag.calibrated else None for tag in tags]
    return [Keyword(path, number) for path, number in zip(paths, numbers, strict=True) if path[-1]]


def _above(label: str, lexicon: Lexicon) -> list[str]:
    """One way up, the most general first: a tree of keywords has a single place for each."""
    out: list[str] = []
    entry = lexicon.meant(label)
    while entry is not None and entry.parents and entry.parents[0] not in out:
        out.append(entry.parents[0])
        entry = lexicon.entries.get(out[-1])
    return [name for name in reversed(out) if _same(name) != _same(label)]


def _plain(label: str) -> str:
    """Without what separates (bars, commas, line breaks) and what no file of tags can hold."""
    return " ".join("".join(c if c.isprintable() and c not in "|," else " " for c in label).split())
