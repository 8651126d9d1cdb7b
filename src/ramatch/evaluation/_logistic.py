"""Logistic regression on (n, N, F) features with a hierarchical bias per label, in fp64.

Minimizes  sum -t log p - (1 - t) log(1 - p) + l2/2 |w|^2 + sum_j u_j^2 / (2 spread^2),   p = sigmoid(z w + b + u_j),
by Newton steps with backtracking; the labels' block of the Hessian is diagonal, so a step costs O(N F^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

_PAIRS = 1 << 19  # looked at together: bounds the fp64 temporaries


@dataclass
class Logistic:
    """weights (F,), bias (), label_bias (N,), label_variance (N,) of its posterior, spread of the labels' prior."""

    weights: Tensor
    bias: Tensor
    label_bias: Tensor
    label_variance: Tensor
    spread: float


class _Sums(NamedTuple):
    """The objective, its gradient in theta = (w, b) and in the label biases, and the three blocks of its Hessian."""

    value: float
    grad: Tensor  # (F+1,)
    grad_labels: Tensor  # (N,)
    hessian: Tensor  # (F+1, F+1)
    cross: Tensor  # (N, F+1)
    hessian_labels: Tensor  # (N,), the diagonal


@dataclass
class _Problem:
    features: Tensor  # (n, N, F) any float type, standardized chunk by chunk
    targets: Tensor  # (n, N) in [0, 1]
    mean: Tensor
    scale: Tensor
    l2: float

    def sums(self, theta: Tensor, labels: Tensor, spread: float) -> _Sums:
        prior = torch.full_like(theta, self.l2)
        prior[-1] = 0.0
        value = 0.5 * (prior * theta**2).sum().item()
        grad, hessian = prior * theta, torch.diag(prior)
        grad_labels, hessian_labels = torch.zeros_like(labels), torch.zeros_like(labels)
        cross = labels.new_zeros(len(labels), len(theta))
        if spread > 0:
            value += 0.5 * (labels**2).sum().item() / spread**2
            grad_labels += labels / spread**2
            hessian_labels += 1 / spread**2
        step = max(1, _PAIRS // len(labels))
        for features, targets in zip(self.features.split(step), self.targets.split(step), strict=True):
            z = (features.double() - self.mean) / self.scale
            z = torch.cat([z, torch.ones_like(z[..., :1])], dim=-1)
            t, logits = targets.double(), z @ theta + labels
            p = torch.sigmoid(logits)
            weighted = (p * (1 - p))[..., None] * z
            value += (softplus(logits) - t * logits).sum().item()
            grad += torch.einsum("bn,bnf->f", p - t, z)
            grad_labels += (p - t).sum(0)
            hessian += torch.einsum("bnf,bng->fg", weighted, z)
            cross += weighted.sum(0)
            hessian_labels += weighted[..., -1].sum(0)
        return _Sums(value, grad, grad_labels, hessian, cross, hessian_labels)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (F,) over the pairs of (n, N, F); a constant feature has scale 1, so weight 0."""
    rows = x.reshape(-1, x.shape[-1])
    mean = rows.mean(0, dtype=torch.float64)
    scale = torch.stack([(rows[:, j].double() - mean[j]).square().mean() for j in range(rows.shape[1])]).sqrt()
    return mean, torch.where(scale > 1e-9 * mean.abs().clamp_min(1e-3), scale, torch.ones_like(scale))


def fit_logistic(
    features: Tensor, targets: Tensor, mean: Tensor, scale: Tensor, *, l2: float = 1.0, per_label: bool = False
) -> Logistic:
    """Fit to targets in [0, 1]; `per_label` adds the label biases.

    Their spread is found by empirical Bayes (EM on the Laplace posterior), with one pseudo-label of spread 1 so
    that a handful of labels, or one, is no problem.
    """
    width, size = features.shape[1:]
    problem = _Problem(features, targets, mean, scale, l2)
    theta, labels = mean.new_zeros(size + 1), mean.new_zeros(width)
    # Start from the base rate: from zero the first steps would only look for it.
    theta[-1] = torch.logit(targets.double().mean().clamp(1e-6, 1 - 1e-6))
    spread = 1.0 if per_label else 0.0
    for _ in range(30):
        theta, labels, variance = _minimize(problem, theta, labels, spread)
        if not per_label:
            break
        old, spread = spread, math.sqrt(((labels**2 + variance).sum().item() + 1.0) / (width + 1))
        if abs(spread - old) < 1e-3 * old:
            break
    return Logistic(theta[:-1], theta[-1], labels, variance, spread)


def _minimize(problem: _Problem, theta: Tensor, labels: Tensor, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method; the label biases are eliminated by their Schur complement."""
    at = problem.sums(theta, labels, spread)
    for _ in range(100):
        schur, right, step_labels = at.hessian, at.grad, torch.zeros_like(labels)
        if spread > 0:
            schur = schur - at.cross.T @ (at.cross / at.hessian_labels[:, None])
            right = right - at.cross.T @ (at.grad_labels / at.hessian_labels)
        ridge = 1e-10 * schur.diagonal().abs().max().clamp_min(1e-10)
        step = torch.linalg.solve(schur + ridge * torch.eye(len(schur)).to(schur), right)
        if spread > 0:
            step_labels = (at.grad_labels - at.cross @ step) / at.hessian_labels
        if (at.grad @ step + at.grad_labels @ step_labels).item() < 1e-9 * (1 + abs(at.value)):
            break
        size = 1.0
        while (trial := problem.sums(theta - size * step, labels - size * step_labels, spread)).value >= at.value:
            size /= 2
            if size < 1e-9:  # no downhill step is left in fp64
                return theta, labels, _variance(at, spread)
        theta, labels, at = theta - size * step, labels - size * step_labels, trial
    return theta, labels, _variance(at, spread)


def _variance(at: _Sums, spread: float) -> Tensor:
    return 1 / at.hessian_labels if spread > 0 else torch.zeros_like(at.hessian_labels)
