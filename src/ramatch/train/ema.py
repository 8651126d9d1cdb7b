"""Exponential moving average of the adapters, in a few fused kernels and without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class HasAdapters(Protocol):
    """RAM, or anything with learned state beside a frozen backbone."""

    def adapters(self) -> dict[str, Tensor]: ...


class EMA:
    """average ← decay · average + (1 − decay) · weights, for parameters and BatchNorm's running statistics; counters
    are copied."""

    def __init__(self, model: HasAdapters, decay: float) -> None:
        self.decay = decay
        self.live = {name: t.detach() for name, t in model.adapters().items()}  # views: they follow the model
        self.average = {name: t.clone() for name, t in self.live.items()}
        floating = [name for name, t in self.live.items() if t.is_floating_point() and t.numel()]
        counters = [name for name in self.live if name not in set(floating)]
        self._from = [self.live[name] for name in floating]
        self._to = [self.average[name] for name in floating]
        self._counters = [(self.average[name], self.live[name]) for name in counters]

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(self._to, self._from, 1 - self.decay)
        for average, live in self._counters:
            average.copy_(live)

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the current weights."""
        for name, live in self.live.items():
            self.average[name].copy_(live)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, live in self.live.items():
            kept = live.clone()
            live.copy_(self.average[name])
            self.average[name].copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.average)

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, average in self.average.items():
            average.copy_(state[name])
