"""What the halves of the pass hand on: labels, layers' state, trunks, matches, outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor


class Tensors:
    """A frozen dataclass of tensors, also in tuples or in others of this kind; anything else in it stays as it is."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        def of(value: Any) -> Any:
            if isinstance(value, Tensors):
                return value.map(function)
            if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
                return tuple(map(function, value))
            return function(value) if isinstance(value, Tensor) else value

        return replace(self, **{name: of(value) for name, value in vars(self).items()})  # type: ignore[type-var]

    @property
    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        self.map(lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
        return found

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Joined along the first axis, which all tensors share."""
        joined = (torch.cat(same) for same in zip(*(part.tensors for part in parts), strict=True))
        return parts[0] if len(parts) == 1 else parts[0].map(lambda _: next(joined))


@dataclass(frozen=True)
class Match(Tensors):
    """plan (B, M, N), its region marginal (B, M), and the solver's iterations (B,) where one ran."""

    plan: Tensor
    marginal: Tensor
    n_iter: Tensor | None = None


@dataclass(frozen=True)
class Labels(Tensors):
    """An encoded vocabulary: names, unit features, the features TSS looks at, DualCoOp's negatives; each (N + K, D),
    where the last K belong to the background: labels that compete in matching but are not asked for. familiarity (N,):
    see `Known`. learned (N,): which of them the model's user taught it (`Learned`). evidence (N + K, D): DualCoOp++'s,
    which says where to look."""

    names: tuple[str, ...]
    unit: Tensor
    tss: Tensor
    negative: Tensor | None = None
    familiarity: np.ndarray | None = None
    learned: np.ndarray | None = None
    evidence: Tensor | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def directions(self) -> Tensor:
        """(N + K, D): cos(x, positive) − cos(x, negative) is one product with the difference."""
        return self.unit if self.negative is None else self.unit - self.negative


@dataclass(frozen=True)
class Streams(Tensors):
    """State between layers: main stream x (B, T, W), whose last M tokens are the patches; rows and columns of the grid;
    base of the local stream (B, M, W), None before it starts; sum of SAA over the adapted layers; input of TSS (B, M,
    W) at each of those so far."""

    x: Tensor
    grid: tuple[int, int]
    base: Tensor | None = None
    found: Tensor | None = None
    taps: tuple[Tensor, ...] = ()

    @property
    def patches(self) -> Tensor:
        """The main stream's patches, (B, M, W)."""
        return self.x[:, -math.prod(self.grid) :]

    def local(self, weight: float) -> Tensor:
        """Local stream (B, M, W), SAA of the adapted layers weighted; the main one's patches if it never started."""
        if self.base is None:
            return self.patches
        if self.found is None:
            return self.base
        return torch.add(self.base, self.found, alpha=weight)


@dataclass(frozen=True)
class Trunk(Tensors):
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

    def clone(self) -> Trunk:
        return self.map(torch.clone)


@dataclass(frozen=True)
class Output(Tensors):
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


class Runtime(Protocol):
    """What runs the trunk instead of torch, on a CPU: uint8 images (B, 3, height, width) of one size → their trunk."""

    name: str
    size: tuple[int, int]

    def __call__(self, images: Tensor) -> Trunk: ...
