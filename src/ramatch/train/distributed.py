"""Several processes (torchrun): who am I, and collectives that carry gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..recognizer import pick_device

TIMEOUT = timedelta(hours=2)  # the leader evaluates while the others wait: the usual ten minutes could be too short


@dataclass(frozen=True)
class World:
    """This process among its peers. `leader` is the only one that writes files."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leader(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until all are here."""
        self.mean(torch.zeros((), device=self.device)).item()

    def mean(self, value: Tensor) -> Tensor:
        """Mean over processes."""
        if self.size == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value / self.size


@contextmanager
def world(device: str | None = None) -> Iterator[World]:
    """The world that torchrun's environment describes, or a single process; left in order at the end."""
    size, rank, local = (int(os.environ.get(name, 0)) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"))
    chosen = pick_device(device)
    if chosen.type == "cuda":
        chosen = pick_device(f"cuda:{local}") if size > 1 else chosen
        torch.cuda.set_device(chosen)
    if size <= 1:
        yield World(chosen)
        return
    own = not dist.is_initialized()
    if own:
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        store = _store(rank, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield World(chosen, rank, size)
    finally:
        if own:
            dist.destroy_process_group()


def _store(rank: int, size: int) -> dist.Store:
    """Where processes find each other. torchrun keeps one store over its restarts, in which those who start again would
    find the addresses of those who are dead; so each start looks in a place of its own. Only where there is one agent:
    several count their restarts apart (docs/training.md says what helps there)."""
    store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=TIMEOUT))
    start, agents = (os.environ.get(name) for name in ("TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"))
    return dist.PrefixStore(f"start-{start}", store) if start and agents == "1" else store


def gather(tensor: Tensor) -> tuple[Tensor, int]:
    """All processes' tensors (same shape) joined along the first axis, and how many there are; gradients flow back to
    each, so that a loss over the global batch can be computed everywhere (see `losses.mmc`)."""
    from torch.distributed.nn.functional import all_gather  # here, because some builds of torch have none

    parts = all_gather(tensor.contiguous())
    return torch.cat(parts), len(parts)
