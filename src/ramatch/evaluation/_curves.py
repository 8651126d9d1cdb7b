"""Monotone maps from log-odds to log-odds, fitted on top of the logistic: beta and isotonic calibration."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ramatch.evaluation._logistic import fit_logistic, moments


def fit_beta(logits: Tensor, targets: Tensor, completeness: float = 1.0) -> Tensor:
    """Pairs (n,) to (3,) a, b >= 0 and c, see `apply_beta` (Kull et al., 2017): a logistic regression again."""
    x = torch.stack([-softplus(-logits), softplus(logits)], dim=-1)[:, None]
    mean, scale = moments(x)
    model = fit_logistic(
        x, targets[:, None], mean=mean, scale=scale, l2=1e-3, signs=torch.ones(2), completeness=completeness
    )
    slope = model.weights / scale
    return torch.cat([slope, (model.bias - slope @ mean)[None]])


def apply_beta(curve: Tensor, logits: Tensor) -> Tensor:
    """a log p - b log(1 - p) + c for p = sigmoid(logits)."""
    a, b, c = curve
    return -a * softplus(-logits) + b * softplus(logits) + c


def fit_isotonic(logits: Tensor, targets: Tensor, completeness: float = 1.0, groups: int = 4096) -> Tensor:
    """Pairs (n,) to (2, knots), log-odds before and probability after: pool adjacent violators.

    Exact up to `groups` pairs; beyond, on that many groups of equal mass, which keeps the map small in a file.
    """
    x, order = logits.sort()
    edges = torch.linspace(0, len(x), min(groups, len(x)) + 1, dtype=torch.float64).long()[:-1].to(x.device)
    starts = torch.searchsorted(x, x[edges]).unique()  # equal log-odds stay in one group
    ends = torch.cat([starts[1:], starts.new_tensor([len(x)])])
    total = torch.cat([targets.new_zeros(1), targets[order].cumsum(0)])
    columns = (x[starts], x[ends - 1], ends - starts, total[ends] - total[starts])
    blocks: list[tuple[float, float, float, float]] = []  # first and last log-odds, pairs, sum of targets
    for low, high, size, positive in zip(*(column.tolist() for column in columns), strict=True):
        while blocks and blocks[-1][3] * size >= positive * blocks[-1][2]:
            low, _, more, hits = blocks.pop()
            size, positive = size + more, positive + hits
        blocks.append((low, high, size, positive))
    knots = [(edge, p / n) for low, high, n, p in blocks for edge in dict.fromkeys((low, high))]
    edge, frequency = torch.tensor(knots, dtype=torch.float64).T
    return torch.stack([edge, (frequency / completeness).clamp(1e-6, 1 - 1e-6)])


def apply_isotonic(curve: Tensor, logits: Tensor) -> Tensor:
    """Linear between knots, constant outside."""
    x, p = curve
    if len(x) == 1:
        return torch.logit(p).expand_as(logits)
    right = torch.searchsorted(x, logits.contiguous()).clamp(1, len(x) - 1)
    share = ((logits - x[right - 1]) / (x[right] - x[right - 1])).clamp(0, 1)
    return torch.logit(p[right - 1].lerp(p[right], share))


# name: (fit, apply)
CURVES = {"beta": (fit_beta, apply_beta), "isotonic": (fit_isotonic, apply_isotonic)}
