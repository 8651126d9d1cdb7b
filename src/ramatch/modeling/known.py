"""How familiar a label is: where it stands in the text space among the words that a model learned with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import RamatchError

LEAST = 50  # known words; fewer do not show what a learned word looks like
NEAR, AROUND = 5, 0.03  # how many words are near, and which share of all words is the neighborhood
_CHUNK = 4096


@dataclass(frozen=True)
class Known:
    """unit (K, D): text features of the words; weights (4,) of the three `signs` and the bias: together a logistic
    function that tells learned words from strings without meaning."""

    unit: Tensor
    weights: Tensor

    def __post_init__(self) -> None:
        if len(self.unit) < LEAST:
            raise RamatchError(f"{len(self.unit)} known words are too few to tell others by; give at least {LEAST}")

    def familiarity(self, unit: Tensor) -> np.ndarray:
        """(N,) in [0, 1] of labels with unit features (N, D)."""
        weights = self.weights.double()
        found = signs(unit.detach().float().cpu(), self.unit).double() @ weights[:-1] + weights[-1]
        return torch.sigmoid(found).numpy()


def signs(unit: Tensor, known: Tensor, own: Tensor | None = None) -> Tensor:
    """(N, 3): cosine of the nearest known word, mean of the few nearest, and the edge of the neighborhood.

    A word with a meaning is close to few words and far from the rest; a string without lies equally near to many, often
    nearer than a rare word does, so that the nearest word alone says little. `own` (N,): each label's place among
    the known words, not to be compared with itself."""
    near, around = min(NEAR, len(known)), max(NEAR, round(AROUND * len(known)))
    found = []
    for start in range(0, len(unit), _CHUNK):
        cosines = unit[start : start + _CHUNK] @ known.T
        if own is not None:
            cosines.scatter_(1, own[start : start + _CHUNK, None], -1.0)
        top = cosines.topk(min(around, len(known)), dim=1).values
        found.append(torch.stack([top[:, 0], top[:, :near].mean(1), top[:, -1]], dim=1))
    return torch.cat(found) if found else unit.new_zeros(0, 3)
