"""Logistic regression on (n, N, F) features with a hierarchical bias per label, in fp64.

Minimises, over the pairs with weight 1 in `known`,

    sum -t log q - (1 - t) log(1 - q) + l2/2 |w|^2 + sum_j u_j^2 / (2 spread^2),   q = c sigmoid(z w + b + u_j)

where c is the share of true labels that were annotated at all (1: complete; less: an unmarked label may be true).
Fisher scoring with backtracking; the labels' block of the information matrix is diagonal, so a step costs O(N F^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

_ROWS = 1 << 19  # pairs looked at together: bounds the fp64 temporaries


@dataclass
class Logistic:
    """weights (F,), bias (), label_bias (N,), label_variance (N,) of its posterior, spread of the labels' prior."""

    weights: Tensor
    bias: Tensor
    label_bias: Tensor
    label_variance: Tensor
    spread: float


@dataclass
class _Problem:
    features: Tensor  # (n, N, F) any float type, standardised chunk by chunk
    targets: Tensor  # (n, N) in [0, 1]
    known: Tensor | None
    mean: Tensor
    scale: Tensor
    l2: float
    completeness: float

    def sums(
        self, theta: Tensor, labels: Tensor, spread: float
    ) -> tuple[float, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Objective, its gradient (F+1,) and (N,), and the blocks (F+1, F+1), (N, F+1), (N,) of the information."""
        n, width, size = self.features.shape
        new = torch.zeros(0, dtype=torch.float64, device=self.features.device)
        value = 0.0
        grad, grad_labels = new.new_zeros(size + 1), new.new_zeros(width)
        info = new.new_zeros(size + 1, size + 1)
        cross, info_labels = new.new_zeros(width, size + 1), new.new_zeros(width)
        hidden = math.log1p(-self.completeness) if self.completeness < 1 else -math.inf
        step = max(1, _ROWS // max(width, 1))
        for start in range(0, n, step):
            rows = slice(start, start + step)
            z = (self.features[rows].double() - self.mean) / self.scale
            z = torch.cat([z, torch.ones_like(z[..., :1])], dim=-1)
            t, f = self.targets[rows].double(), z @ theta + labels
            p, missed = torch.sigmoid(f), torch.sigmoid(f + hidden)
            # -log q = softplus(-f) - log c,  -log(1 - q) = softplus(f) - softplus(f + log(1 - c))
            loss = t * softplus(-f) + (1 - t) * (softplus(f) - softplus(f + hidden))
            slope = (1 - t) * (p - missed) - t * (1 - p)
            weight = (1 - p) * (p - missed)
            if self.known is not None:
                k = self.known[rows].double()
                loss, slope, weight = loss * k, slope * k, weight * k
            value += loss.sum().item()
            grad += torch.einsum("bn,bnf->f", slope, z)
            grad_labels += slope.sum(0)
            weighted = weight[..., None] * z
            info += torch.einsum("bnf,bng->fg", weighted, z)
            cross += weighted.sum(0)
            info_labels += weight.sum(0)
        prior = new.new_full((size + 1,), self.l2)
        prior[-1] = 0.0
        value += 0.5 * (prior * theta**2).sum().item()
        grad += prior * theta
        info += torch.diag(prior)
        if spread > 0:
            value += 0.5 * (labels**2).sum().item() / spread**2
            grad_labels += labels / spread**2
            info_labels += 1 / spread**2
        return value, grad, grad_labels, info, cross, info_labels


def moments(x: Tensor, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (F,) over the pairs of (n, N, F); a constant feature has scale 1, so weight 0."""
    rows = x.reshape(-1, x.shape[-1]) if known is None else x[known]
    mean = rows.mean(0, dtype=torch.float64)
    variance = [(rows[:, j].double() - mean[j]).square().mean() for j in range(rows.shape[1])]
    scale = torch.stack(variance).sqrt()
    return mean, torch.where(scale > 1e-9 * mean.abs().clamp_min(1e-3), scale, torch.ones_like(scale))


def fit_logistic(
    features: Tensor,
    targets: Tensor,
    *,
    mean: Tensor,
    scale: Tensor,
    known: Tensor | None = None,
    l2: float = 1.0,
    signs: Tensor | None = None,
    per_label: bool = False,
    completeness: float = 1.0,
    max_iter: int = 100,
) -> Logistic:
    """Fit. `signs` (F,) in {-1, 0, 1}: a weight must not have the other sign. `per_label` adds the label biases.

    Their spread is found by empirical Bayes (EM on the Laplace posterior), with one pseudo-label of spread 1 so
    that a handful of labels, or one, is no problem.
    """
    width, size = features.shape[1:]
    problem = _Problem(features, targets, known, mean, scale, l2, completeness)
    new = torch.zeros(0, dtype=torch.float64, device=features.device)
    theta, labels = new.new_zeros(size + 1), new.new_zeros(width)
    # Start from the base rate: from zero the first steps would only look for it.
    rate = targets.double().mean() if known is None else targets.double()[known.bool()].mean()
    theta[-1] = torch.logit(rate.nan_to_num(0.5).clamp(1e-6, 1 - 1e-6))
    spread = 1.0 if per_label else 0.0
    signs = new.new_zeros(size) if signs is None else signs.to(new)
    signs = torch.cat([signs, signs.new_zeros(1)])
    for _ in range(30):
        theta, labels, variance = _minimise(problem, theta, labels, spread, signs, max_iter)
        if not per_label:
            break
        old, spread = spread, math.sqrt(((labels**2 + variance).sum().item() + 1.0) / (width + 1))
        if abs(spread - old) < 1e-3 * old:
            break
    return Logistic(theta[:-1], theta[-1], labels, variance, spread)


def _minimise(
    problem: _Problem, theta: Tensor, labels: Tensor, spread: float, signs: Tensor, max_iter: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Projected Newton: weights that press against their bound are held, the rest takes a Newton step."""
    value, grad, grad_labels, info, cross, info_labels = problem.sums(theta, labels, spread)
    for _ in range(max_iter):
        free = ~((signs != 0) & (theta * signs <= 0) & (grad * signs >= 0))
        step, step_labels = torch.zeros_like(theta), torch.zeros_like(labels)
        schur, right = info, grad
        if spread > 0:
            schur = info - cross.T @ (cross / info_labels[:, None])
            right = grad - cross.T @ (grad_labels / info_labels)
        ridge = 1e-10 * schur.diagonal().abs().max().clamp_min(1e-10)
        block = schur[free][:, free]
        step[free] = torch.linalg.solve(block + ridge * torch.eye(len(block)).to(block), right[free])
        if spread > 0:
            step_labels = (grad_labels - cross @ step) / info_labels
        decrement = (grad[free] @ step[free] + grad_labels @ step_labels).item()
        if decrement < 1e-9 * (1 + abs(value)):
            break
        size = 1.0
        for _ in range(30):
            trial = theta - size * step
            trial = torch.where((signs != 0) & (trial * signs < 0), torch.zeros_like(trial), trial)
            state = problem.sums(trial, labels - size * step_labels, spread)
            if state[0] < value:
                break
            size /= 2
        else:
            break  # no downhill step is left in fp64
        theta, labels = trial, labels - size * step_labels
        value, grad, grad_labels, info, cross, info_labels = state
    return theta, labels, 1 / info_labels if spread > 0 else torch.zeros_like(labels)
