"""What else a label is looked for as: an animal is also found as a dog, an automobile as a car.

A model finds things by the names that captions give them; words that stand above things, and rare synonyms, it knows
badly. The lexicon knows what they stand for, and costs a few more words to look for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .lexicon import Lexicon

MOST = 40  # kinds that a label is looked for as, the most common ones
COMMON = 2  # how common a kind must be at least (see `Entry.common`)


@dataclass(frozen=True)
class Sought:
    """labels: as they were asked for (N). words: the labels, then what is looked for beside them (W). columns: of each
    label, the words that say it, itself first."""

    labels: tuple[str, ...]
    words: tuple[str, ...]
    columns: tuple[tuple[int, ...], ...]

    @property
    def plain(self) -> bool:
        """Whether each label is looked for as itself alone."""
        return len(self.words) == len(self.labels)

    def combine(self, probabilities: Any) -> Any:
        """(…, W) → (…, N): a label is as probable as the most probable word that says it."""
        if self.plain:
            return probabilities
        tensor = isinstance(probabilities, torch.Tensor)
        out = probabilities[..., : len(self.labels)]
        out = out.clone() if tensor else out.copy()
        for label, columns in enumerate(self.columns):
            if len(columns) > 1:
                found = probabilities[..., list(columns)]
                out[..., label] = found.amax(-1) if tensor else found.max(-1)
        return out

    def winners(self, probabilities: np.ndarray) -> np.ndarray:
        """(W,) → (N,): of each label, the word that says it best."""
        return np.array([columns[int(np.argmax(probabilities[list(columns)]))] for columns in self.columns], dtype=int)


def sought(labels: Sequence[str], lexicon: Lexicon | None, *, most: int = MOST, common: int = COMMON) -> Sought:
    """Labels with what the lexicon knows of them; without a lexicon, labels alone."""
    index = {label: i for i, label in enumerate(labels)}
    columns = []
    for label in labels:
        others = () if lexicon is None else stands_for(label, lexicon, most, common)
        columns.append((index[label], *(index.setdefault(word, len(index)) for word in others if word != label)))
    return Sought(tuple(labels), tuple(index), tuple(columns))


def stands_for(label: str, lexicon: Lexicon, most: int = MOST, common: int = COMMON) -> tuple[str, ...]:
    """The usual name of what a label means, and the most common kinds of it."""
    entry = lexicon.meant(label)
    if entry is None:
        return ()
    kinds = sorted((kind for kind in lexicon.below(entry) if kind.common >= common), key=lambda kind: -kind.common)
    return (entry.name, *(kind.name for kind in kinds[:most]))
