"""The training step, the solver, new vocabularies, and where the time of a test batch goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.transforms import Normalize
from ..model.fast import FastRAM
from ..model.ram import RAM
from ..train.config import OptimConfig
from ..train.ema import EMA
from ..train.graphed import WARMUP, GraphedStep
from ..train.loop import Step
from ..train.optim import Temperatures, build_optimizers, trainable
from ._measure import Row, free, host_seconds, peak_gb, row, seconds_per_call
from ._models import SIZES, Bench, Line, label_names, random_images, random_ram

TARGETS = {32: 2000.0, 256: 4000.0}  # img/s with 925 labels and EMA
MEMORY = {32: 2.5}  # GB


def line_train(bench: Bench) -> Iterator[Row]:
    """The whole training step with EMA, as a graph and eagerly."""
    for batch in bench.train_batches:
        free(bench.device)
        yield from _training(bench, batch)


def train_step(bench: Bench, ram: RAM, names: Sequence[str]) -> GraphedStep:
    """The loop's step from uint8 images on: normalise, forward, loss, backward, clip, AdamW and SGD, temperatures, EMA."""
    optim = OptimConfig()
    parameters = trainable(ram)
    temperatures, ema = Temperatures(parameters, optim.temperature_floor), EMA(ram, optim.ema_decay)
    step, label_set = Step(ram, tuple(names), "mmc", None), ram.label_set
    normalise = Normalize(ram.preprocess.mean, ram.preprocess.std).to(bench.device)

    def forward(images: Tensor, targets: Tensor) -> Tensor:
        half = bench.half != torch.float32
        with torch.autocast(bench.device.type, dtype=torch.bfloat16, enabled=half, cache_enabled=False):
            return step(normalise(images).to(bench.half), targets)

    return GraphedStep(
        forward, build_optimizers(parameters, optim), parameters=parameters.values(), clip_norm=optim.clip_norm,
        after=(temperatures.clamp, ema.update), holds=lambda: (label_set._padded, label_set._teacher),
    )  # fmt: skip


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
        f"train, {len(names):,} labels, EMA, batch {batch}", rate, "img/s", at_least=TARGETS.get(batch),
        note=f"{how}; loss {float(losses[0]):.3f} at first, {float(last):.3f} at last",
    )  # fmt: skip
    if bench.device.type == "cuda":
        yield row(f"train, memory, batch {batch}", taken, "GB", at_most=MEMORY.get(batch),
                  note=f"most taken from the device; most in tensors {tensors:.2f} GB")  # fmt: skip
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
        engine = FastRAM(ram, ram.encode_labels(label_names(count)), batch_size=bench.batches[0])
        engine(images)
        ready = host_seconds(lambda: engine.set_labels(ram.encode_labels(next(fresh))), bench.device)
        ids = torch.randint(1, text.config.vocab, (count, text.config.context), device=bench.device)
        lengths = torch.full((count,), text.config.context, device=bench.device)
        whole = host_seconds(lambda: ram.backbone.project_text(text(ids, lengths)), bench.device, repeats=3)
        both = host_seconds(
            lambda: (engine.set_labels(ram.encode_labels(next(fresh))), engine(images)), bench.device, repeats=3
        )
    yield row(
        f"a new vocabulary of {count:,} labels ready", 1e3 * ready, "ms", at_most=100, baseline=1e3 * whole,
        baseline_what=f"text tower on all {text.config.context} places, tokens given",
    )  # fmt: skip
    yield row(f"the same, and {bench.batches[0]} images scored with it", 1e3 * both, "ms", note=engine.why_eager or "")


def line_solver(bench: Bench) -> Iterator[Row]:
    """`solve_batch` beside POT's, and the fused scores beside the unfused: see `bench.ot`."""
    from .ot import CPU_SIZES, GPU_SIZES, bench_scores, bench_solver

    gpu = bench.device.type == "cuda"
    sizes = GPU_SIZES[:3] if gpu else CPU_SIZES
    for size in sizes:
        found = bench_solver(bench.device, size, repeats=3)
        yield row(
            f"solve_batch, B {size[0]}, M {size[1]}, N {size[2]:,}", found["ms"], "ms", baseline=found.get("pot_ms"),
            baseline_what="POT's solve_batch", ratio_at_least=10 if gpu else 3, **{"note": ""} | found,
        )  # fmt: skip
    found = bench_scores(bench.device, sizes[-1], repeats=3)
    yield row(
        f"match_scores, B {found['B']}, M {found['M']}, N {found['N']:,}", found["ms"], "ms", baseline=found["plain_ms"],
        baseline_what="softmax, solve_batch, sum", **found,
    )  # fmt: skip


KINDS = (
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("convolutions", ("conv", "fprop", "cudnn")),
    ("transport", ("sinkhorn", "_rows_kernel", "_columns_kernel", "_polish_kernel", "_peaks_kernel")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "wgmma", "splitk", "cublas")),
    ("softmax", ("softmax",)),
    ("LayerNorm", ("layer_norm", "layernorm")),
    ("reductions", ("reduce",)),
    ("copies", ("copy", "memcpy", "memset", "catarray", "fill")),
    ("element by element", ("elementwise",)),
)


def kind_of(kernel: str) -> str:
    """What a kernel does, from its name."""
    name = kernel.lower()
    return next((kind for kind, marks in KINDS if any(mark in name for mark in marks)), "other")


def line_profile(bench: Bench) -> Iterator[Row]:
    """Where the time of one test batch goes: parts by timing, kernels by the profiler."""
    ram, batch = random_ram(bench.size, "paper", bench.device, text=False), bench.batches[1]
    engine = FastRAM(ram, bench.vocabulary(), batch_size=batch, graph=False)
    images = random_images(batch, bench.pixels, bench.device, 1)[0]
    path, vocabulary = engine.path, engine._need()
    with torch.no_grad(), engine._tuned():
        trunk = path.trunk(images)
        regions = path.regions(trunk, vocabulary)
        select, keys, streams = path.selects[0], vocabulary.keys[0], trunk.streams[0].flatten(1, 2)
        count = len(path.selects)
        parts: dict[str, Callable[[], object]] = {
            "trunk (embedding, layers, SAA, convolutions of TSS)": lambda: path.trunk(images),
            "of that, embedding": lambda: path.embed(images),
            f"of that, convolutions of TSS, one of {count} layers": lambda: select.streams(trunk.local, trunk.grid),
            "regions (TSS with labels, norm, projection)": lambda: path.regions(trunk, vocabulary),
            f"of that, one of {count} layers": lambda: path.select(select, keys, streams, trunk.grid),
            "similarities and matching": lambda: path.match(regions, vocabulary.units),
        }
        for what, call in parts.items():
            yield row(f"batch {batch}: {what}", 1e3 * seconds_per_call(call, bench.device, budget=0.3), "ms")
    if bench.device.type == "cuda":
        yield from _attention(bench, batch)
        yield from _kernels(bench, engine, images)


def _attention(bench: Bench, batch: int) -> Iterator[Row]:
    """One layer's attention by each of the fused kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    c = SIZES[bench.size][0]
    tokens = 1 + (c.image // c.patch) ** 2
    qkv = torch.randn(batch, tokens, 3, c.heads, c.width // c.heads, device=bench.device, dtype=bench.half)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                ms = 1e3 * seconds_per_call(lambda: F.scaled_dot_product_attention(q, k, v), bench.device, budget=0.2)
        except RuntimeError as error:
            yield row(f"attention of one layer, {backend.name}", None, "ms", note=str(error).splitlines()[0])
        else:
            yield row(f"attention of one layer, {backend.name}", ms, "ms")


def _kernels(bench: Bench, engine: FastRAM, images: Tensor) -> Iterator[Row]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        engine(images)
        torch.cuda.synchronize(bench.device)
    kernels = [
        (e.key, e.self_device_time_total / 1e3, e.count) for e in profile.key_averages() if "CUDA" in str(e.device_type)
    ]
    times: dict[str, float] = defaultdict(float)
    for name, ms, _ in kernels:
        times[kind_of(name)] += ms
    total = sum(times.values())
    for kind, ms in sorted(times.items(), key=lambda item: -item[1]):
        yield row(f"kernels of one batch: {kind}", ms, "ms", note=f"{100 * ms / total:.1f} %")
    top = [list(kernel) for kernel in sorted(kernels, key=lambda kernel: -kernel[1])[:15]]
    yield row("kernels of one batch: all", total, "ms", note=f"{sum(k[2] for k in kernels)} launches", top=top)


TRAIN_LINES: dict[str, Line] = {
    "train": line_train,
    "vocabulary": line_vocabulary,
    "solver": line_solver,
    "profile": line_profile,
}
