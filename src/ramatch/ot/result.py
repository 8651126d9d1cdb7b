"""What the solver returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class OTResult:
    """Solution of B entropic transport problems (the leading axis is absent if the cost had none).

    `potentials` follow POT (`ot.solve`, `ot.solve_batch`): logarithms of the scalings, so that
    `plan = exp(u[:, :, None] + v[:, None, :] - cost / reg)`. A zero weight has the finite potential -1e30,
    which exp turns into an exact zero. Nothing here carries a gradient.
    """

    plan: Tensor
    """(B, n, m) transport plan; its columns sum to `b` exactly, its rows to `a` up to `error`."""
    potentials: tuple[Tensor, Tensor]
    """(B, n) and (B, m) log-scalings u, v."""
    n_iter: Tensor
    """(B,) int64, iterations after which each problem stopped."""
    error: Tensor
    """(B,) L1 distance between the plan's row sums and `a`."""
    converged: Tensor
    """(B,) bool, whether the stopping rule was met within `max_iter` iterations."""
    cost: Tensor
    """(B, n, m) the cost as given."""
    reg: float | Tensor
    """Entropic weight, or (B,) of them."""

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
        """(B,) regularised objective <plan, cost> - reg H(plan), with 0 log 0 = 0."""
        return self.value_linear + self.reg * torch.xlogy(self.plan, self.plan).sum((-2, -1))
