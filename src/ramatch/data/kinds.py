"""What else a label is looked for as: an animal is also found as a dog, an automobile as a car; and of many tags, which
say something that no other says.

A model finds things by the names that captions give them; words that stand above things, and rare synonyms, it knows
badly. The lexicon knows what they stand for, and that costs a few more words to look for. How the answers are joined
was chosen on validation images and words (docs/words.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .lexicon import Entry, Lexicon

MOST = 40  # kinds that a label is looked for as, the most common ones
COMMON = 3  # how common a kind must be (see `Entry.common`): fewer words to look for, and as good
COMMONEST = 4
SHARE = 0.9  # of a kind in the joint log odds of the kind and of the label itself
RARER = 2  # a label is general if people say its kinds this many times as often as itself: "animal", not "dog"
CAUTION = 1.5  # of general labels: how many log odds each doubling (by e) of the answers costs
EVEN = 0.5  # from this probability on, a thing is said to be there
SPECIFIC = 0.9  # a kind is said instead of what stands above it if it is at least so probable as that


@dataclass(frozen=True)
class Sought:
    """labels: as they were asked for (N). words: the labels, then what is looked for beside them (W). same, kinds: for
    each label, the columns of words that mean the same, and of its kinds; both empty for most labels. general: whether
    the label stands above what people usually call such things."""

    labels: tuple[str, ...]
    words: tuple[str, ...]
    same: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[int, ...], ...]
    general: tuple[bool, ...]

    @property
    def plain(self) -> bool:
        """Whether each label is looked for as itself alone."""
        return not any(self.same) and not any(self.kinds)

    def among(self, trusted: np.ndarray) -> Sought:
        """Only those other words that are `trusted` (W,): one whose probability is drawn to even odds would say of
        every picture that the label may be there."""

        def kept(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(column for column in group if trusted[column]) for group in groups)

        return replace(self, same=kept(self.same), kinds=kept(self.kinds))

    def alone(self, chosen: np.ndarray) -> Sought:
        """The chosen labels (N,) as themselves and nothing else: the model knows better what they look like."""

        def left(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            return tuple(() if own else group for own, group in zip(chosen, groups, strict=True))

        general = tuple(not own and above for own, above in zip(chosen, self.general, strict=True))
        return replace(self, same=left(self.same), kinds=left(self.kinds), general=general)

    def joint(self, probabilities: np.ndarray, label: int) -> np.ndarray:
        """(…, W) → (…, 1 + same + kinds): what a label's own words say of it, and each of its kinds. A kind must
        convince, and the label itself must not speak against it: their log odds are averaged. The more kinds a general
        label has, the likelier one convinces by mistake, so odds fall with their number (as Bonferroni has it)."""
        own = probabilities[..., [label, *self.same[label]]]
        if not (kinds := list(self.kinds[label])):
            return own
        known = _log_odds(own)
        joint = SHARE * _log_odds(probabilities[..., kinds]) + (1 - SHARE) * known.max(-1, keepdims=True)
        odds = np.concatenate([known, joint], axis=-1) - CAUTION * np.log1p(len(kinds)) * self.general[label]
        return (1 / (1 + np.exp(-odds))).astype(probabilities.dtype)

    def combine(self, probabilities: np.ndarray) -> np.ndarray:
        """(…, W) → (…, N): a label is as probable as the word that says it best."""
        own = probabilities[..., : len(self.labels)]
        return self._filled(own, lambda label: self.joint(probabilities, label).max(-1))

    def winners(self, probabilities: np.ndarray) -> np.ndarray:
        """(…, W) → (…, N): of each label, the column of the word that says it best; its map shows where."""
        own = np.broadcast_to(np.arange(len(self.labels)), (*probabilities.shape[:-1], len(self.labels)))
        return self._filled(own, lambda label: self._columns(label)[self.joint(probabilities, label).argmax(-1)])

    def highest(self, values: np.ndarray) -> np.ndarray:
        """(…, W) → (…, N): the highest value of a label's words, for a first look at many images."""
        own = values[..., : len(self.labels)]
        return self._filled(own, lambda label: values[..., self._columns(label)].max(-1))

    def _columns(self, label: int) -> np.ndarray:
        return np.array((label, *self.same[label], *self.kinds[label]))

    def _filled(self, own: np.ndarray, joined: Callable[[int], np.ndarray]) -> np.ndarray:
        """A copy of `own` (…, N) with `joined` for each label that is looked for as other words too."""
        out = own.copy()
        for label in range(len(self.labels)):
            if self.same[label] or self.kinds[label]:
                out[..., label] = joined(label)
        return out


def _log_odds(p: np.ndarray) -> np.ndarray:
    p = np.clip(p.astype(np.float64), 1e-9, 1 - 1e-9)
    return np.log(p) - np.log1p(-p)


def sought(labels: Sequence[str], lexicon: Lexicon | None = None) -> Sought:
    """Labels with what a lexicon knows of them; without one, labels alone."""
    index = {label: i for i, label in enumerate(labels)}
    columns: list[tuple[tuple[int, ...], ...]] = []
    general = []
    for label in labels:
        entry = None if lexicon is None else lexicon.meant(label)
        same, below = ([entry.name], _kinds(entry, lexicon)) if lexicon is not None and entry is not None else ([], [])
        general.append(entry is not None and _general(entry, below))
        names = (same, [kind.name for kind in below])
        columns.append(tuple(tuple(index.setdefault(n, len(index)) for n in part if n != label) for part in names))
    same_columns, kinds = zip(*columns, strict=True) if columns else ((), ())
    return Sought(tuple(labels), tuple(index), tuple(same_columns), tuple(kinds), tuple(general))


def _kinds(entry: Entry, lexicon: Lexicon) -> list[Entry]:
    """The most common kinds of a thing."""
    below = [kind for kind in lexicon.below(entry) if kind.common >= COMMON]
    return sorted(below, key=lambda kind: -kind.common)[:MOST]


def _general(entry: Entry, kinds: Sequence[Entry]) -> bool:
    """By how many digits the number of captions has that say each; the commonest words ("person") are not."""
    return entry.common < COMMONEST and sum(10**kind.common for kind in kinds) > RARER * 10**entry.common


def each_once(names: Sequence[str], probabilities: np.ndarray, order: Iterable[int], lexicon: Lexicon) -> Iterator[int]:
    """Positions of the names that say something new, in the order given: of a thing and its kinds only one is said. Of
    those that are there, that is the most specific one, unless it is much less certain than what stands above it."""
    place = {name: i for i, name in enumerate(names)}
    left: set[str] = set()  # said better by one of their kinds
    for i in np.flatnonzero(probabilities >= EVEN).tolist():
        for name in lexicon.above(lexicon.find(names[i])):
            if name in place and probabilities[i] >= SPECIFIC * probabilities[place[name]]:
                left.add(name)
    said: set[str] = set()
    implied: set[str] = set()
    for i in order:
        name = names[i]
        if name in left or name in implied:
            continue
        above = lexicon.above(lexicon.find(name))
        if said.isdisjoint(above):
            said.add(name)
            implied.update(above)
            yield i
