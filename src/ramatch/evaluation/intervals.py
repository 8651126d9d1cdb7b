"""How sure a difference between two models is: intervals by resampling images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .metrics import Array, check


class Change(NamedTuple):
    """A metric before and after, and the interval in which the change lies."""

    before: float
    after: float
    low: float
    high: float

    @property
    def change(self) -> float:
        return self.after - self.before


def paired_change(
    before: Array,
    after: Array,
    targets: Array,
    metric: Callable[[np.ndarray, np.ndarray], float],
    *,
    parts: Sequence[Sequence[int]] | None = None,
    resamples: int = 500,
    level: float = 0.95,
) -> Change:
    """Scores (n, N) of two models on the same images: each resample draws n images with replacement, for both models
    the same (Efron's percentile bootstrap).

    With `parts` the metric is the mean over these images' parts, for scores that cannot be ranked across them."""
    old, t = check(before, targets)
    new, _ = check(after, targets)
    groups = [np.arange(len(t))] if parts is None else [np.asarray(part) for part in parts]
    rng = np.random.default_rng(0)

    def measured(scores: np.ndarray, chosen: Sequence[np.ndarray]) -> float:
        return float(np.mean([metric(scores[rows], t[rows]) for rows in chosen]))

    found = []
    for _ in range(resamples):
        drawn = [rng.choice(group, len(group)) for group in groups]
        found.append(measured(new, drawn) - measured(old, drawn))
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Change(measured(old, groups), measured(new, groups), float(low), float(high))
