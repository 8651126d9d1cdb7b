"""What the halves of the pass hand on: labels, layers' state, trunks, outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .matching import Match


@dataclass(frozen=True)
class Labels:
    """An encoded vocabulary: names, unit features, the features TSS looks at, DualCoOp's negatives; each (N + K, D),
    where the last K belong to the background: labels that compete in matching but are not asked for."""

    names: tuple[str, ...]
    unit: Tensor
    tss: Tensor
    negative: Tensor | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.unit, self.tss, self.negative) if t is not None)

    @property
    def directions(self) -> Tensor:
        """(N + K, D): cos(x, positive) − cos(x, negative) is one product with the difference."""
        return self.unit if self.negative is None else self.unit - self.negative


@dataclass(frozen=True)
class Streams:
    """State between layers: main stream x (B, 1+M, W); rows and columns of the grid; base of the local stream (B, M,
    W), None before it starts; sum of SAA over the adapted layers; input of TSS (B, M, W) at each of those so far."""

    x: Tensor
    grid: tuple[int, int]
    base: Tensor | None = None
    found: Tensor | None = None
    taps: tuple[Tensor, ...] = ()

    def local(self, weight: float) -> Tensor:
        """Local stream (B, M, W), SAA of the adapted layers weighted; the main one's patches if it never started."""
        if self.base is None:
            return self.x[:, 1:]
        if self.found is None:
            return self.base
        return torch.add(self.base, self.found, alpha=weight)


@dataclass(frozen=True)
class Trunk:
    """What of B images no vocabulary changes.

    image: global feature (B, D), not normalized. local: local stream of patches without TSS (B, M, W). streams: the two
    of TSS at each adapted layer, before they look at labels, (B, M, D) each. grid: rows and columns of the M regions.
    """

    image: Tensor
    local: Tensor
    streams: tuple[Tensor, ...]
    grid: tuple[int, int]

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, rows: slice | Tensor) -> Trunk:
        return self.map(lambda t: t[rows])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.image, self.local, *self.streams)

    def map(self, function: Callable[[Tensor], Tensor]) -> Trunk:
        image, local, *streams = map(function, self.tensors)
        return Trunk(image, local, tuple(streams), self.grid)

    def clone(self) -> Trunk:
        return self.map(torch.clone)

    @staticmethod
    def cat(parts: Sequence[Trunk]) -> Trunk:
        image, local, *streams = (torch.cat(t) for t in zip(*(p.tensors for p in parts), strict=True))
        return Trunk(image, local, tuple(streams), parts[0].grid)


@dataclass(frozen=True)
class Output:
    """Scores s_R and s_G (B, N) (Eq. 14), and where they were asked for: cosine of each label's best region (B, N), the
    score by the model's rule (B, N), cosines of regions and labels (B, M, N) and the match.

    `mass`: what one column of the plan carries (1 / number of labels matched, background included)."""

    region: Tensor
    image: Tensor
    best_region: Tensor | None = None
    scores: Tensor | None = None
    sim: Tensor | None = None
    match: Match | None = None
    mass: float = 1.0
    grid: tuple[int, int] = (0, 0)

    @property
    def best(self) -> Tensor:
        """Cosine of each label's best region (B, N), of an output that was asked for it."""
        assert self.best_region is not None
        return self.best_region

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        m = self.match
        own = (self.region, self.image, self.best_region, self.scores, self.sim)
        found = own if m is None else (*own, m.plan, m.marginal, m.n_iter)
        return tuple(t for t in found if t is not None)

    def map(self, function: Callable[[Tensor], Tensor]) -> Output:
        def of(value: Any) -> Any:
            return None if value is None else function(value)

        m = self.match
        found = None if m is None else Match(of(m.plan), of(m.marginal), of(m.n_iter))
        own = {name: of(getattr(self, name)) for name in ("region", "image", "best_region", "scores", "sim")}
        return Output(**own, match=found, mass=self.mass, grid=self.grid)

    @staticmethod
    def cat(parts: Sequence[Output]) -> Output:
        if len(parts) == 1:
            return parts[0]
        joined = {id(same[0]): torch.cat(same) for same in zip(*(p.tensors for p in parts), strict=True)}
        return parts[0].map(lambda t: joined[id(t)])
