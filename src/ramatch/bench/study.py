"""Studies: many settings and seeds on one data set, quickly, from kept stems (see `train/kept.py`)."""

from __future__ import annotations

from torch import Tensor

from ..train.kept import FitConfig, Kept, collect, fit, keep, load_pixels

__all__ = ["FitConfig", "Kept", "collect", "fit", "keep", "load_pixels", "score_rules"]


def score_rules(features: Tensor, tau_g: float, tau_r: float) -> dict[str, Tensor]:
    """Ways to make one score of s_G, s_R (column mass 1) and the best region (n, N, 3): see docs/results.md."""
    g, r, m = features.unbind(-1)
    n = g.shape[1]

    def partial(s: Tensor) -> Tensor:
        return 50 * s - 0.5 * (50 * s).logsumexp(-1, keepdim=True)

    return {
        "global": g,
        "region": r,
        "max": m,
        "softmax-mean": (g / tau_g).softmax(-1) + (r / tau_r).softmax(-1),
        "softmax-mean-1/N": (g / tau_g).softmax(-1) + (r / (n * tau_r)).softmax(-1),
        "g+r": g + r,
        "g+m": g + m,
        "g+r+m": g + (r + m) / 2,
        "joint-r": (100 * (g + r) / 2).softmax(-1),
        "joint-m": (100 * (g + m) / 2).softmax(-1),
        "partial-r": partial(g + r),
        "partial-m": partial(g + m),
        "partial-rm": partial(g + (r + m) / 2),
    }
