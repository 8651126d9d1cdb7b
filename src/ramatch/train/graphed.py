"""A whole training step (forward, backward, clipping, optimisers, EMA) as one CUDA graph.

At batch 32 a step is some two thousand small kernels, and starting them one by one from Python takes longer than running them.
A graph starts them all at once. Where there is no GPU, or recording fails, the same step runs eagerly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .optim import clip_together

WARMUP = 3  # eager steps before recording; they count as training steps like any other


class GraphedStep:
    """`step(pixels, targets)` → the loss (), detached, after one update of all parameters.

    The first `WARMUP` steps on CUDA are eager; the next one is recorded and replayed from then on. Batches of another shape (the
    last of an epoch) run eagerly in between. Learning rates may be changed between steps as usual (`group["lr"]`).

    Args:
        forward: inputs → loss (); everything it reads beside its inputs must stay where it is (parameters, buffers, constants).
        optimizers: stepped in order; AdamW and SGD, `fused` on CUDA.
        parameters: those whose gradients are clipped to `clip_norm`.
        after: called after the optimisers (clamping, EMA): device work only.
        holds: called once after recording; what it returns is kept alive, because the graph reads it (kept label prefixes).
        enabled: None: where the parameters are on CUDA.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        parameters: Iterable[nn.Parameter] = (),
        clip_norm: float | None = None,
        after: Sequence[Callable[[], None]] = (),
        holds: Callable[[], Any] | None = None,
        enabled: bool | None = None,
    ) -> None:
        self.forward, self.optimizers = forward, list(optimizers)
        self.parameters, self.clip_norm, self.after, self.holds = list(parameters), clip_norm, list(after), holds
        own = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        self.enabled = all(p.is_cuda for p in own) if enabled is None else enabled
        self.why_eager: str | None = None
        self.steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._loss: Tensor | None = None
        self._held: Any = None
        self._rates: list[tuple[dict[str, Any], Tensor, float | None]] = []

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.steps += 1
        if not self.enabled:
            return self._eager(inputs)
        if self._graph is None:
            if self.steps <= WARMUP:
                return self._aside(inputs)
            try:
                self._record(inputs)
            except Exception as error:  # whatever a driver or a library objects to, eager does the same work
                self._give_up(error)
                return self._eager(inputs)
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(self._inputs, inputs, strict=True)):
            return self._aside(inputs)
        for static, value in zip(self._inputs, inputs, strict=True):
            static.copy_(value, non_blocking=True)
        self._set_rates()
        assert self._graph is not None
        assert self._loss is not None
        self._graph.replay()
        return self._loss.clone()

    def _eager(self, inputs: Sequence[Tensor]) -> Tensor:
        loss = self._update(inputs)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return loss

    def _update(self, inputs: Sequence[Tensor]) -> Tensor:
        loss = self.forward(*inputs)
        loss.backward()
        self.finish()
        return loss.detach()

    def finish(self) -> None:
        """Everything after the backward pass."""
        if self.clip_norm is not None:
            clip_together(self.optimizers, self.parameters, self.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        for call in self.after:
            call()

    def _aside(self, inputs: Sequence[Tensor]) -> Tensor:
        """An eager step on the recording's stream: autograd ties a parameter's gradient to the stream it was first made on."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self._eager(inputs)
        current.wait_stream(self._stream)
        loss.record_stream(current)
        for value in inputs:
            value.record_stream(self._stream)
        return loss

    def _record(self, inputs: Sequence[Tensor]) -> None:
        """Record the step; nothing runs, so the step itself is the first replay."""
        self._inputs = tuple(value.clone() for value in inputs)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        device = self._inputs[0].device
        # rates as tensors that the graph reads anew each time; the groups keep numbers, which is what schedules and logs expect
        self._rates = [(group, torch.full((), float(group["lr"]), device=device), None) for group in groups]
        kept = [(group, group["lr"], group.get("capturable")) for group in groups]
        current = torch.cuda.current_stream()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        try:
            for group, rate, _ in self._rates:
                group["lr"] = rate
                if "capturable" in group:
                    group["capturable"] = True
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = self._update(self._inputs)
        finally:
            torch.cuda.set_stream(current)  # a recording that fails may leave its own stream behind
            for group, lr, capturable in kept:
                group["lr"] = lr
                if capturable is not None:
                    group["capturable"] = capturable
            for optimizer in self.optimizers:  # the graph has its own gradients; eager steps in between make theirs
                optimizer.zero_grad(set_to_none=True)
        self._held = self.holds() if self.holds is not None else None
        self._graph = graph

    def _set_rates(self) -> None:
        for i, (group, rate, last) in enumerate(self._rates):
            if group["lr"] != last:
                rate.fill_(group["lr"])
                self._rates[i] = (group, rate, group["lr"])

    def _give_up(self, error: Exception) -> None:
        self.enabled, self.why_eager = False, f"{type(error).__name__}: {error}"
        self._loss, self._inputs, self._graph = None, (), None
        warnings.warn(f"training goes on without a CUDA graph: {self.why_eager}", RuntimeWarning, stacklevel=3)
