"""One update, the only one: forward, backward, unscale, clip, optimizers, bounds; as one CUDA graph where it can be.

At batch 32 a step is some two thousand small kernels, and starting them one by one from Python takes longer than
running them. A graph starts them all at once. Where there is no GPU, or recording fails, the same step runs eagerly.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..modeling.graph import Recorder
from .config import OptimConfig
from .distributed import World
from .optim import all_groups, build_optimizers, clamp, clip_together
from .task import Batch, Task

WARMUP = 3  # eager steps before recording; they count as training steps like any other


class TrainStep:
    """`step(batches)` → their mean loss (), detached, after one update of all parameters.

    With `graph`, the first `WARMUP` steps are eager; the next one is recorded and replayed from then on. Batches of
    another shape (the last of an epoch) run eagerly in between. Learning rates may be changed between steps as usual
    (`group["lr"]`). What needs the host in its middle (fp16's scaler, accumulation, DDP) is never recorded."""

    def __init__(
        self, task: Task, config: OptimConfig, here: World, *, fp16: bool = False, graph: bool | None = None
    ) -> None:
        self.task, self.config = task, config
        self.optimizers = build_optimizers(task.roles(), config)
        self.parameters = [p for p in task.parameters() if p.requires_grad]
        self.limits = task.limits(config.temperature_floor)
        self.scaler = torch.amp.GradScaler(here.device.type, enabled=fp16)
        self.model = DistributedDataParallel(task) if here.size > 1 else task
        if graph is None:
            graph = here.device.type == "cuda"
        self.recorder = Recorder(here.device, warmup=0) if graph and not fp16 and here.size == 1 else None
        self.why_eager: str | None = None
        self.steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Batch = ()
        self._loss = torch.zeros(())
        self._held: Any = None
        self._rates: list[tuple[dict[str, Any], Tensor, float | None]] = []

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        self.steps += 1
        if self.recorder is None or self.config.accumulate > 1:
            return self._eager(batches)
        if self._graph is None:
            if self.steps <= WARMUP:
                return self._aside(batches)
            try:
                self._record(batches[0])
            except Exception as error:  # whatever a driver or a library objects to, eager does the same work
                self.recorder, self._inputs, self.why_eager = None, (), f"{type(error).__name__}: {error}"
                warnings.warn(f"training goes on without a CUDA graph: {self.why_eager}", RuntimeWarning, stacklevel=2)
                return self._eager(batches)
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(self._inputs, batches[0], strict=True)):
            return self._aside(batches)
        return self._replay(batches[0])

    def _eager(self, batches: Sequence[Batch]) -> Tensor:
        loss = self._update(batches)
        self._zero_grad()
        return loss

    def _update(self, batches: Sequence[Batch]) -> Tensor:
        losses = []
        for i, batch in enumerate(batches):
            waiting = isinstance(self.model, DistributedDataParallel) and i + 1 < len(batches)
            with self.model.no_sync() if waiting else nullcontext():  # type: ignore[operator,union-attr]
                loss = self.model(*batch) / len(batches)
                self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        self.finish()
        return torch.stack(losses).sum()

    def finish(self) -> None:
        """Everything after the backward pass."""
        clip_together(self.optimizers, self.parameters, self.config.clip_norm, self.scaler)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        clamp(self.limits)

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    # -------------------------------------------------------------------------------------------- as a CUDA graph

    def _aside(self, batches: Sequence[Batch]) -> Tensor:
        """An eager step on the recording's stream: autograd ties a parameter's gradient to the stream it was first made
        on."""
        assert self.recorder is not None
        stream, current = self.recorder.stream, torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            loss = self._eager(batches)
        current.wait_stream(stream)
        loss.record_stream(current)
        for value in batches[0]:
            value.record_stream(stream)
        return loss

    def _record(self, batch: Batch) -> None:
        """Record the step; nothing runs, so the step itself is the first replay."""
        assert self.recorder is not None
        self._inputs = tuple(value.clone() for value in batch)
        groups = list(all_groups(self.optimizers))
        device = self._inputs[0].device
        # rates as tensors that the graph reads anew each time; the groups keep numbers, which schedules and logs expect
        self._rates = [(group, torch.full((), float(group["lr"]), device=device), None) for group in groups]
        kept = [dict(group) for group in groups]
        self._zero_grad()
        torch.cuda.empty_cache()  # the graph has memory of its own: what eager steps took goes back to the device
        try:
            for group, rate, _ in self._rates:
                group |= {"lr": rate} | ({"capturable": True} if "capturable" in group else {})
            graph, self._loss = self.recorder.record(lambda: self._update([self._inputs]))
        finally:
            for group, before in zip(groups, kept, strict=True):
                group |= before
            self._zero_grad()  # the graph has its own gradients; eager steps in between make theirs
        self._held, self._graph = self.task.constants(), graph

    def _replay(self, batch: Batch) -> Tensor:
        for static, value in zip(self._inputs, batch, strict=True):
            static.copy_(value, non_blocking=True)
        for i, (group, rate, last) in enumerate(self._rates):
            if group["lr"] != last:
                rate.fill_(group["lr"])
                self._rates[i] = (group, rate, group["lr"])
        assert self._graph is not None
        self._graph.replay()
        return self._loss.clone()
