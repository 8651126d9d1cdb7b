"""The training step, the solver, new vocabularies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ramatch.data.transforms import Normalize
from ramatch.modeling.fuse import fuse
from ramatch.modeling.graph import GraphedRAM
from ramatch.modeling.ram import RAM
from ramatch.train.config import OptimConfig
from ramatch.train.ema import EMA
from ramatch.train.graphed import WARMUP, GraphedStep
from ramatch.train.loop import Step
from ramatch.train.optim import Temperatures, build_optimizers, trainable

from .measure import Row, free, host_seconds, peak_gb, row
from .models import Bench, Line, label_names, random_images, random_ram

TARGETS = {32: 2000.0, 256: 4000.0}  # img/s with 925 labels and EMA
MEMORY = {32: 2.5}  # GB


def line_train(bench: Bench) -> Iterator[Row]:
    """The whole training step with EMA, as a graph and eagerly."""
    for batch in bench.train_batches:
        free(bench.device)
        yield from _training(bench, batch)


def train_step(bench: Bench, ram: RAM, names: Sequence[str]) -> GraphedStep:
    """The loop's step from uint8 images on: normalize, forward, loss, backward, clip, AdamW and SGD, temperatures,
    EMA."""
    optim = OptimConfig()
    parameters = trainable(ram)
    temperatures, ema = Temperatures(parameters, optim.temperature_floor), EMA(ram, optim.ema_decay)
    step = Step(ram, tuple(names), "mmc", None)
    normalize = Normalize(ram.preprocess.mean, ram.preprocess.std).to(bench.device)

    def forward(images: Tensor, targets: Tensor) -> Tensor:
        half = bench.half != torch.float32
        with torch.autocast(bench.device.type, dtype=torch.bfloat16, enabled=half, cache_enabled=False):
            return step(normalize(images).to(bench.half), targets)

    return GraphedStep(
        forward,
        build_optimizers(parameters, optim),
        parameters=parameters.values(),
        clip_norm=optim.clip_norm,
        after=(temperatures.clamp, ema.update),
        holds=ram.label_set.constants,
    )


def _training(bench: Bench, batch: int) -> Iterator[Row]:
    # a model of its own, so that the memory is what a run takes
    ram = random_ram(bench.size, "paper", bench.device, backbone_dtype=bench.half).train()
    names = label_names(bench.train_labels)
    free(bench.device)  # of the float32 weights it began with
    images, step = bench.images(batch), train_step(bench, ram, names)
    targets = (torch.rand(batch, len(names), device=bench.device) < 0.005).float()
    targets[:, 0] = 1
    losses = [step(next(images), targets) for _ in range(WARMUP + 3)]
    rate = bench.rate(lambda: step(next(images), targets), batch)
    last = step(next(images), targets)
    tensors, taken = peak_gb(bench.device)
    how = "CUDA graph" if step.enabled else f"eager: {step.why_eager}" if step.why_eager else "eager"
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
    if step.enabled:
        step.enabled = False
        eager = bench.rate(lambda: step(next(images), targets), batch)
        yield row(f"train, eager, batch {batch}", eager, "img/s", note=f"the graph is {rate / eager:.2f}× this")


def line_vocabulary(bench: Bench) -> Iterator[Row]:
    """Labels never seen before: tokens, text tower, keys, in the engine's place for them."""
    ram, count = random_ram(bench.size, "paper", bench.device, backbone_dtype=bench.half), bench.new_labels
    text = ram.backbone.require_text("the bench")
    images = random_images(bench.batches[0], bench.pixels, bench.device, 1)[0]
    fresh = iter([label_names(count, seed) for seed in range(1, 20)])  # made beforehand; each is used once
    with torch.no_grad():
        engine = GraphedRAM(fuse(ram), ram.encode_labels(label_names(count)), batch_size=bench.batches[0])
        engine(images)
        ready = host_seconds(lambda: engine.set_labels(ram.encode_labels(next(fresh))), bench.device)
        ids = torch.randint(1, text.config.vocab, (count, text.config.context), device=bench.device)
        lengths = torch.full((count,), text.config.context, device=bench.device)
        whole = host_seconds(lambda: ram.backbone.project_text(text(ids, lengths)), bench.device, repeats=3)
        both = host_seconds(
            lambda: (engine.set_labels(ram.encode_labels(next(fresh))), engine(images)), bench.device, repeats=3
        )
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
