"""Multi-label metrics, exact and vectorised: numbers in [0, 1], never NaN.

Scores and targets are (n images, N labels), arrays or tensors; a target is 1 (present) or 0 (absent).

Definitions that papers leave open:

* Ties. Top-k: of equal scores the lower label index comes first. AP: equal scores share one threshold, as in
  scikit-learn.
* Nothing to count. A ratio 0/0 is 0. Averages over classes run over the classes with at least one positive.
* `tagged` leaves out images without any positive among the labels given, as most NUS-WIDE papers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ramatch.errors import RamatchError

Array: TypeAlias = Any  # np.ndarray, torch.Tensor or nested lists
_CHUNK = 1 << 22  # elements looked at together: bounds the temporary memory to some tens of MB


@dataclass(frozen=True)
class PRF:
    """Precision, recall and their harmonic mean."""

    precision: float
    recall: float
    f1: float

    @classmethod
    def of(cls, precision: float, recall: float) -> PRF:
        return cls(float(precision), float(recall), harmonic_mean(precision, recall))

    def named(self, suffix: str) -> dict[str, float]:
        """As reports call them: P@3, R@3, F1@3."""
        return {f"P{suffix}": self.precision, f"R{suffix}": self.recall, f"F1{suffix}": self.f1}


def as_array(x: Array) -> np.ndarray:
    """numpy view where possible; half precision (unknown to numpy, or slow there) becomes fp32."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu()
        x = (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).numpy()
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == np.float16 else x


def check(scores: Array, targets: Array) -> tuple[np.ndarray, np.ndarray]:
    """Validated scores (n, N) float and targets (n, N) bool."""
    s, t = as_array(scores), as_array(targets)
    if s.ndim != 2 or s.shape != t.shape:
        raise RamatchError(f"scores and targets must be (images, labels) alike, got {s.shape} and {t.shape}")
    s = s if s.dtype.kind == "f" else s.astype(np.float64)
    if (bad := int(np.isnan(s).sum())) > 0:
        raise RamatchError(f"{bad} of {s.size} scores are NaN: metrics of them would mean nothing")
    if t.dtype != bool:
        if ((t != 0) & (t != 1)).any():
            raise RamatchError("targets must be 0 or 1")
        t = t.astype(bool)
    return s, t


def harmonic_mean(a: float, b: float) -> float:
    """2ab / (a + b), 0 when either is 0."""
    return float(2 * a * b / (a + b)) if a > 0 and b > 0 else 0.0


def topk_mask(scores: Array, k: int) -> np.ndarray:
    """(n, N) bool: each image's k best labels, lower index first among equals; all of them when k >= N."""
    s = as_array(scores)
    if k < 1:
        raise RamatchError(f"k must be at least 1, got {k}")
    picked = np.ones(s.shape, dtype=bool)
    n, width = s.shape
    if k >= width:
        return picked
    for rows in _slices(n, width):
        part = s[rows]
        kth = np.partition(part, width - k, axis=1)[:, width - k, None]
        above, equal = part > kth, part == kth
        room = k - above.sum(1, keepdims=True)
        picked[rows] = above | (equal & (np.cumsum(equal, axis=1) <= room))
    return picked


def micro(predicted: np.ndarray, targets: np.ndarray) -> PRF:
    """Over all pairs (n, N) bool counted together."""
    hits, said, true = (int(np.count_nonzero(x)) for x in (predicted & targets, predicted, targets))
    return PRF.of(hits / max(said, 1), hits / max(true, 1))


def at_k(scores: Array, targets: Array, k: int) -> PRF:
    """P@k, R@k, F1@k, micro: each image's k best labels are predicted, then all pairs counted together."""
    s, t = check(scores, targets)
    return micro(topk_mask(s, k), t)


def at_threshold(scores: Array, targets: Array, threshold: float = 0.5) -> dict[str, float]:
    """CP, CR, CF1 (means over classes; CF1 is the harmonic mean of CP and CR) and OP, OR, OF1 (over all pairs), when
    every label with score >= threshold is predicted; a class without predictions has precision 0.

    `macro_F1` is the mean of the classes' own F1 (scikit-learn's `macro`), which is not CF1.
    """
    s, t = check(scores, targets)
    predicted = s >= threshold
    hits, said, true = (np.count_nonzero(x, axis=0).astype(np.float64) for x in (predicted & t, predicted, t))
    has = true > 0
    over_all = micro(predicted, t)
    by_class = PRF.of(mean_over(hits / np.maximum(said, 1), has), mean_over(hits / np.maximum(true, 1), has))
    means = {"CP": by_class.precision, "CR": by_class.recall, "CF1": by_class.f1}
    means |= {"OP": over_all.precision, "OR": over_all.recall, "OF1": over_all.f1}
    return {**means, "macro_F1": mean_over(2 * hits / np.maximum(said + true, 1), has)}


def average_precision(scores: Array, targets: Array) -> np.ndarray:
    """(N,) AP of every class, sum over thresholds of (R_i - R_{i-1}) P_i; 0 for a class without positives.

    Every positive with score t adds (positives >= t) / (scores >= t), so sorting suffices, ties included.
    """
    s, t = check(scores, targets)
    ap = np.zeros(s.shape[1])
    for columns in _slices(s.shape[1], s.shape[0]):
        # Transposed copies make each class contiguous: worth a factor of several on wide score matrices.
        scores_t, targets_t = np.ascontiguousarray(s[:, columns].T), np.ascontiguousarray(t[:, columns].T)
        for i, (column, positive) in enumerate(zip(scores_t, targets_t, strict=True)):
            ap[columns.start + i] = _ap(column, column[positive])
    return ap


def mean_ap(scores: Array, targets: Array) -> float:
    """mAP: AP averaged over the classes with at least one positive (0 if there is none)."""
    s, t = check(scores, targets)
    return mean_over(average_precision(s, t), np.any(t, axis=0))


def mean_aps(scores: Array, targets: Array, ap: np.ndarray | None = None) -> dict[str, float]:
    """Every reading of "mAP" under the one name it has in reports; `ap`: that of every class, if it is known.

    mAP: see `mean_ap`. mAP_micro: one AP over all (image, label) pairs pooled, for scores that are comparable between
    images. mAP_images: AP of each image's ranking of the labels, averaged over the images with a positive. mAP_tagged:
    mAP on these images only (the "masked" test set of NUS-WIDE papers). mAP_empty_zero: a class without positives
    counts as 0, as in some programs; never above mAP."""
    s, t = check(scores, targets)
    ap, tagged = average_precision(s, t) if ap is None else ap, np.any(t, axis=1)
    mean = mean_over(ap, np.any(t, axis=0))
    return {
        "mAP": mean,
        "mAP_micro": _ap(s.ravel(), s[t]),
        "mAP_images": mean_ap(s.T, t.T),
        "mAP_tagged": mean if tagged.all() else mean_ap(s[tagged], t[tagged]),
        "mAP_empty_zero": float(ap.mean()) if len(ap) else 0.0,
    }


def mean_over(values: np.ndarray, where: np.ndarray) -> float:
    """Mean of the values marked, 0 if none is."""
    return float(values[where].mean()) if where.any() else 0.0


def _ap(scores: np.ndarray, positives: np.ndarray) -> float:
    """AP from all scores and those of the positives among them."""
    if positives.size == 0:
        return 0.0
    scores, positives = np.sort(scores), np.sort(positives)
    at_least = len(scores) - np.searchsorted(scores, positives, side="left")
    hits = len(positives) - np.searchsorted(positives, positives, side="left")
    return float((hits / at_least).mean())


def _slices(total: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(width, 1))
    return (slice(i, min(i + step, total)) for i in range(0, total, step))
