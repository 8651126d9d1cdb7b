"""What the solver returns. Nothing here carries a gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OTResult:
    """Solution of B entropic transport problems (the leading axis is absent if the cost had none).

    `potentials` follow POT (`ot.solve`, `ot.solve_batch`): logarithms of the scalings, so that
    `plan = exp(u[:, :, None] + v[:, None, :] - cost / reg)`. A zero weight has the finite potential -1e30,
    which exp turns into an exact zero.
    """

    plan: Tensor  # (B, n, m); its columns sum to `b` exactly, its rows to `a` up to `error`
    potentials: tuple[Tensor, Tensor]  # (B, n) and (B, m) log-scalings u, v
    n_iter: Tensor  # (B,) int64, iterations after which each problem stopped
    error: Tensor  # (B,) L1 distance between the plan's row sums and `a`
    converged: Tensor  # (B,) bool, whether the stopping rule was met within `max_iter` iterations
    cost: Tensor  # (B, n, m) as given
    reg: float | Tensor  # entropic weight, or (B,) of them

    @property
    def potential_a(self) -> Tensor:
        """(B, n) row potentials."""
        return self.potentials[0]

    @property
    def potential_b(self) -> Tensor:
        """(B, m) column potentials."""
        return self.potentials[1]

    @property
    def value_linear(self) -> Tensor:
        """(B,) transport cost <plan, cost>."""
        return (self.plan * self.cost).sum((-2, -1))

    @property
    def value(self) -> Tensor:
        """(B,) regularized objective <plan, cost> - reg H(plan), with 0 log 0 = 0."""
        return self.value_linear + self.reg * torch.xlogy(self.plan, self.plan).sum((-2, -1))


@dataclass(frozen=True)
class MatchScores:
    """Region scores of B images."""

    scores: Tensor  # (B, N) float32, N times the sum over regions of plan * sim
    marginal: Tensor  # (B, M) region weights u
    n_iter: Tensor  # (B,) int64 Sinkhorn iterations
    error: Tensor  # (B,) L1 distance between the plan's row sums and `marginal`
    converged: Tensor  # (B,) bool, error below the tolerance
