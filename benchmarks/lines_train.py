"""The training step, the solver, new vocabularies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ramatch.modeling.fuse import fuse
from ramatch.modeling.graph import GraphedRAM
from ramatch.modeling.ram import RAM
from ramatch.train.config import OptimConfig
from ramatch.train.distributed import World
from ramatch.train.optim import EMA
from ramatch.train.step import WARMUP, TrainStep
from ramatch.train.task import RAMTask

from .measure import Row, free, host_seconds, peak_gb, row
from .models import Bench, Line, label_names, random_images, random_ram

TARGETS = {32: 2000.0, 256: 4000.0}  # img/s with 925 labels and EMA
MEMORY = {32: 2.5}  # GB


def line_train(bench: Bench) -> Iterator[Row]:
    """The whole training step with EMA, as a graph and eagerly."""
    for batch in bench.train_batches:
        free(bench.device)
        yield from _training(bench, batch)


class Step:
    """The loop's update from uint8 images on: normalize, forward, loss, backward, clip, AdamW, SGD, EMA."""

    def __init__(self, bench: Bench, ram: RAM, names: Sequence[str]) -> None:
        self.optim = OptimConfig()
        self.update = TrainStep(RAMTask(ram, names, "mmc", bench.half), self.optim, World(bench.device))
        self.ema = EMA(ram.adapters())

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        loss = self.update([(images, targets)])
        self.ema.update(self.optim.ema_decay)
        return loss

    def finish(self) -> None:
        """Everything after the backward pass."""
        self.update.finish()
        self.ema.update(self.optim.ema_decay)


def _training(bench: Bench, batch: int) -> Iterator[Row]:
    # a model of its own, so that the memory is what a run takes
    ram = random_ram(bench.size, "paper", bench.device, backbone_dtype=bench.half).train()
    names = label_names(bench.train_labels)
    free(bench.device)  # of the float32 weights it began with
    images, step = bench.images(batch), Step(bench, ram, names)
    targets = (torch.rand(batch, len(names), device=bench.device) < 0.005).float()
    targets[:, 0] = 1
    losses = [step(next(images), targets) for _ in range(WARMUP + 3)]
    rate = bench.rate(lambda: step(next(images), targets), batch)
    last = step(next(images), targets)
    tensors, taken = peak_gb(bench.device)
    update = step.update
    how = "CUDA graph" if update.recorder else f"eager: {update.why_eager}" if update.why_eager else "eager"
    yield row(
        f"train, {len(names):,} labels, EMA, batch {batch}",
        rate,
        "img/s",
        at_least=TARGETS.get(batch),
        note=f"{how}; loss {float(losses[0]):.3f} at first, {float(last):.3f} at last",
    )
    if bench.device.type == "cuda":
        yield row(
            f"train, memory, batch {batch}",
            taken,
            "GB",
            at_most=MEMORY.get(batch),
            note=f"most taken from the device; most in tensors {tensors:.2f} GB",
        )
    if update.recorder is not None:
        update.recorder = None
        eager = bench.rate(lambda: step(next(images), targets), batch)
        yield row(f"train, eager, batch {batch}", eager, "img/s", note=f"the graph is {rate / eager:.2f}× this")


def line_vocabulary(bench: Bench) -> Iterator[Row]:
    """Labels never seen before: tokens, text tower, keys, in the engine's place for them."""
    ram, count = random_ram(bench.size, "paper", bench.device, backbone_dtype=bench.half), bench.new_labels
    text = ram.backbone.require_text("the bench")
    images = random_images(bench.batches[0], bench.pixels, bench.device, 1)[0]
    fresh = iter([label_names(count, seed) for seed in range(1, 20)])  # made beforehand; each is used once
    with torch.no_grad():
        engine = GraphedRAM(fuse(ram), batch_size=bench.batches[0])
        engine(images, ram.encode_labels(label_names(count)))
        ready = host_seconds(lambda: ram.encode_labels(next(fresh)), bench.device)
        ids = torch.randint(1, text.config.vocab, (count, text.config.context), device=bench.device)
        lengths = torch.full((count,), text.config.context, device=bench.device)
        whole = host_seconds(lambda: ram.backbone.project_text(text(ids, lengths)), bench.device, repeats=3)
        both = host_seconds(lambda: engine(images, ram.encode_labels(next(fresh))), bench.device, repeats=3)
    yield row(
        f"a new vocabulary of {count:,} labels ready",
        1e3 * ready,
        "ms",
        at_most=100,
        baseline=1e3 * whole,
        baseline_what=f"text tower on all {text.config.context} places, tokens given",
    )
    yield row(f"the same, and {bench.batches[0]} images scored with it", 1e3 * both, "ms", note=engine.why_eager or "")


def line_solver(bench: Bench) -> Iterator[Row]:
    """`solve_batch` beside POT's, and the fused scores beside the unfused: see `bench.ot`."""
    from .ot import CPU_SIZES, GPU_SIZES, bench_scores, bench_solver

    gpu = bench.device.type == "cuda"
    sizes = GPU_SIZES[:3] if gpu else CPU_SIZES
    for size in sizes:
        found = bench_solver(bench.device, size, repeats=3)
        yield row(
            f"solve_batch, B {size[0]}, M {size[1]}, N {size[2]:,}",
            found["ms"],
            "ms",
            baseline=found.get("pot_ms"),
            baseline_what="POT's solve_batch",
            ratio_at_least=10 if gpu else 3,
            **{"note": ""} | found,
        )
    found = bench_scores(bench.device, sizes[-1], repeats=3)
    yield row(
        f"match_scores, B {found['B']}, M {found['M']}, N {found['N']:,}",
        found["ms"],
        "ms",
        baseline=found["plain_ms"],
        baseline_what="softmax, solve_batch, sum",
        **found,
    )


TRAIN_LINES: dict[str, Line] = {
    "train": line_train,
    "vocabulary": line_vocabulary,
    "solver": line_solver,
}
