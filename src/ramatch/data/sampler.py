"""Which sample when: a shuffle that can be stopped anywhere and continued exactly."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from ramatch.errors import RamatchError


class Draw(NamedTuple):
    """One sample of one epoch; the epoch travels with the item so that a worker can seed from both."""

    item: int
    epoch: int


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Seed of one sample's augmentation: the same whichever worker, rank or resumed run draws it."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class ResumableSampler(Sampler[list[Draw]]):
    """Batches of `Draw`s for `DataLoader(..., batch_sampler=sampler)`; its place is (epoch, position).

    The order of an epoch depends on (seed, epoch) alone. Global batch k is the next `batch_size * world_size`
    samples of it, and rank r takes the r-th `batch_size` of those, so that two processes see together exactly
    what one process with twice the batch sees.

    Iterating does not move the place, because workers fetch ahead of the training step: call `advance()` after
    each batch that has been used. The last advance of an epoch starts the next one. `position` counts samples
    over all ranks, so a run may be resumed with another batch size or number of processes.

    Without `drop_last` a last, short global batch is filled up from the start of the epoch's order to a
    multiple of `world_size`, as every rank must take part in it.
    """

    def __init__(
        self,
        length: int,
        seed: int = 0,
        batch_size: int = 32,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = True,
    ) -> None:
        if length < 1 or batch_size < 1 or not 0 <= rank < world_size:
            raise RamatchError(
                f"sampler needs length, batch_size >= 1 and 0 <= rank < world_size; got length={length}, "
                f"batch_size={batch_size}, rank={rank}, world_size={world_size}"
            )
        self.length, self.seed, self.batch_size, self.drop_last = length, seed, batch_size, drop_last
        self.rank, self.world_size, self.global_batch = rank, world_size, batch_size * world_size
        self.epoch = self.position = 0
        self.batches_per_epoch = len(self)
        if not self.batches_per_epoch:
            raise RamatchError(
                f"{length} samples do not fill one batch of {batch_size} x {world_size} process(es): "
                "use a smaller batch or drop_last=False"
            )

    def __len__(self) -> int:
        """Batches left in this epoch: what iterating now gives."""
        left = max(0, self.length - self.position)
        return left // self.global_batch if self.drop_last else math.ceil(left / self.global_batch)

    def order(self, epoch: int) -> torch.Tensor:
        """(length,) order of the samples in `epoch`."""
        generator = torch.Generator().manual_seed(sample_seed(self.seed, epoch, -1))
        return torch.randperm(self.length, generator=generator)

    def __iter__(self) -> Iterator[list[Draw]]:
        epoch, order = self.epoch, self.order(self.epoch)
        for start in [self.position + k * self.global_batch for k in range(len(self))]:
            chunk = order[start : start + self.global_batch]
            short = -len(chunk) % self.world_size
            if short:
                chunk = torch.cat([chunk, order.repeat(short // self.length + 1)[:short]])
            share = len(chunk) // self.world_size
            mine = chunk[self.rank * share : (self.rank + 1) * share]
            yield [Draw(item, epoch) for item in mine.tolist()]

    def rows(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The same as index tensors (B,) on a device, all copied there at once."""
        batches = [[item for item, _ in batch] for batch in self]
        order = torch.tensor([item for batch in batches for item in batch], dtype=torch.long)
        return order.to(device).split([len(batch) for batch in batches])

    def advance(self, batches: int = 1) -> None:
        """Note that `batches` more batches have been used; passes into the next epoch at the end of one."""
        for _ in range(batches):
            self.position += self.global_batch
            self._leave_finished_epoch()

    def _leave_finished_epoch(self) -> None:
        if len(self) == 0:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed, "length": self.length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("seed", "length"):
            if state[name] != getattr(self, name):
                raise RamatchError(
                    f"cannot resume: the saved run's sampler has {name} {state[name]}, this one "
                    f"{getattr(self, name)}; resume with the same data and seed, or start a new run"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._leave_finished_epoch()  # another batch size may leave no full batch behind this position
