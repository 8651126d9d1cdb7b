"""Recognising on a GPU beside plain CLIP encoding: two sizes of batch, many labels, kept trunks, growth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ramatch.config import preset as preset_of
from ramatch.modeling.fuse import fuse
from ramatch.modeling.graph import GraphedRAM, Recorder
from ramatch.modeling.matching import scores_without_plan
from ramatch.modeling.ram import RAM, Labels, Trunk

from .counts import least_bytes, operations, plain_operations
from .measure import Row, ceilings, free, host_seconds, peak_gb, row, seconds_per_call
from .models import SIZES, Bench, Line, random_images, random_ram

TARGETS = {32: 3000.0, 512: 7500.0}  # img/s with 1,006 labels
WORKSPACES = (
    1024,
    4096,
    512,
)  # MB, for twenty thousand labels; the first is the engine's default, which has the target


def line_ceilings(bench: Bench) -> Iterator[Row]:
    """The device's two ceilings, and what they say about one image."""
    for entry in ceilings(bench.device):
        bench.rates[entry.unit] = entry.value or 0.0
        yield entry
    c, config, batch = SIZES[bench.size][0], preset_of("paper"), bench.batches[1]
    work = sum(operations(c, bench.dim, config, bench.labels).values())
    moved = least_bytes(c, bench.dim, config, bench.labels, batch)
    arithmetic, memory = work / bench.rates["TFLOP/s"] / 1e6, moved / bench.rates["GB/s"] / 1e3
    yield row(
        f"floor of one image, {bench.labels:,} labels, batch {batch}",
        max(arithmetic, memory),
        "µs",
        note=f"{work / 1e9:.1f} GFLOP take {arithmetic:.3g} µs, {moved / 1e6:.2f} MB take {memory:.3g} µs; "
        f"plain encoding: {plain_operations(c, bench.dim) / 1e9:.1f} GFLOP",
    )


# ---------------------------------------------------------------------------------------------------- plain CLIP


def line_clip(bench: Bench) -> Iterator[Row]:
    """Plain CLIP image encoding with `transformers`: the limit."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    c = SIZES[bench.size][0]
    config = CLIPVisionConfig(
        hidden_size=c.width,
        intermediate_size=c.mlp,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        image_size=c.image,
        patch_size=c.patch,
        projection_dim=bench.dim,
        hidden_act="quick_gelu",
    )
    model: Any = CLIPVisionModelWithProjection(config)
    model = model.to(device=bench.device, dtype=bench.half).eval()
    for batch in bench.batches:
        rate = bench.rates["clip", batch] = _clip_rate(bench, model, batch)
        yield row(f"plain CLIP encoding, transformers, batch {batch}", rate, "img/s")
    if bench.device.type == "cuda":
        for batch in bench.batches:
            rate = bench.rates["clip graph", batch] = _clip_rate(bench, model, batch, graph=True)
            yield row(f"plain CLIP encoding as a CUDA graph, batch {batch}", rate, "img/s")
    if bench.compiled:
        rate = _clip_rate(bench, torch.compile(model), bench.batches[1])
        yield row(f"plain CLIP encoding, compiled, batch {bench.batches[1]}", rate, "img/s")


def _clip_rate(bench: Bench, model: Any, batch: int, graph: bool = False) -> float:
    """Normalised pixels in half precision, already on the device → projected class token."""
    inputs = [torch.randn(batch, 3, *bench.pixels, device=bench.device, dtype=bench.half) for _ in range(2)]
    turn = itertools.cycle(inputs)
    with torch.no_grad():
        if graph:
            recorded, _ = Recorder(bench.device).record(lambda: model(pixel_values=inputs[0]).image_embeds)
            return bench.rate(recorded.replay, batch)
        return bench.rate(lambda: model(pixel_values=next(turn)).image_embeds, batch)


# ---------------------------------------------------------------------------------------------------- recognising


def line_test(bench: Bench) -> Iterator[Row]:
    yield from _recognising(bench, "paper")


def line_reference(bench: Bench) -> Iterator[Row]:
    yield from _recognising(bench, "reference")


def _recognising(bench: Bench, preset: str) -> Iterator[Row]:
    ram, labels = random_ram(bench.size, preset, bench.device, text=False), bench.vocabulary()
    if (
        ram.config.stop == "scaling"
    ):  # it stops a batch together, which asks the host; as recognizing for speed would, each image
        ram = ram.with_config(ram.config.replace(stop="marginal", tol=1e-4))
    for batch in bench.batches:
        free(bench.device)
        yield from _fast(bench, ram, labels, preset, batch)
    yield from _agreement(bench, ram, labels, preset)
    # the plain modules in the type `Recognizer` gives them
    ram.backbone.to(bench.half)
    ram.region_set.to(bench.half)
    for batch in bench.batches:
        free(bench.device)
        yield from _unfused(bench, ram, labels, preset, batch)


def _fast(bench: Bench, ram: RAM, labels: Labels, preset: str, batch: int) -> Iterator[Row]:
    images, engine = bench.images(batch), GraphedRAM(fuse(ram, bench.half), batch_size=batch)
    rate = bench.rates[preset, batch] = bench.rate(lambda: engine(next(images), labels), batch)
    targets: dict[str, Any] = {"at_least": TARGETS.get(batch), "ratio_at_least": 0.8} if preset == "paper" else {}
    work = sum(operations(SIZES[bench.size][0], bench.dim, ram.config, len(labels)).values())
    note = f"{peak_gb(bench.device)[1]:.1f} GB, {work * rate / 1e12:.3g} TFLOP/s"
    if bench.rates.get("TFLOP/s"):
        note += f" ({100 * work * rate / 1e12 / bench.rates['TFLOP/s']:.0f} % of the ceiling)"
    if ("clip graph", batch) in bench.rates:
        note += f"; {rate / bench.rates['clip graph', batch]:.2f} of plain CLIP as a graph"
    yield row(
        f"test, {len(labels):,} labels, {preset} preset, batch {batch}",
        rate,
        "img/s",
        **targets,
        baseline=bench.rates.get(("clip", batch)),
        baseline_what="plain CLIP encoding",
        note=f"{note}{_eager(engine)}",
        memory_gb=peak_gb(bench.device)[1],
    )
    seconds = _matching_seconds(bench, engine, labels, next(images))
    yield row(
        f"similarities and matching, share of that, batch {batch}",
        100 * seconds * rate / batch,
        "%",
        at_most=10 if preset == "paper" and batch == bench.batches[1] else None,
        ms=1e3 * seconds,
    )


def _matching_seconds(bench: Bench, engine: GraphedRAM, labels: Labels, images: Tensor) -> float:
    with torch.inference_mode():
        call = matching(engine.ram, engine.ram.trunk(images), labels)
        if bench.device.type == "cuda" and engine.why_eager is None:
            call = Recorder(bench.device).record(call)[0].replay
        return seconds_per_call(call, bench.device, budget=bench.budget / 2)


def matching(ram: RAM, trunk: Trunk, labels: Labels) -> Callable[[], object]:
    """Similarities, matching and scores alone: the second half without TSS, whose regions are made beforehand."""
    regions = ram.region_set.regions(ram.backbone, trunk, labels.tss)
    unit, scale = labels.directions.to(regions.dtype), ram.backbone.logit_scale

    def call() -> object:
        return scores_without_plan(F.normalize(regions, dim=-1), unit, scale, ram.config, False, ram.workspace_mb)

    return call


def _agreement(bench: Bench, ram: RAM, labels: Labels, preset: str) -> Iterator[Row]:
    """Largest difference in s_R (for a plan scaled by N) and s_G from the plain path in float32, on a few images."""
    images = random_images(8, bench.pixels, bench.device, 1)[0]
    scale = len(labels) if ram.config.plan_scale == "one" else 1
    with torch.no_grad():
        plain = ram.recognize(ram.trunk(ram.preprocess.normalize(images)), labels)
        scores = ram.score(plain)
        for dtype in dict.fromkeys((torch.float32, bench.half)):
            found = GraphedRAM(fuse(ram, dtype), batch_size=8)(images, labels)
            gaps = [scale * (found.region - plain.region).abs().max(), (found.image - plain.image).abs().max()]
            yield row(
                f"difference from the plain path in float32, {preset} preset, tower in {str(dtype).split('.')[-1]}",
                float(torch.stack(gaps).max()),
                "cosine",
                at_most=1e-3 if (dtype, preset) == (torch.float32, "paper") else None,
                note="stops each image, not the batch" if preset == "reference" else "",
                scores=float((found.scores - scores).abs().max()),
                largest_score=float(scores.max()),
                same_best_label=float((found.scores.argmax(1) == scores.argmax(1)).float().mean()),
            )


def _unfused(bench: Bench, ram: RAM, labels: Labels, preset: str, batch: int) -> Iterator[Row]:
    """The same pass unfused and eager, with the plan in memory."""
    images = bench.images(batch)
    with torch.no_grad():
        rate = bench.rate(lambda: ram.score(ram.recognize(ram.trunk(next(images)), labels)), batch)
    fast = bench.rates.get((preset, batch))
    note = f"{peak_gb(bench.device)[1]:.1f} GB" + (f"; fused, as graphs, it is {fast / rate:.1f}× this" if fast else "")
    yield row(f"our own unfused path, {preset} preset, batch {batch}", rate, "img/s", note=note)


def _eager(engine: GraphedRAM) -> str:
    return "" if engine.why_eager is None else f"; eager: {engine.why_eager}"


# ---------------------------------------------------------------------------------------------------- many labels


def line_many(bench: Bench) -> Iterator[Row]:
    """Twenty thousand labels, with several sizes of workspace."""
    ram, batch = random_ram(bench.size, "paper", bench.device, text=False), bench.batches[1]
    if ("paper", batch) not in bench.rates:
        yield from _fast(bench, ram, bench.vocabulary(), "paper", batch)
    labels = bench.vocabulary(bench.many_labels)
    for workspace in WORKSPACES:
        free(bench.device)
        yield from _many(bench, ram, labels, batch, workspace)


def _many(bench: Bench, ram: RAM, labels: Labels, batch: int, workspace: int) -> Iterator[Row]:
    images, engine = bench.images(batch), GraphedRAM(fuse(ram, bench.half), batch_size=batch)
    engine.ram.workspace_mb = workspace
    rate = bench.rate(lambda: engine(next(images), labels), batch)
    yield row(
        f"test, {len(labels):,} labels, paper preset, batch {batch}, workspace {workspace} MB",
        rate,
        "img/s",
        baseline=bench.rates["paper", batch],
        baseline_what=f"{bench.labels:,} labels",
        ratio_at_least=0.4 if workspace == WORKSPACES[0] else None,
        note=f"{peak_gb(bench.device)[1]:.1f} GB{_eager(engine)}",
        memory_gb=peak_gb(bench.device)[1],
    )
    if workspace == WORKSPACES[0]:
        own = engine.ram
        with torch.inference_mode():
            trunk = own.trunk(next(images))
            calls = (lambda: own.region_set.regions(own.backbone, trunk, labels.tss), matching(own, trunk, labels))
            looking, matched = (seconds_per_call(call, bench.device, budget=0.4, repeats=3) for call in calls)
        yield row("of that, TSS with labels, and projection", 1e3 * looking, "ms")
        yield row("of that, similarities and matching", 1e3 * matched, "ms")


# ---------------------------------------------------------------------------------------------------- kept trunks


def line_retag(bench: Bench) -> Iterator[Row]:
    """Kept trunks with a vocabulary, beside tagging the same images afresh."""
    ram = random_ram(bench.size, "paper", bench.device, text=False)
    for batch in bench.batches:
        free(bench.device)
        yield from _retag(bench, ram, batch)


def _retag(bench: Bench, ram: RAM, batch: int) -> Iterator[Row]:
    engine, labels = GraphedRAM(fuse(ram, bench.half), batch_size=batch), bench.vocabulary()
    images = random_images(batch, bench.pixels, bench.device, 1)[0]
    kept = engine.trunk(images)
    again = bench.rate(lambda: engine.recognize(kept, labels), batch)
    afresh = bench.rate(lambda: engine(images, labels), batch)
    size = sum(t.numel() * t.element_size() for t in kept.tensors) / batch / 1e6
    yield row(
        f"retagging kept trunks, batch {batch}",
        again,
        "img/s",
        baseline=afresh,
        baseline_what="tagging afresh",
        ratio_at_least=3,
        note=f"{size:.1f} MB kept per image{_eager(engine)}",
    )


def line_linear(bench: Bench) -> Iterator[Row]:
    """Time and memory against the number of images, which come from pinned memory."""
    ram, batch = random_ram(bench.size, "paper", bench.device, text=False), max(4, bench.batches[1] // 4)
    engine, labels = GraphedRAM(fuse(ram, bench.half), batch_size=batch), bench.vocabulary()
    images = torch.randint(0, 256, (batch, 3, *bench.pixels), dtype=torch.uint8)
    cuda = bench.device.type == "cuda"
    images = images.pin_memory() if cuda else images

    def run(turns: int) -> Callable[[], None]:
        def call() -> None:
            for _ in range(turns):
                engine(images, labels).scores.argmax(-1)

        return call

    found = []
    for turns in (8, 32, 128) if cuda else (1, 2, 4):
        free(bench.device)
        seconds = host_seconds(run(turns), bench.device, repeats=2)
        found.append([turns * batch, seconds, peak_gb(bench.device)[0]])
    (few, short, small), (many, long, large) = found[0], found[-1]
    yield row(
        f"an image among {many:,} costs, of one among {few:,}",
        100 * (long / many) / (short / few),
        "%",
        at_most=110,
        note=f"{many / long:,.0f} img/s from pinned memory, batch {batch}",
        points=found,
    )
    if cuda:
        yield row(
            f"memory for {many:,} images, of that for {few:,}",
            100 * large / small,
            "%",
            at_most=101,
            note=f"{large:.2f} GB",
        )


TEST_LINES: dict[str, Line] = {
    "ceilings": line_ceilings,
    "clip": line_clip,
    "test": line_test,
    "many": line_many,
    "retag": line_retag,
    "linear": line_linear,
    "reference": line_reference,
}
