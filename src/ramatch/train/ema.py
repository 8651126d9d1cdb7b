"""Average of what learns, in a few fused kernels and without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class EMA:
    """average ← decay · average + (1 − decay) · weights, for parameters and BatchNorm's running statistics; counters
    are copied. `live`: the tensors of the model, which are followed where they lie."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self.live = {name: t.detach() for name, t in live.items()}
        self.average = {name: t.clone() for name, t in self.live.items()}
        floating = [name for name, t in self.live.items() if t.is_floating_point() and t.numel()]
        self._from = [self.live[name] for name in floating]
        self._to = [self.average[name] for name in floating]
        self._counters = [(self.average[name], t) for name, t in self.live.items() if name not in set(floating)]

    @torch.no_grad()
    def update(self, decay: float) -> None:
        torch._foreach_lerp_(self._to, self._from, 1 - decay)
        for average, live in self._counters:
            average.copy_(live)

    def restart(self) -> None:
        """Start again from the current weights."""
        _copy(self.live, self.average)

    def apply(self) -> None:
        """The model's weights become the averaged ones."""
        _copy(self.average, self.live)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        kept = {name: t.clone() for name, t in self.live.items()}
        self.apply()
        try:
            yield
        finally:
            _copy(kept, self.live)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.average)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _copy(state, self.average)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
