"""Recognising at close to the cost of encoding: RAM's forward pass as nothing but device work.

`FastRAM` takes uint8 images and gives scores. What differs from `RAM.trunk` and `RAM.recognise` is how, not what:

* constants are folded into weights beforehand (`_folded.py`), label keys are made once per vocabulary;
* the last layer computes only its class token where nothing needs its patches (TSS before the layer, class-token pooling);
* positions look at labels in two large products per stream instead of one small attention per image: a head of size D is
  beyond flash attention, and the plain kind would run in float32;
* all of TSS up to the labels (convolutions, activations) belongs to the trunk, so a new vocabulary does not repeat it;
* s_R comes from `ot.match_scores`, which writes no plan;
* on CUDA the two halves (trunk; regions, matching, scores) are CUDA graphs, a pair per batch size and vocabulary size.

Half precision: the tower runs in bfloat16 (`dtype`); TSS and similarities, whose values norms keep in bounds, in float16, which
is eight times finer; matching and scores in float32.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import RamatchError
from ._fast_path import FUSED, FastOutput, FastPath, FastTrunk, Vocabulary
from .graph import Recorder
from .ram import RAM, Labels

__all__ = ["FastOutput", "FastRAM", "FastTrunk", "suits"]

HOST = ("bipartite",)  # matchers that work on the CPU, so that no graph can hold them
SCALING_TOL = 1e-4  # marginal error that stands in for the batch-wide rule of `stop="scaling"`


def suits(ram: RAM, wanted: bool | None = None) -> bool:
    """Whether to use a `FastRAM` for this model: by default (None) on CUDA, never if not `wanted`, and only where it computes what
    RAM itself does: matchers that `match_scores` knows, stopped image by image, on a pre-LN tower."""
    if wanted is False or (wanted is None and ram.backbone.device.type != "cuda"):
        return False
    c = ram.config
    return c.matcher in FUSED and c.stop != "scaling" and not any(block.post for block in ram.backbone.vision.blocks)


@dataclass
class _Slot:
    """Static tensors and graphs of one batch size; every replay rewrites `trunk` and `output`."""

    images: Tensor
    trunk: FastTrunk
    encode: torch.cuda.CUDAGraph
    output: FastOutput | None = None
    score: torch.cuda.CUDAGraph | None = None


class FastRAM:
    """An engine for one trained RAM. It holds rearranged copies of the weights: build a new one after training.

    >>> engine = FastRAM(ram, ram.encode_labels(names))
    >>> engine(images).scores          # uint8 (B, 3, H, W), on any device → (B, N)

    Args:
        labels: an encoded vocabulary; `set_labels` changes it.
        batch_size: most images at once; more are taken in turns, fewer in the next power of two.
        dtype: of the tower; by default bfloat16 on CUDA and float32 elsewhere.
        workspace_mb: bound on what grows with the vocabulary: attention to labels; similarities and their temporaries.
        graph: use CUDA graphs (on CUDA). If capturing fails the engine warns once and goes on without; see `why_eager`.
        tol: L1 marginal error at which matching stops; the model's own by default.
        best: also give each label's best region (a calibrator looks at it).
        fused: False takes the plain solver, which holds plans in memory, for comparison.
        patience: runs of a batch size without a graph before one is recorded, which takes as long as a few dozen runs.

    With `stop="scaling"` (the `reference` preset) the plain path stops a whole batch together, so that an image's scores depend
    on its neighbours; here every image is brought to an L1 marginal error of 1e-4 instead.
    """

    @torch.no_grad()
    def __init__(
        self, ram: RAM, labels: Labels | None = None, *, batch_size: int = 32, dtype: torch.dtype | None = None,
        workspace_mb: int = 1024, graph: bool = True, tol: float | None = None, best: bool = False, fused: bool = True,
        patience: int = 0,
    ) -> None:  # fmt: skip
        if batch_size < 1 or workspace_mb < 1:
            raise RamatchError("FastRAM: batch_size and workspace_mb must be at least 1")
        device, c = ram.backbone.device, ram.config
        cuda = device.type == "cuda"
        dtype = dtype or (torch.bfloat16 if cuda else torch.float32)
        fine = torch.float16 if cuda and dtype == torch.bfloat16 else dtype
        tol = tol or (SCALING_TOL if c.stop == "scaling" else c.tol)
        self.path = FastPath(ram, dtype, fine, workspace_mb, tol, best, fused)
        self.device, self.batch_size = device, batch_size
        self.why_eager: str | None = None if graph else "graphs are switched off"
        # the batch-wide rule asks the host when to stop; in a graph it would always run to the last iteration
        asks = c.matcher in HOST or (c.stop == "scaling" and c.matcher in FUSED and not self.path.fused)
        self._recorder = Recorder(device) if graph and cuda and not asks else None
        self._slots: dict[tuple[int, int, int], _Slot] = {}
        self._patience, self._asked = patience, Counter[tuple[int, int, int]]()
        self._vocabulary: Vocabulary | None = None
        if labels is not None:
            self.set_labels(labels)

    @property
    def labels(self) -> tuple[str, ...]:
        return self._vocabulary.names if self._vocabulary is not None else ()

    @torch.no_grad()
    def set_labels(self, labels: Labels) -> None:
        """Make an encoded vocabulary ready. One of the same size keeps the graphs."""
        with self._tuned():
            old, new = self._vocabulary, self.path.vocabulary(labels)
        if old is not None and old.sizes == new.sizes:
            for kept, value in zip(old.tensors, new.tensors, strict=True):
                kept.copy_(value)
            new = replace(old, names=labels.names)
        else:
            for slot in self._slots.values():
                slot.score = slot.output = None
        self._vocabulary = new

    @torch.no_grad()
    def __call__(self, images: Tensor) -> FastOutput:
        """uint8 images (B, 3, H, W) → `FastOutput`."""
        vocabulary = self._need()
        self._check(images)
        if len(images) == 0:
            nothing = torch.empty(0, len(vocabulary.names), device=self.device)
            return FastOutput(nothing, nothing, nothing, nothing if self.path.best else None)
        found = []
        with self._tuned():
            for part in images.split(self.batch_size):
                slot = self._slot(len(part), *part.shape[2:])
                if slot is None or not self._scored(slot):
                    trunk = self.path.trunk(part.to(self.device, non_blocking=True))
                    found.append(self.path.recognise(trunk, vocabulary))
                    continue
                slot.images[: len(part)].copy_(part, non_blocking=True)
                slot.encode.replay()
                found.append(_replay(slot, len(part)))
        return found[0] if len(found) == 1 else _join(found)

    @torch.no_grad()
    def trunk(self, images: Tensor) -> FastTrunk:
        """At most `batch_size` uint8 images (B, 3, H, W) → what to keep for other vocabularies."""
        self._check(images)
        self._fits(len(images))
        with self._tuned():
            slot = self._slot(len(images), *images.shape[2:])
            if slot is None:
                return self.path.trunk(images.to(self.device, non_blocking=True))
            slot.images[: len(images)].copy_(images, non_blocking=True)
            slot.encode.replay()
            return slot.trunk[: len(images)].clone()

    @torch.no_grad()
    def recognise(self, trunk: FastTrunk) -> FastOutput:
        """Scores of at most `batch_size` kept trunks with the present vocabulary."""
        vocabulary = self._need()
        self._fits(len(trunk))
        with self._tuned():
            slot = self._slot(len(trunk), *(n * self.path.side for n in trunk.grid))
            if slot is None or not self._scored(slot):
                return self.path.recognise(trunk, vocabulary)
            for static, value in zip(slot.trunk[: len(trunk)].tensors, trunk.tensors, strict=True):
                static.copy_(value)
            return _replay(slot, len(trunk))

    # ------------------------------------------------------------------------------------------------ graphs

    def _slot(self, count: int, height: int, width: int) -> _Slot | None:
        """Graph of the trunk for this many images or a few more; None where there are no graphs."""
        if self._recorder is None or count == 0:
            return None
        size = min(self.batch_size, 1 << (count - 1).bit_length())
        key = (size, height, width)
        if key not in self._slots:
            self._asked[key] += 1
            if self._asked[key] <= self._patience:
                return None
            images = torch.zeros(size, 3, height, width, dtype=torch.uint8, device=self.device)
            try:
                encode, trunk = self._recorder.record(lambda: self.path.trunk(images))
                encode.replay()  # recording runs nothing; the second half's rehearsal wants numbers in `trunk`
            except Exception as error:  # whatever a driver or a library objects to, eager does the same work
                self._give_up(error)
                return None
            self._slots[key] = _Slot(images, trunk, encode)
        return self._slots[key]

    def _scored(self, slot: _Slot) -> bool:
        """Whether the slot has a graph of the second half for the present vocabulary; makes one if it can."""
        if slot.score is None:
            assert self._recorder is not None
            vocabulary = self._need()
            try:
                slot.score, slot.output = self._recorder.record(lambda: self.path.recognise(slot.trunk, vocabulary))
            except Exception as error:
                self._give_up(error)
                return False
        return True

    def _give_up(self, error: Exception) -> None:
        self.why_eager = f"{type(error).__name__}: {error}"
        self._recorder = None
        self._slots.clear()
        warnings.warn(f"FastRAM goes on without CUDA graphs: {self.why_eager}", RuntimeWarning, stacklevel=4)

    @contextmanager
    def _tuned(self) -> Iterator[None]:
        """Types as chosen here, whatever autocast says; convolutions in the fastest way for their shape, found once. Both settings
        are put back."""
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

    # ------------------------------------------------------------------------------------------------ checks

    def _check(self, images: Tensor) -> None:
        if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8:
            raise RamatchError(
                f"FastRAM takes uint8 images (B, 3, H, W), got {images.dtype} {tuple(images.shape)}; it normalises them itself"
            )
        if min(images.shape[2:]) < self.path.side:
            raise RamatchError(
                f"images of {tuple(images.shape[2:])} pixels are smaller than a patch ({self.path.side})"
            )

    def _fits(self, count: int) -> None:
        if count > self.batch_size:
            raise RamatchError(
                f"FastRAM was made for at most {self.batch_size} images at once (batch_size), got {count}"
            )

    def _need(self) -> Vocabulary:
        if self._vocabulary is None:
            raise RamatchError("FastRAM has no vocabulary; call set_labels(ram.encode_labels([...])) first")
        return self._vocabulary


def _replay(slot: _Slot, count: int) -> FastOutput:
    """Run the second half; the result is copied out because the next replay writes to the same place."""
    assert slot.score is not None
    assert slot.output is not None
    slot.score.replay()
    return slot.output.map(lambda t: t[:count].clone())


def _join(parts: list[FastOutput]) -> FastOutput:
    best = None if parts[0].best is None else torch.cat([p.best for p in parts])  # type: ignore[misc]
    scores, region, image = (torch.cat([getattr(p, name) for p in parts]) for name in ("scores", "region", "image"))
    return FastOutput(scores, region, image, best)
