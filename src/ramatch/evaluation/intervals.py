"""How sure a difference between two models is: intervals by resampling images."""

from __future__ import annotations

from collections.abc import Callable
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
    resamples: int = 500,
    level: float = 0.95,
) -> Change:
    """Scores (n, N) of two models on the same images: each resample draws n images with replacement, for both models
    the same (Efron's percentile bootstrap)."""
    old, t = check(before, targets)
    new, _ = check(after, targets)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(resamples):
        rows = rng.integers(0, len(t), len(t))
        found.append(metric(new[rows], t[rows]) - metric(old[rows], t[rows]))
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Change(float(metric(old, t)), float(metric(new, t)), float(low), float(high))
