"""How far probabilities can be trusted: calibration errors, Brier, log loss, the threshold of best F1, a report of all.

Probabilities in [0, 1] and 0/1 targets of any shape, each entry one independent yes/no question. Empty input gives 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ramatch.errors import RamatchError
from ramatch.evaluation._tables import format_table
from ramatch.evaluation.metrics import Array, as_array, micro

_CLIP = 1e-7  # log loss of a certain and wrong answer: -log(1e-7), not infinity
_COLUMNS = ("ECE", "ECE_mass", "classwise_ECE", "Brier", "log_loss", "F1@0.5", "F1@threshold", "best_F1")


@dataclass(frozen=True)
class Bin:
    """Pairs whose probability lies in [low, high): how many, mean probability, share that is truly positive."""

    low: float
    high: float
    count: int
    probability: float
    frequency: float


def reliability_table(probabilities: Array, targets: Array, bins: int = 15, *, mass: bool = False) -> list[Bin]:
    """The non-empty bins, lowest first.

    Equal width: [i/bins, (i+1)/bins), with 1.0 in the last. Equal mass (`mass`): the sorted pairs are cut into `bins`
    groups of equal count; equal probabilities always share a bin, so the order of pairs does not matter.
    """
    p, t = _flat(probabilities, targets)
    if p.size == 0:
        return []
    if mass:
        index = np.searchsorted(np.sort(p), p, side="left") * bins // p.size
        low, high = np.full(bins, np.inf), np.full(bins, -np.inf)
        np.minimum.at(low, index, p)
        np.maximum.at(high, index, p)
    else:
        low, high = np.arange(bins) / bins, np.arange(1, bins + 1) / bins
        index = np.searchsorted(np.linspace(0.0, 1.0, bins + 1)[1:-1], p, side="right")
    counts = np.bincount(index, minlength=bins)
    p_sum, t_sum = (np.bincount(index, weights=x, minlength=bins) for x in (p, t))
    return [
        Bin(float(low[i]), float(high[i]), int(counts[i]), float(p_sum[i] / counts[i]), float(t_sum[i] / counts[i]))
        for i in np.flatnonzero(counts)
    ]


def ece(probabilities: Array, targets: Array, bins: int = 15, *, mass: bool = False) -> float:
    """Expected calibration error: mean over pairs of |mean probability - frequency| of the pair's bin."""
    table = reliability_table(probabilities, targets, bins, mass=mass)
    total = sum(row.count for row in table)
    return sum(row.count * abs(row.probability - row.frequency) for row in table) / max(total, 1)


def classwise_ece(probabilities: Array, targets: Array, bins: int = 15) -> float:
    """Equal-width ECE of each label's column (n, N), averaged over the labels."""
    columns = [ece(p, t, bins) for p, t in zip(as_array(probabilities).T, as_array(targets).T, strict=True)]
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


def calibration_report(
    before: Array, after: Array, targets: Array, *, seen: Array | None = None, threshold: float = 0.5
) -> dict[str, Any]:
    """{"before"|"after": {"all"|"seen"|"unseen": numbers}, thresholds} of probabilities (n, N); fractions, not percent.

    `threshold` is the one calibration chose on its own data. The old probabilities have none, so theirs is the best
    on the seen labels here, which favors them. `best_F1` is what the best threshold on the same pairs would give.
    """
    old, new, t = as_array(before), as_array(after), as_array(targets).astype(bool)
    if not old.shape == new.shape == t.shape or t.ndim != 2:
        raise RamatchError(
            f"probabilities and targets must be (images, labels) alike, got {old.shape}, {new.shape}, {t.shape}"
        )
    parts = {"all": np.ones(t.shape[1], dtype=bool)}
    if seen is not None:
        s = as_array(seen).astype(bool)
        if s.shape != (t.shape[1],):
            raise RamatchError(f"seen must be one flag per label ({t.shape[1]},), got {s.shape}")
        parts |= {name: part for name, part in (("seen", s), ("unseen", ~s)) if part.any()}
    chosen = parts.get("seen", parts["all"])
    thresholds = {"before": best_f1(old[:, chosen], t[:, chosen])[0], "after": threshold}
    report = {
        "images": t.shape[0],
        "labels": {name: int(part.sum()) for name, part in parts.items()},
        "threshold": thresholds,
    }
    for when, p in (("before", old), ("after", new)):
        report[when] = {name: _numbers(p[:, part], t[:, part], thresholds[when]) for name, part in parts.items()}
    return report


def calibration_table(report: dict[str, Any], *, markdown: bool = False) -> str:
    """The report's numbers, in percent (log loss in nats), a row per label group and time."""
    rows = []
    for name in report["labels"]:
        for when in ("before", "after"):
            part = report[when][name]
            cells = (f"{part[c]:.4f}" if c == "log_loss" else f"{100 * part[c]:.2f}" for c in _COLUMNS)
            rows.append([name, when, *cells])
    table = format_table(["labels", "", *_COLUMNS], rows, names=2, markdown=markdown)
    if markdown:
        return table
    threshold = report["threshold"]
    note = f"threshold: {threshold['before']:.4g} before (best on these seen labels), {threshold['after']:.4g} after"
    return f"{table}\n\n{note}"


def _numbers(p: np.ndarray, t: np.ndarray, threshold: float) -> dict[str, Any]:
    best_threshold, best = best_f1(p, t)
    return {
        "ECE": ece(p, t),
        "ECE_mass": ece(p, t, mass=True),
        "classwise_ECE": classwise_ece(p, t),
        "Brier": brier(p, t),
        "log_loss": log_loss(p, t),
        "base_rate": float(t.mean()) if t.size else 0.0,
        "mean_probability": float(p.mean()) if p.size else 0.0,
        **micro(p >= 0.5, t).named("@0.5"),
        **micro(p >= threshold, t).named("@threshold"),
        "best_F1": best,
        "best_threshold": best_threshold,
        "reliability": [asdict(row) for row in reliability_table(p, t)],
    }


def _flat(probabilities: Array, targets: Array) -> tuple[np.ndarray, np.ndarray]:
    p, t = as_array(probabilities), as_array(targets)
    if p.shape != t.shape:
        raise RamatchError(f"probabilities and targets must have one shape, got {p.shape} and {t.shape}")
    p, t = p.ravel().astype(np.float64), t.ravel().astype(np.float64)
    if p.size and not (p.min() >= 0.0 and p.max() <= 1.0):  # also catches NaN
        raise RamatchError(f"probabilities must lie in [0, 1], got {p.min():.3g} to {p.max():.3g}")
    return p, t
