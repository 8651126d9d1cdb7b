"""Learning rates over time, as factors on each group's own rate that follow from the step or the epoch."""

from __future__ import annotations

import math


def schedule(step: int, total: int, warmup: float, final: float = 0.0) -> float:
    """Factor on every learning rate at `step` (from 0): linear from 1/w up to 1 over w = warmup · total steps, then
    a half cosine down to `final` at the last step."""
    w = round(warmup * total)
    if step < w:
        return (step + 1) / w
    progress = (step - w) / max(total - 1 - w, 1)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def reference_schedule(epoch: int, warmup: int = 3, start: float = 0.1, period: int = 60) -> float:
    """Factor in `epoch` (from 0) in the authors' program, where rates change per epoch, one epoch ahead: linear from
    `start` over `warmup` epochs, then a cosine of `period`: 0.4, 0.7, 0.994, 0.989, 0.983, 0.976."""
    ahead = epoch + 1
    if ahead < warmup:
        return start + (1 - start) * ahead / warmup
    return 0.5 * (1 + math.cos(math.pi * ahead / period))
