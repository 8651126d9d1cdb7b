"""Predictions with a known plan, and a look at colours."""

from __future__ import annotations

import numpy as np

from ramatch.prediction import Prediction


def make_prediction(labels, spots, grid=(6, 8), seed=0, calibrated=True):
    """Each label of `spots` has most of its weight on one cell (row, column) and a high score, in their order."""
    rng = np.random.default_rng(seed)
    regions, n = grid[0] * grid[1], len(labels)
    plan = 1 + 0.2 * rng.random((regions, n))
    probabilities = 0.3 * rng.random(n)
    for rank, (label, (row, column)) in enumerate(spots.items()):
        plan[row * grid[1] + column, labels.index(label)] += 3 * regions
        probabilities[labels.index(label)] = 0.95 - 0.05 * rank
    marginal = plan.mean(1) if n else np.ones(regions)
    return Prediction(
        labels=tuple(labels),
        values=probabilities,
        scores=probabilities.copy(),
        calibrated=calibrated,
        grid=grid,
        plan=plan / plan.sum(0),
        marginal=marginal / marginal.sum(),
        source="photo.jpg",
    )


def saturation(pixels):
    """(H, W): how far a pixel is from grey."""
    pixels = np.asarray(pixels, dtype=np.float64)
    return pixels.max(-1) - pixels.min(-1)
