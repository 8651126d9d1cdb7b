"""What a training is about: what learns, from which batches, by which loss. The trainer does the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..data.augment import Normalize
from ..data.sampler import ResumableSampler
from ..errors import RamatchError
from ..evaluation.protocol import Report
from ..methods import Method
from ..modeling.ram import RAM, Output, Trunk
from .optim import Limit, Roles, trainable

Batch = tuple[Tensor, ...]


class Task(nn.Module):
    """`task(*batch)` → loss (). A module, so that DistributedDataParallel can wrap it.

    The loss is device work alone, fit for a CUDA graph. `sampler` says where in which epoch the training is."""

    sampler: ResumableSampler

    def roles(self) -> Roles:
        """What learns, by role (see `optim.param_groups`)."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """Tensors that are averaged, saved and restored: all that learns, and statistics."""
        raise NotImplementedError

    def batches(self) -> Iterable[Batch]:
        """Those left in the sampler's epoch, on the device."""
        raise NotImplementedError

    def limits(self, floor: float) -> list[Limit]:
        """Bounds that hold after every step; `floor`: share of where a temperature starts."""
        return []

    def constants(self) -> Any:
        """What a recorded step reads beside its inputs and parameters; kept alive with the recording."""
        return None

    def notes(self) -> dict[str, float]:
        """Numbers that each line of the log has."""
        return {}

    def identity(self) -> dict[str, str]:
        """Fingerprints of what a run began with, which must be the same when it is continued."""
        return {}

    def evaluate(self) -> Report | None:
        """On validation data, if there is any."""
        return None

    def end_epoch(self, step: int) -> None:
        """Called after each epoch's last step."""


class RAMTask(Task):
    """RAM's adapters, prompts and temperatures from uint8 pixels (B, 3, H, W) and targets (B, N)."""

    def __init__(
        self, ram: RAM, labels: Iterable[str], loss: str, dtype: torch.dtype, gather: Callable | None = None
    ) -> None:
        super().__init__()
        self.ram, self.labels, self.kind, self.dtype, self.gather = ram, tuple(labels), loss, dtype, gather
        self.normalize = Normalize(ram.preprocess.mean, ram.preprocess.std).to(ram.backbone.device)
        self.learns = not isinstance(ram, Method) or ram.learns
        if self.learns:
            trainable(ram)

    def prepare(self) -> None:
        """Show a system the training images that wants to see them before it learns."""
        if isinstance(self.ram, Method) and self.ram.needs_images:
            training = self.ram.training
            with torch.no_grad():
                self.ram.eval().prepare(self.trunks(), self.labels)
            self.ram.train(training)

    def trunks(self) -> Iterator[Trunk]:
        """Of the training images, as they are, in a random order."""
        raise NotImplementedError

    def autocast(self) -> torch.autocast:
        device = self.ram.backbone.device.type
        return torch.autocast(device, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def forward(self, pixels: Tensor, targets: Tensor) -> Tensor:
        with self.autocast():
            x = self.normalize(pixels).to(self.dtype)
            return self.ram.loss(self.match(x, targets), targets, self.kind, self.gather)

    def match(self, pixels: Any, targets: Tensor, labels: Any = None) -> Output:
        """RAM's output with the teacher's guidance."""
        try:
            return self.ram(pixels, self.labels if labels is None else labels, targets)
        except RamatchError as error:  # the solver refuses NaN, whose cause lies in the weights
            if self._sound(pixels):
                raise
            raise diverged("NaN") from error

    @torch.no_grad()
    def _sound(self, pixels: Any) -> bool:
        """Whether the weights still give numbers."""
        labels = self.ram.encode_labels(self.labels)
        regions = self.ram.region_set.regions(self.ram.backbone, self.ram.trunk(pixels), labels.tss)
        return bool(self.ram.similarity(regions, labels).isfinite().all())

    def roles(self) -> Roles:
        found: dict[str, list[nn.Parameter]] = {"adapters": [], "temperatures": [], "prompts": []}
        for name, parameter in trainable(self.ram).items():
            temperature, last = name.startswith("tau_"), name.rpartition(".")[2]
            role = "temperatures" if temperature else "prompts" if last.endswith("prompts") else "adapters"
            found[role].append(parameter)
        return found

    def limits(self, floor: float) -> list[Limit]:
        return [(t, floor * abs(float(t.detach())), None) for t in self.roles()["temperatures"]]  # positive for ever

    def state(self) -> dict[str, Tensor]:
        return self.ram.adapters()

    def constants(self) -> Any:
        return self.ram.label_set.constants()

    def notes(self) -> dict[str, float]:
        return {"tau_region": self.ram.tau_region.item(), "tau_global": self.ram.tau_global.item()}


def diverged(what: str) -> RamatchError:
    return RamatchError(
        f"the loss is {what}: training diverged; use a smaller learning rate, or precision bf16 or fp32. "
        "Earlier checkpoints are untouched"
    )
