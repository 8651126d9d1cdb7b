"""Similarities as a region set and a label set make them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def features(batch: int, regions: int, labels: int, dim: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit-length regions (B, M, D) that lean towards a few of the unit-length labels (N, D)."""
    g = torch.Generator().manual_seed(seed)
    label_set = normalize(torch.randn(labels, dim, generator=g), dim=-1)
    scene = label_set[torch.randint(labels, (batch, 1), generator=g)]
    thing = label_set[torch.randint(labels, (batch, regions), generator=g)]
    noise = torch.randn(batch, regions, dim, generator=g)
    return normalize(2 * scene + 2 * thing + noise, dim=-1), label_set


def similarities(batch: int, regions: int, labels: int, seed: int = 0) -> Tensor:
    """(B, M, N) cosines."""
    region_set, label_set = features(batch, regions, labels, seed=seed)
    return 0.5 * region_set @ label_set.T
