"""ECE, Brier, log loss and F1 before and after calibration, on seen and unseen labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from ramatch.errors import RamatchError
from ramatch.evaluation import reliability
from ramatch.evaluation.metrics import Array, as_array, count

_COLUMNS = ("ECE", "ECE_mass", "classwise_ECE", "Brier", "log_loss", "F1@0.5", "F1@threshold", "best_F1")


def calibration_report(
    before: Array,
    after: Array,
    targets: Array,
    *,
    seen: Array | None = None,
    known: Array | None = None,
    threshold: float = 0.5,
    bins: int = 15,
) -> dict[str, Any]:
    """{"before"|"after": {"all"|"seen"|"unseen": numbers}, thresholds} of probabilities (n, N); fractions, not percent.

    `threshold` is the one calibration chose on its own data. The old probabilities have none, so theirs is the best
    on the seen labels here, which favours them. `best_F1` is what the best threshold on the same pairs would give.
    """
    old, new, t = as_array(before), as_array(after), as_array(targets).astype(bool)
    if not old.shape == new.shape == t.shape or t.ndim != 2:
        raise RamatchError(
            f"probabilities and targets must be (images, labels) alike, got {old.shape}, {new.shape}, {t.shape}"
        )
    k = np.ones(t.shape, dtype=bool) if known is None else as_array(known).astype(bool)
    parts = {"all": np.ones(t.shape[1], dtype=bool)}
    if seen is not None:
        s = as_array(seen).astype(bool)
        if s.shape != (t.shape[1],):
            raise RamatchError(f"seen must be one flag per label ({t.shape[1]},), got {s.shape}")
        parts |= {name: part for name, part in (("seen", s), ("unseen", ~s)) if part.any()}
    chosen = parts.get("seen", parts["all"])
    old_threshold, _ = reliability.best_f1(old[:, chosen][k[:, chosen]], t[:, chosen][k[:, chosen]])
    thresholds = {"before": old_threshold, "after": threshold}
    return {
        "images": t.shape[0],
        "labels": {name: int(part.sum()) for name, part in parts.items()},
        "threshold": thresholds,
        **{
            when: {
                name: _numbers(p[:, part], t[:, part], k[:, part], thresholds[when], bins)
                for name, part in parts.items()
            }
            for when, p in (("before", old), ("after", new))
        },
    }


def calibration_table(report: dict[str, Any], *, markdown: bool = False) -> str:
    """The report's numbers, in percent (log loss in nats), a row per label group and time."""
    head = ["labels", "", *_COLUMNS]
    rows = []
    for name in report["labels"]:
        for when in ("before", "after"):
            part = report[when][name]
            rows.append(
                [name, when, *(f"{part[c]:.4f}" if c == "log_loss" else f"{100 * part[c]:.2f}" for c in _COLUMNS)]
            )
    if markdown:
        return "\n".join(
            "| " + " | ".join(line) + " |" for line in [head, ["---"] * 2 + ["---:"] * len(_COLUMNS), *rows]
        )
    widths = [max(len(line[j]) for line in [head, *rows]) for j in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if j < 2 else c.rjust(w) for j, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in [head, *rows]
    ]
    threshold = report["threshold"]
    note = f"threshold: {threshold['before']:.4g} before (best on these seen labels), {threshold['after']:.4g} after"
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", note])


def _numbers(p: np.ndarray, t: np.ndarray, known: np.ndarray, threshold: float, bins: int) -> dict[str, Any]:
    flat_p, flat_t = p[known], t[known]
    at_half, at_chosen = (count(p >= limit, t, known).overall for limit in (0.5, threshold))
    best_threshold, best = reliability.best_f1(flat_p, flat_t)
    return {
        "ECE": reliability.ece(flat_p, flat_t, bins),
        "ECE_mass": reliability.ece(flat_p, flat_t, bins, mass=True),
        "classwise_ECE": reliability.classwise_ece(p, t, bins, known=known),
        "Brier": reliability.brier(flat_p, flat_t),
        "log_loss": reliability.log_loss(flat_p, flat_t),
        "base_rate": float(flat_t.mean()) if flat_t.size else 0.0,
        "mean_probability": float(flat_p.mean()) if flat_p.size else 0.0,
        "P@0.5": at_half.precision,
        "R@0.5": at_half.recall,
        "F1@0.5": at_half.f1,
        "P@threshold": at_chosen.precision,
        "R@threshold": at_chosen.recall,
        "F1@threshold": at_chosen.f1,
        "best_F1": best,
        "best_threshold": best_threshold,
        "reliability": [row.to_dict() for row in reliability.reliability_table(flat_p, flat_t, bins)],
    }
