"""Device work as CUDA graphs: a recorder, and RAM's pass recorded with it.

A pass is some hundreds of small kernels, and starting them one by one from Python takes longer than running them when
the batch is small. A graph starts them all at once.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import RamatchError
from .matching import on_host
from .ram import RAM, Labels, Output, Trunk
from .types import Runtime

T = TypeVar("T")


class Recorder:
    """Records functions that read and write tensors at fixed places. All graphs of one recorder share memory, so they
    must be replayed one at a time, and what one leaves behind is good until the next."""

    def __init__(self, device: torch.device, warmup: int = 2) -> None:
        self.device, self.warmup = device, warmup
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """Where recordings are made; work that belongs to them but runs eagerly in between goes there too."""
        if self._stream is None:
            with torch.cuda.device(self.device):
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        return self._stream

    def record(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of `function` and its result, whose tensors every replay rewrites. Runs it a few times first, so that
        kernels are compiled, algorithms chosen and handles made; then once more for the recording."""
        with torch.cuda.device(self.device):
            current, stream = torch.cuda.current_stream(), self.stream
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(self.warmup):
                    function()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # thread_local: a data loader's threads may go on pinning memory meanwhile
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    result = function()
            finally:
                torch.cuda.set_stream(current)  # a recording that fails may leave its own stream behind
            return graph, result


Way = tuple[bool, str | None]  # with a plan or without, and another matcher than the model's


@dataclass
class _Slot:
    """Static tensors and graphs of one batch size; every replay rewrites `trunk` and what the graphs of `ways` give."""

    images: Tensor
    trunk: Trunk
    encode: torch.cuda.CUDAGraph
    ways: dict[Way, tuple[torch.cuda.CUDAGraph, Output]] = field(default_factory=dict)


class GraphedRAM:
    """RAM's pass from uint8 images to scores, on CUDA as graphs: one for the trunk and one for each way to recognize, a
    set per batch size and vocabulary size. On a CPU it is the same pass without graphs. Threads may share one.

    >>> engine = GraphedRAM(fuse(ram))
    >>> engine(images, ram.encode_labels(names)).scores  # uint8 (B, 3, H, W), on any device → (B, N)

    Args:
        ram: a trained model; `fuse` makes a faster copy.
        batch_size: most images at once; more are taken in turns, fewer in the next power of two.
        best: also give each label's best region (a calibrator looks at it).
        patience: runs of a batch size without a graph before one is recorded, which takes as long as a few dozen runs.
            If recording fails the engine warns once and goes on without; see `why_eager`.
        runtime: what runs the trunk of images of its size instead of torch (`runtimes.py`), on a CPU.
    """

    def __init__(
        self,
        ram: RAM,
        *,
        batch_size: int = 32,
        best: bool = False,
        patience: int = 0,
        runtime: Runtime | None = None,
    ) -> None:
        if batch_size < 1:
            raise RamatchError("GraphedRAM: batch_size must be at least 1")
        self.ram, self.device, self.batch_size = ram, ram.backbone.device, batch_size
        self.best, self.patience, self.runtime = best, patience, runtime
        self.why_eager: str | None = None
        self.recorder = Recorder(self.device) if self.device.type == "cuda" else None
        self._static: Labels | None = None  # where graphs read labels
        self._placed: Labels | None = None  # whose numbers are there
        self._slots: dict[tuple[int, int, int], _Slot] = {}
        self._asked: Counter[tuple] = Counter()
        self._lock = RLock()  # of everything static

    def make_room(self, count: int) -> None:
        """Let at least so many images come at once."""
        with self._lock:
            self.batch_size = max(self.batch_size, count)

    @torch.inference_mode()
    def __call__(self, images: Tensor, labels: Labels, *, plan: bool = False, matcher: str | None = None) -> Output:
        """uint8 images (B, 3, H, W) → `Output` with these labels; cosines and plan in it if asked for."""
        self._check(images)
        if len(images) == 0:
            nothing = torch.empty(0, len(labels), device=self.device)
            return Output(nothing, nothing, nothing, nothing)
        with self._tuned():
            return Output.cat([self._run(part, labels, (plan, matcher)) for part in images.split(self.batch_size)])

    @torch.inference_mode()
    def trunk(self, images: Tensor) -> Trunk:
        """At most `batch_size` uint8 images (B, 3, H, W) → what to keep for other vocabularies."""
        self._check(images, at_once=len(images))
        with self._tuned():
            with self._lock:
                slot = self._encode(images)
                if slot is not None:
                    return slot.trunk[: len(images)].clone()
            return self._eager_trunk(images)

    @torch.inference_mode()
    def recognize(self, trunk: Trunk, labels: Labels, *, plan: bool = False, matcher: str | None = None) -> Output:
        """At most `batch_size` kept trunks with any labels."""
        way, patch = (plan, matcher), self.ram.backbone.vision.config.patch
        self._check(at_once=len(trunk))
        with self._tuned():
            with self._lock:
                slot = self._slot(len(trunk), *(n * patch for n in trunk.grid))
                graph = self._graph(slot, labels, way)
                if slot is not None and graph is not None:
                    for static, value in zip(slot.trunk[: len(trunk)].tensors, trunk.tensors, strict=True):
                        static.copy_(value)
                    return _replay(graph, len(trunk))
            return self._pass(trunk, labels, way)

    def _run(self, images: Tensor, labels: Labels, way: Way) -> Output:
        with self._lock:
            slot = self._encode(images)
            graph = self._graph(slot, labels, way)
            if graph is not None:
                return _replay(graph, len(images))
            trunk = self._eager_trunk(images) if slot is None else slot.trunk[: len(images)]
            return self._pass(trunk, labels, way)

    def _eager_trunk(self, images: Tensor) -> Trunk:
        if self.runtime is not None and tuple(images.shape[2:]) == self.runtime.size:
            return self.runtime(images)
        return self.ram.trunk(images.to(self.device, non_blocking=True))

    def _pass(self, trunk: Trunk, labels: Labels, way: Way) -> Output:
        found = self.ram.recognize(trunk, labels, plan=way[0], matcher=way[1], best=self.best)
        return replace(found, scores=self.ram.score(found))

    # ------------------------------------------------------------------------------------------------ graphs

    def _encode(self, images: Tensor) -> _Slot | None:
        """Fill the slot of this many images and run its first half; None where there is no graph."""
        slot = self._slot(len(images), *images.shape[2:])
        if slot is not None:
            slot.images[: len(images)].copy_(images, non_blocking=True)
            slot.encode.replay()
        return slot

    def _slot(self, count: int, height: int, width: int) -> _Slot | None:
        """Graph of the trunk for this many images or a few more; None where there are no graphs."""
        if self.recorder is None or count == 0:
            return None
        size = min(self.batch_size, 1 << (count - 1).bit_length())
        key = (size, height, width)
        if key not in self._slots and self._patient(key):
            images = torch.zeros(size, 3, height, width, dtype=torch.uint8, device=self.device)
            recorded = self._record(lambda: self.ram.trunk(images))
            if recorded is not None:
                recorded[0].replay()  # recording runs nothing; the second half's rehearsal wants numbers in the trunk
                self._slots[key] = _Slot(images, recorded[1], recorded[0])
        return self._slots.get(key)

    def _graph(self, slot: _Slot | None, labels: Labels, way: Way) -> tuple[torch.cuda.CUDAGraph, Output] | None:
        """Graph of a slot's second half and where its result is, with the labels in place; None where there is none."""
        config = self.ram.config if way[1] is None else self.ram.config.replace(matcher=way[1])
        if slot is None or self.recorder is None or on_host(config):
            return None
        static = self._place(labels)
        if way not in slot.ways and self._patient((tuple(slot.images.shape), way)):
            recorded = self._record(lambda: self._pass(slot.trunk, static, way))
            if recorded is not None:
                slot.ways[way] = recorded
        return slot.ways.get(way)

    def _place(self, labels: Labels) -> Labels:
        """Copy a vocabulary to where the graphs read theirs; one of another size needs other graphs."""
        old = self._static
        if labels is self._placed and old is not None:
            return old
        if old is not None and _shapes(old) == _shapes(labels):
            for static, value in zip(old.tensors, labels.tensors, strict=True):
                static.copy_(value)
            self._static = replace(old, names=labels.names)
        else:
            self._static = labels.map(lambda t: t.detach().to(self.device, copy=True))
            for slot in self._slots.values():
                slot.ways.clear()
        self._placed = labels
        return self._static

    def _patient(self, key: tuple) -> bool:
        """Whether this has been asked for often enough to be worth a graph."""
        self._asked[key] += 1
        return self._asked[key] > self.patience

    def _record(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T] | None:
        assert self.recorder is not None
        try:
            return self.recorder.record(function)
        except Exception as error:  # whatever a driver or a library objects to, eager does the same work
            self.why_eager = f"{type(error).__name__}: {error}"
            self.recorder = None
            self._slots.clear()
            warnings.warn(f"recognizing goes on without CUDA graphs: {self.why_eager}", RuntimeWarning, stacklevel=5)
            return None

    @contextmanager
    def _tuned(self) -> Iterator[None]:
        """Types as the model has them, whatever autocast says; convolutions in the fastest way for their shape, found
        once. Both settings are put back."""
        with torch.autocast(self.device.type, enabled=False):
            if self.device.type != "cuda":
                yield
                return
            before = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = True
            try:
                with torch.cuda.device(self.device):
                    yield
            finally:
                torch.backends.cudnn.benchmark = before

    def _check(self, images: Tensor | None = None, at_once: int = 0) -> None:
        if images is not None and (images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8):
            got = f"{images.dtype} {tuple(images.shape)}"
            raise RamatchError(f"GraphedRAM takes uint8 images (B, 3, H, W), got {got}; it normalizes them itself")
        patch = self.ram.backbone.vision.config.patch
        if images is not None and min(images.shape[2:]) < patch:
            raise RamatchError(f"images of {tuple(images.shape[2:])} pixels are smaller than a patch ({patch})")
        if at_once > self.batch_size:
            raise RamatchError(f"GraphedRAM takes at most {self.batch_size} images at once (batch_size), got {at_once}")


def _shapes(labels: Labels) -> list:
    """Two vocabularies of which these are equal fit into one place."""
    return [len(labels), *(t.shape for t in labels.tensors)]


def _replay(recorded: tuple[torch.cuda.CUDAGraph, Output], count: int) -> Output:
    """Run the second half; the result is copied out because the next replay writes to the same place."""
    graph, output = recorded
    graph.replay()
    return output.map(lambda t: t[:count].clone())
