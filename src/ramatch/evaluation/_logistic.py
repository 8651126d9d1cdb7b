"""Logistic regression on (n, N, F) features, in fp64.

Minimizes  sum -t log p - (1 - t) log(1 - p) + l2/2 |w|^2,   p = sigmoid(z w + b), z standardized, by Newton steps
with backtracking.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

_PAIRS = 1 << 19  # looked at together: bounds the fp64 temporaries


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (F,) over the pairs of (n, N, F); a constant feature has scale 1, so weight 0."""
    rows = x.reshape(-1, x.shape[-1])
    mean = rows.mean(0, dtype=torch.float64)
    scale = torch.stack([(rows[:, j].double() - mean[j]).square().mean() for j in range(rows.shape[1])]).sqrt()
    return mean, torch.where(scale > 1e-9 * mean.abs().clamp_min(1e-3), scale, torch.ones_like(scale))


def fit_logistic(features: Tensor, targets: Tensor, mean: Tensor, scale: Tensor, *, l2: float = 1.0) -> Tensor:
    """(F + 1,): weights of the standardized features and the bias, for targets (n, N) in [0, 1]."""
    rows, wanted = features.reshape(-1, features.shape[-1]), targets.reshape(-1)
    prior = torch.full((rows.shape[1] + 1,), l2, dtype=torch.float64, device=rows.device)
    prior[-1] = 0.0

    def sums(theta: Tensor) -> tuple[float, Tensor, Tensor]:
        """The objective, its gradient and its Hessian."""
        value, grad, hessian = 0.5 * (prior * theta**2).sum().item(), prior * theta, torch.diag(prior)
        for x, t in zip(rows.split(_PAIRS), wanted.split(_PAIRS), strict=True):
            z = (x.double() - mean) / scale
            z, t = torch.cat([z, torch.ones_like(z[:, :1])], dim=1), t.double()
            logits = z @ theta
            p = torch.sigmoid(logits)
            value += (softplus(logits) - t * logits).sum().item()
            grad = grad + z.T @ (p - t)
            hessian = hessian + z.T @ (z * (p * (1 - p))[:, None])
        return value, grad, hessian

    theta = torch.zeros_like(prior)
    # Start from the base rate: from zero the first steps would only look for it.
    theta[-1] = torch.logit(wanted.double().mean().clamp(1e-6, 1 - 1e-6))
    value, grad, hessian = sums(theta)
    for _ in range(100):
        ridge = 1e-10 * hessian.diagonal().abs().max().clamp_min(1e-10)
        step = torch.linalg.solve(hessian + ridge * torch.eye(len(theta)).to(hessian), grad)
        if (grad @ step).item() < 1e-9 * (1 + abs(value)):
            break
        size = 1.0
        while (trial := sums(theta - size * step))[0] >= value:
            size /= 2
            if size < 1e-9:  # no downhill step is left in fp64
                return theta
        theta = theta - size * step
        value, grad, hessian = trial
    return theta
