"""Lines measured on a GPU: recognising beside plain CLIP encoding, many labels, training, vocabularies, growth."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..data.transforms import Normalize
from ..model._graphs import Recorder
from ..model.fast import FastRAM
from ..model.ram import RAM, Labels
from ..train.config import OptimConfig
from ..train.ema import EMA
from ..train.graphed import WARMUP, GraphedStep
from ..train.loop import Step
from ..train.optim import Temperatures, build_optimizers, trainable
from ._measure import Row, ceilings, free, host_seconds, peak_gb, row, seconds_per_call
from ._models import SIZES, label_names, random_images, random_labels, random_ram

TEST_TARGETS = {32: 3000.0, 512: 7500.0}
TRAIN_TARGETS = {32: 2000.0, 256: 4000.0}


@dataclass
class Bench:
    """What lines share: settings, and rates that later lines compare with."""

    device: torch.device
    size: str = "clip-b16"
    batches: tuple[int, int] = (32, 512)
    train_batches: tuple[int, int] = (32, 256)
    labels: int = 1006
    many_labels: int = 20_000
    train_labels: int = 925
    budget: float = 1.0  # seconds a measurement may take
    compiled: bool = False
    rates: dict[Any, float] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        return SIZES[self.size][2]

    @property
    def pixels(self) -> tuple[int, int]:
        side = SIZES[self.size][0].image
        return side, side

    @property
    def half(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def rate(self, call: Callable[[], object], images: int) -> float:
        """Images per second."""
        return images / seconds_per_call(call, self.device, budget=self.budget)

    def images(self, batch: int) -> Iterator[Tensor]:
        return itertools.cycle(random_images(batch, self.pixels, self.device, 2))


def line_ceilings(bench: Bench) -> Iterator[Row]:
    yield from ceilings(bench.device)


def line_clip(bench: Bench) -> Iterator[Row]:
    """Plain CLIP image encoding with `transformers`: the limit."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    c = SIZES[bench.size][0]
    config = CLIPVisionConfig(
        hidden_size=c.width, intermediate_size=c.mlp, num_hidden_layers=c.layers, num_attention_heads=c.heads,
        image_size=c.image, patch_size=c.patch, projection_dim=bench.dim, hidden_act="quick_gelu",
    )  # fmt: skip
    with bench.device:
        model = CLIPVisionModelWithProjection(config)
    model = model.to(bench.device, bench.half).eval()
    for batch in bench.batches:
        pixels = [torch.randn(batch, 3, *bench.pixels, device=bench.device, dtype=bench.half) for _ in range(2)]
        turn = itertools.cycle(pixels)
        with torch.inference_mode():
            bench.rates["clip", batch] = bench.rate(lambda turn=turn: model(pixel_values=next(turn)), batch)  # type: ignore[misc]
        yield row(f"plain CLIP encoding, transformers, batch {batch}", bench.rates["clip", batch], "img/s")
        if bench.device.type == "cuda":
            with torch.no_grad():
                graph, _ = Recorder(bench.device).record(
                    lambda pixels=pixels: model(pixel_values=pixels[0]).image_embeds
                )  # type: ignore[misc]
            bench.rates["clip graph", batch] = bench.rate(graph.replay, batch)
            yield row(f"plain CLIP encoding as a CUDA graph, batch {batch}", bench.rates["clip graph", batch], "img/s")
    if bench.compiled:
        batch = bench.batches[1]
        fast = torch.compile(model)
        pixels = [torch.randn(batch, 3, *bench.pixels, device=bench.device, dtype=bench.half) for _ in range(2)]
        turn = itertools.cycle(pixels)
        with torch.inference_mode():
            rate = bench.rate(lambda: fast(pixel_values=next(turn)), batch)
        yield row(f"plain CLIP encoding, compiled, batch {batch}", rate, "img/s")


def plain_scores(ram: RAM, images: Tensor, labels: Labels) -> Tensor:
    """Our own unfused path: eager modules, the plan in memory."""
    pixels = ram.preprocess.normalise(images).to(ram.backbone.dtype)
    return ram.score(ram.recognise(ram.trunk(pixels), labels))


def _test_lines(bench: Bench, preset: str) -> Iterator[Row]:
    ram = random_ram(bench.size, preset, bench.device, text=False)
    labels = random_labels(bench.labels, bench.dim, bench.device)
    yield from _agreement(bench, ram, labels, preset)
    for batch in bench.batches:
        free(bench.device)
        turn = bench.images(batch)
        engine = FastRAM(ram, labels, batch_size=batch)
        rate = bench.rate(lambda turn=turn, engine=engine: engine(next(turn)), batch)  # type: ignore[misc]
        bench.rates[preset, batch] = rate
        targets: dict[str, Any] = {}
        if preset == "paper":
            targets = {"at_least": TEST_TARGETS.get(batch), "ratio_at_least": 0.8}
        yield row(
            f"test, {bench.labels:,} labels, {preset} preset, batch {batch}", rate, "img/s",
            baseline=bench.rates.get(("clip", batch)), baseline_what="plain CLIP encoding",
            note=engine.why_eager or "", memory_gb=peak_gb(bench.device)[1], **targets,
        )  # fmt: skip
        yield from _share_of_matching(bench, engine, next(turn), batch, rate, preset)
        del engine
    free(bench.device)
    half = random_ram(bench.size, preset, bench.device, text=False, backbone_dtype=bench.half)
    half.region_set.to(bench.half)
    own = Labels(labels.names, labels.unit, labels.tss.to(bench.half))
    for batch in bench.batches:
        turn = bench.images(batch)
        with torch.inference_mode():
            rate = bench.rate(lambda turn=turn: plain_scores(half, next(turn), own), batch)  # type: ignore[misc]
        fast = bench.rates.get((preset, batch))
        yield row(
            f"our own unfused path, {preset} preset, batch {batch}", rate, "img/s",
            note=f"the fast path is {fast / rate:.1f}× that" if fast else "", memory_gb=peak_gb(bench.device)[1],
        )  # fmt: skip


def _agreement(bench: Bench, ram: RAM, labels: Labels, preset: str) -> Iterator[Row]:
    """Largest difference in cosines from the plain path in float32, on a few images."""
    images = random_images(8, bench.pixels, bench.device, 1)[0]
    with torch.no_grad():
        plain = ram.recognise(ram.trunk(ram.preprocess.normalise(images)), labels)
        wanted = plain.region * (len(labels) if ram.config.plan_scale == "one" else 1)
        for dtype, bound in ((torch.float32, 1e-3), (bench.half, None)):
            found = FastRAM(ram, labels, batch_size=8, dtype=dtype)(images)
            region = found.region * (len(labels) if ram.config.plan_scale == "one" else 1)
            gap = float(torch.stack([(region - wanted).abs().max(), (found.image - plain.image).abs().max()]).max())
            name = str(dtype).split(".")[-1]
            yield row(f"difference from the plain path in float32, {preset} preset, {name}", gap, "cosine", at_most=bound,
                      scores=float((found.scores - ram.score(plain)).abs().max()))  # fmt: skip


def _share_of_matching(
    bench: Bench, engine: FastRAM, images: Tensor, batch: int, rate: float, preset: str
) -> Iterator[Row]:
    """Similarities and transport as a share of the whole; what `solve_batch` alone takes is among the solver lines."""
    vocabulary = engine._need()
    with torch.no_grad():
        regions = engine.path.regions(engine.path.trunk(images), vocabulary)
        call: Callable[[], object] = lambda: engine.path.match(regions, vocabulary.units)  # noqa: E731
        if bench.device.type == "cuda" and engine.why_eager is None:
            graph, _ = Recorder(bench.device).record(call)
            call = graph.replay
        seconds = seconds_per_call(call, bench.device, budget=bench.budget / 2)
    share = 100 * seconds * rate / batch
    bound = 10.0 if preset == "paper" else None
    yield row(f"similarities and matching, share of that, batch {batch}", share, "%", at_most=bound, ms=1e3 * seconds)


def line_test(bench: Bench) -> Iterator[Row]:
    yield from _test_lines(bench, "paper")


def line_reference(bench: Bench) -> Iterator[Row]:
    yield from _test_lines(bench, "reference")


def line_many(bench: Bench) -> Iterator[Row]:
    """Twenty thousand labels, with two settings of the workspace."""
    ram = random_ram(bench.size, "paper", bench.device, text=False)
    many, batch = random_labels(bench.many_labels, bench.dim, bench.device), bench.batches[1]
    few = bench.rates.get(("paper", batch))
    turn = bench.images(batch)
    if few is None:
        engine = FastRAM(ram, random_labels(bench.labels, bench.dim, bench.device), batch_size=batch)
        few = bench.rate(lambda: engine(next(turn)), batch)
        del engine
    for workspace in (1024, 256):
        free(bench.device)
        engine = FastRAM(ram, many, batch_size=batch, workspace_mb=workspace)
        rate = bench.rate(lambda engine=engine: engine(next(turn)), batch)  # type: ignore[misc]
        yield row(
            f"test, {bench.many_labels:,} labels, paper preset, batch {batch}, workspace {workspace} MB", rate, "img/s",
            baseline=few, baseline_what=f"{bench.labels:,} labels", ratio_at_least=0.4,
            note=f"peak {peak_gb(bench.device)[1]:.1f} GB {engine.why_eager or ''}", memory_gb=peak_gb(bench.device)[1],
        )  # fmt: skip
        if workspace == 1024:
            with torch.no_grad():
                trunk = engine.path.trunk(next(turn))
                regions = engine.path.regions(trunk, engine._need())
                looks = seconds_per_call(lambda: engine.path.regions(trunk, engine._need()), bench.device, budget=0.5)  # noqa: B023
                found = seconds_per_call(
                    lambda: engine.path.match(regions, engine._need().units), bench.device, budget=0.5
                )  # noqa: B023
            yield row("of that, TSS and projection", 1e3 * looks, "ms")
            yield row("of that, similarities and matching", 1e3 * found, "ms")
            del trunk, regions
        del engine


def train_step(bench: Bench, ram: RAM, names: Sequence[str], *, graph: bool | None) -> GraphedStep:
    """The loop's step on uint8 images: normalise, forward, loss, backward, clip, AdamW and SGD, temperatures, EMA."""
    optim = OptimConfig()
    parameters = trainable(ram)
    optimizers = build_optimizers(parameters, optim)
    temperatures, ema = Temperatures(parameters, optim.temperature_floor), EMA(ram, optim.ema_decay)
    step = Step(ram, tuple(names), "mmc", None)
    normalise = Normalize(ram.preprocess.mean, ram.preprocess.std).to(bench.device)
    half = bench.half

    def forward(images: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(
            bench.device.type, dtype=torch.bfloat16, enabled=half == torch.bfloat16, cache_enabled=False
        ):
            return step(normalise(images).to(half), targets)

    label_set = ram.label_set
    return GraphedStep(
        forward, optimizers, parameters=parameters.values(), clip_norm=optim.clip_norm,
        after=(temperatures.clamp, ema.update), holds=lambda: (label_set._padded, label_set._teacher), enabled=graph,
    )  # fmt: skip


def line_train(bench: Bench) -> Iterator[Row]:
    """The whole training step with EMA, as a graph and eagerly."""
    names = label_names(bench.train_labels)
    for batch in bench.train_batches:
        free(bench.device)
        images = bench.images(batch)
        targets = (torch.rand(batch, len(names), device=bench.device) < 0.005).float()
        targets[:, 0] = 1
        # a model of its own, so that what is measured is what a run takes
        ram = random_ram(bench.size, "paper", bench.device, backbone_dtype=bench.half).train()
        graphed = train_step(bench, ram, names, graph=None)
        loss = torch.zeros(())
        for _ in range(WARMUP + 2):
            loss = graphed(next(images), targets)
        rate = bench.rate(lambda: graphed(next(images), targets), batch)  # noqa: B023
        tensors, taken = peak_gb(bench.device)
        yield row(
            f"train, {len(names)} labels, EMA, batch {batch}", rate, "img/s", at_least=TRAIN_TARGETS.get(batch),
            note=f"{graphed.why_eager or 'CUDA graph' if graphed.enabled or graphed.why_eager else 'eager'}, "
            f"loss {float(loss):.3f}", loss=float(loss),
        )  # fmt: skip
        yield row(
            f"train, memory, batch {batch}", taken, "GB", at_most=2.5 if batch == 32 else None,
            note=f"most taken from the device; most in tensors {tensors:.2f} GB",
        )  # fmt: skip
        graphed.enabled = False
        eager = bench.rate(lambda: graphed(next(images), targets), batch)  # noqa: B023
        yield row(f"train, eager, batch {batch}", eager, "img/s", note=f"the graph is {rate / eager:.2f}× that")
        del graphed, ram


def line_solver(bench: Bench) -> Iterator[Row]:
    """`solve_batch` beside POT's, and the fused scores beside the unfused: the lines of `bench.ot`."""
    from .ot import GPU_SIZES, bench_scores, bench_solver

    for size in GPU_SIZES[:3]:
        found = bench_solver(bench.device, size, repeats=3)
        batch, _, labels = size
        yield row(
            f"solve_batch, B {batch}, M 196, N {labels:,}", found["ms"], "ms", baseline=found.get("pot_ms"),
            baseline_what="POT solve_batch", ratio_at_least=10, note=found.get("note", ""), **found,
        )  # fmt: skip
    found = bench_scores(bench.device, GPU_SIZES[2], repeats=3)
    yield row(
        f"match_scores, B {found['B']}, N {found['N']:,}", found["ms"], "ms", baseline=found["plain_ms"],
        baseline_what="softmax, solve_batch, sum", **found,
    )  # fmt: skip


def line_vocabulary(bench: Bench) -> Iterator[Row]:
    """A thousand labels never seen before: tokens, text tower, keys, in the engine's place for them."""
    ram = random_ram(bench.size, "paper", bench.device, backbone_dtype=bench.half)
    count = 1000 if bench.labels > 100 else 20
    seeds = itertools.count(1)
    with torch.inference_mode():
        first = ram.encode_labels(label_names(count))
    engine = FastRAM(ram, first, batch_size=bench.batches[0])
    images = random_images(bench.batches[0], bench.pixels, bench.device, 1)[0]
    engine(images)
    fresh = [label_names(count, next(seeds)) for _ in range(8)]
    names = itertools.cycle(fresh)

    def ready() -> None:
        with torch.inference_mode():
            engine.set_labels(ram.encode_labels(next(names)))

    def whole() -> None:  # every token place of every label, through all layers
        text = ram.backbone.require_text("the bench")
        ids = torch.randint(1, text.config.vocab, (count, text.config.context), device=bench.device)
        lengths = torch.full((count,), text.config.context, device=bench.device)
        with torch.inference_mode():
            ram.backbone.project_text(text(ids, lengths))

    seconds = host_seconds(ready, bench.device, repeats=5)
    full = host_seconds(whole, bench.device, repeats=3)
    yield row(
        f"a new vocabulary of {count:,} labels ready", 1e3 * seconds, "ms", at_most=100, baseline=1e3 * full,
        baseline_what="text tower over all 77 places, tokens given",
    )  # fmt: skip
    again = host_seconds(lambda: engine(images), bench.device, repeats=3)
    yield row("first scores after that, same size", 1e3 * again, "ms", note=engine.why_eager or "")


def line_retag(bench: Bench) -> Iterator[Row]:
    """Kept trunks with a vocabulary, beside tagging the same images afresh."""
    ram = random_ram(bench.size, "paper", bench.device, text=False)
    for batch in bench.batches:
        free(bench.device)
        engine = FastRAM(ram, random_labels(bench.labels, bench.dim, bench.device), batch_size=batch)
        images = random_images(batch, bench.pixels, bench.device, 1)[0]
        kept = engine.trunk(images)
        again = bench.rate(lambda: engine.recognise(kept), batch)  # noqa: B023
        afresh = bench.rate(lambda: engine(images), batch)  # noqa: B023
        yield row(
            f"retagging kept trunks, batch {batch}", again, "img/s", baseline=afresh, baseline_what="tagging afresh",
            ratio_at_least=3, kept_mb_per_image=sum(t.numel() * t.element_size() for t in kept.tensors) / batch / 1e6,
        )  # fmt: skip
        del engine, kept


def line_linear(bench: Bench) -> Iterator[Row]:
    """Time and memory against the number of images."""
    ram = random_ram(bench.size, "paper", bench.device, text=False)
    batch = max(8, bench.batches[1] // 4)
    engine = FastRAM(ram, random_labels(bench.labels, bench.dim, bench.device), batch_size=batch)
    host = torch.randint(0, 256, (batch, 3, *bench.pixels), dtype=torch.uint8)
    host = host.pin_memory() if bench.device.type == "cuda" else host
    found = []
    for count in (4, 16, 64) if bench.labels > 100 else (1, 2, 4):
        torch.cuda.reset_peak_memory_stats(bench.device) if bench.device.type == "cuda" else None

        def run(count: int = count) -> None:
            for _ in range(count):
                engine(host).scores.argmax(-1)

        seconds = host_seconds(run, bench.device, repeats=2)
        found.append((count * batch, seconds, peak_gb(bench.device)[0]))
    (few, short, small), (many, long, large) = found[0], found[-1]
    yield row(
        f"cost of an image among {many:,} against among {few:,}", 100 * (long / many) / (short / few), "%", at_most=110,
        note=f"{many / long:,.0f} img/s from pinned host memory", points=found,
    )  # fmt: skip
    yield row(f"memory for {many:,} images against {few:,}", 100 * large / small if small else None, "%",
              at_most=101 if small else None, note=f"{large:.2f} GB")  # fmt: skip


KINDS = (
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("convolution", ("conv", "fprop", "implicit", "xmma_fprop", "cudnn")),
    ("transport", ("sinkhorn", "_rows_kernel", "_columns", "_polish", "_peaks")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "wgmma", "matmul", "splitk", "cublas")),
    ("softmax", ("softmax",)),
    ("norms", ("layer_norm", "layernorm")),
    ("reductions", ("reduce",)),
    ("copies", ("copy", "memcpy", "memset", "cat", "fill")),
    ("element by element", ("elementwise", "vectorized", "unrolled")),
)


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, marks in KINDS if any(m in name for m in marks)), "other")


def line_profile(bench: Bench) -> Iterator[Row]:
    """Where the time of one test batch goes: halves and parts by timing, kernels by the profiler."""
    ram = random_ram(bench.size, "paper", bench.device, text=False)
    labels, batch = random_labels(bench.labels, bench.dim, bench.device), bench.batches[1]
    engine = FastRAM(ram, labels, batch_size=batch, graph=False)
    images = random_images(batch, bench.pixels, bench.device, 1)[0]
    path, vocabulary = engine.path, engine._need()
    with torch.no_grad(), engine._tuned():
        trunk = path.trunk(images)
        regions = path.regions(trunk, vocabulary)
        select, keys, streams = path.selects[0], vocabulary.keys[0], trunk.streams[0].flatten(1, 2)
        patches = trunk.local
        parts: dict[str, Callable[[], object]] = {
            "trunk (embedding, layers, SAA, TSS's convolutions)": lambda: path.trunk(images),
            "of that, embedding": lambda: path.embed(images),
            f"of that, TSS's convolutions, one layer of {len(path.selects)}": lambda: select.streams(
                patches, trunk.grid
            ),
            "regions (TSS with labels, norm, projection)": lambda: path.regions(trunk, vocabulary),
            f"of that, one layer of {len(path.selects)}": lambda: path.select(select, keys, streams, trunk.grid),
            "similarities and matching": lambda: path.match(regions, vocabulary.units),
        }
        for what, call in parts.items():
            yield row(f"profile, batch {batch}: {what}", 1e3 * seconds_per_call(call, bench.device, budget=0.3), "ms")
        if bench.device.type != "cuda":
            return
        x = torch.randn(batch, 3, SIZES[bench.size][0].heads, 197, 64, device=bench.device, dtype=bench.half).unbind(1)
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            yield row(f"attention of one layer, {backend.lower()}", _attention_ms(bench, backend, x), "ms")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            engine(images)
            torch.cuda.synchronize(bench.device)
    times: dict[str, float] = defaultdict(float)
    kernels = [(e.key, e.self_device_time_total / 1e3, e.count) for e in profile.key_averages()]
    for name, ms, _ in kernels:
        times[kind_of(name)] += ms
    total = sum(times.values())
    for kind, ms in sorted(times.items(), key=lambda item: -item[1]):
        yield row(f"kernels: {kind}", ms, "ms", note=f"{100 * ms / total:.1f} %")
    top = sorted(kernels, key=lambda k: -k[1])[:12]
    yield row("kernels: all", total, "ms", note=f"{sum(k[2] for k in kernels)} launches", top=top)


def _attention_ms(bench: Bench, backend: str, x: Sequence[Tensor]) -> float | None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    try:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            call = lambda: torch.nn.functional.scaled_dot_product_attention(*x)  # noqa: E731
            return 1e3 * seconds_per_call(call, bench.device, budget=0.2)
    except RuntimeError:
        return None


GPU_LINES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "ceilings": line_ceilings,
    "clip": line_clip,
    "test": line_test,
    "many": line_many,
    "train": line_train,
    "retag": line_retag,
    "vocabulary": line_vocabulary,
    "solver": line_solver,
    "linear": line_linear,
    "reference": line_reference,
    "profile": line_profile,
}
