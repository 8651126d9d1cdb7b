"""How far probabilities can be trusted: calibration errors, Brier, log loss, the threshold of best F1.

Probabilities in [0, 1] and 0/1 targets of any shape, each entry one independent yes/no question. Empty input gives 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from ramatch.errors import RamatchError
from ramatch.evaluation.metrics import Array, as_array

_CLIP = 1e-7  # log loss of a certain and wrong answer: -log(1e-7), not infinity


@dataclass(frozen=True)
class Bin:
    """Pairs whose probability lies in [low, high): how many, mean probability, share that is truly positive."""

    low: float
    high: float
    count: int
    probability: float
    frequency: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def reliability_table(probabilities: Array, targets: Array, bins: int = 15, *, mass: bool = False) -> list[Bin]:
    """The non-empty bins, lowest first.

    Equal width: [i/bins, (i+1)/bins), with 1.0 in the last. Equal mass (`mass`): the sorted pairs are cut into `bins`
    groups of equal count; equal probabilities always share a bin, so the order of pairs does not matter.
    """
    p, t = _flat(probabilities, targets)
    if p.size == 0:
        return []
    index = _bin_index(p, bins, mass)
    count = np.bincount(index, minlength=bins)
    p_sum, t_sum = (np.bincount(index, weights=x, minlength=bins) for x in (p, t))
    if mass:
        low, high = np.full(bins, np.inf), np.full(bins, -np.inf)
        np.minimum.at(low, index, p)
        np.maximum.at(high, index, p)
    else:
        low, high = np.arange(bins) / bins, np.arange(1, bins + 1) / bins
    return [
        Bin(float(low[i]), float(high[i]), int(count[i]), float(p_sum[i] / count[i]), float(t_sum[i] / count[i]))
        for i in np.flatnonzero(count)
    ]


def ece(probabilities: Array, targets: Array, bins: int = 15, *, mass: bool = False) -> float:
    """Expected calibration error: mean over pairs of |mean probability - frequency| of the pair's bin."""
    table = reliability_table(probabilities, targets, bins, mass=mass)
    total = sum(row.count for row in table)
    return sum(row.count * abs(row.probability - row.frequency) for row in table) / max(total, 1)


def classwise_ece(probabilities: Array, targets: Array, bins: int = 15, *, known: Array | None = None) -> float:
    """Equal-width ECE of each label's column (n, N), averaged over the labels with at least one known pair."""
    p, t = as_array(probabilities), as_array(targets)
    k = np.ones(p.shape, dtype=bool) if known is None else as_array(known).astype(bool)
    columns = [ece(p[k[:, j], j], t[k[:, j], j], bins) for j in range(p.shape[1]) if k[:, j].any()]
    return float(np.mean(columns)) if columns else 0.0


def brier(probabilities: Array, targets: Array) -> float:
    """Mean squared difference of probability and truth."""
    p, t = _flat(probabilities, targets)
    return float(np.mean((p - t) ** 2)) if p.size else 0.0


def log_loss(probabilities: Array, targets: Array) -> float:
    """Mean negative log likelihood in nats; probabilities are kept 1e-7 away from 0 and 1."""
    p, t = _flat(probabilities, targets)
    p = np.clip(p, _CLIP, 1 - _CLIP)
    return float(-np.mean(t * np.log(p) + (1 - t) * np.log1p(-p))) if p.size else 0.0


def best_f1(scores: Array, targets: Array) -> tuple[float, float]:
    """(threshold, F1): the threshold with the best micro F1, half-way to the next lower score. Any real scores.

    Of several best thresholds the highest is taken. Without positives: (the highest score and a bit, 0).
    """
    s, t = as_array(scores).ravel().astype(np.float64), as_array(targets).ravel().astype(bool)
    if s.size == 0:
        return 0.5, 0.0
    order = np.argsort(-s, kind="stable")
    s, hits = s[order], np.cumsum(t[order])
    if hits[-1] == 0:
        return float(np.nextafter(s[0], np.inf)), 0.0
    ends = np.flatnonzero(np.append(s[1:] != s[:-1], True))  # thresholds lie between different scores only
    f1 = 2 * hits[ends] / (ends + 1 + hits[-1])
    best = int(np.argmax(f1))
    here = s[ends[best]]
    below = s[ends[best] + 1] if ends[best] + 1 < s.size else here
    middle = here + (below - here) / 2
    return float(middle if middle > below else here), float(f1[best])


def _bin_index(p: np.ndarray, bins: int, mass: bool) -> np.ndarray:
    if not mass:
        edges = np.linspace(0.0, 1.0, bins + 1)[1:-1]
        return np.searchsorted(edges, p, side="right")
    smaller = np.searchsorted(np.sort(p), p, side="left")
    return smaller * bins // p.size


def _flat(probabilities: Array, targets: Array) -> tuple[np.ndarray, np.ndarray]:
    p, t = as_array(probabilities), as_array(targets)
    if p.shape != t.shape:
        raise RamatchError(f"probabilities and targets must have one shape, got {p.shape} and {t.shape}")
    p, t = p.ravel().astype(np.float64), t.ravel().astype(np.float64)
    if p.size and not (p.min() >= 0.0 and p.max() <= 1.0):  # also catches NaN
        raise RamatchError(f"probabilities must lie in [0, 1], got {p.min():.3g} to {p.max():.3g}")
    return p, t
