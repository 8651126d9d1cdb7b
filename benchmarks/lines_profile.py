"""Where the time goes: parts by timing, kernels by the profiler, for one batch of the test and one step of training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ramatch.modeling.fuse import fuse
from ramatch.modeling.graph import GraphedRAM
from ramatch.modeling.matching import match
from ramatch.modeling.ram import RAM

from .lines_test import matching
from .lines_train import Step
from .measure import Row, free, peak_gb, row, seconds_per_call
from .models import SIZES, Bench, Line, label_names, random_images, random_ram

TOP = 25  # kernels that are named, with their times, in the JSON

KINDS = (
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("convolutions", ("conv", "fprop", "cudnn")),
    (
        "transport",
        (
            "sinkhorn",
            "_solve_kernel",
            "_rows_kernel",
            "_columns_kernel",
            "_test_kernel",
            "_polish_kernel",
            "_peaks_kernel",
        ),
    ),
    ("matrix products", ("gemm", "nvjet", "cutlass", "wgmma", "splitk", "cublas")),
    ("softmax", ("softmax",)),
    ("BatchNorm", ("batch_norm", "bn_fw", "bn_bw", "batchnorm")),
    ("LayerNorm", ("layer_norm", "layernorm", "_norm_forward_kernel", "_norm_backward_kernel")),
    ("optimisers", ("adam", "sgd", "multi_tensor")),
    ("reductions", ("reduce",)),
    ("copies", ("copy", "memcpy", "memset", "catarray", "fill")),
    ("element by element", ("elementwise", "_gelu_")),
)


def kind_of(kernel: str) -> str:
    """What a kernel does, from its name."""
    name = kernel.lower()
    return next((kind for kind, marks in KINDS if any(mark in name for mark in marks)), "other")


def line_profile(bench: Bench) -> Iterator[Row]:
    """Where the time of one test batch goes: parts by timing, kernels by the profiler."""
    ram, batch = random_ram(bench.size, "paper", bench.device, text=False), bench.batches[1]
    engine, labels = GraphedRAM(fuse(ram, bench.half), batch_size=batch), bench.vocabulary()
    engine.recorder = None  # eager, so that the profiler sees every kernel by itself
    images, own = random_images(batch, bench.pixels, bench.device, 1)[0], engine.ram
    with torch.inference_mode():
        trunk = own.trunk(images)
        tss, count = own.region_set.tss[0], len(own.region_set.tss)
        parts: dict[str, Callable[[], object]] = {
            "trunk (embedding, layers, SAA, convolutions of TSS)": lambda: own.trunk(images),
            "of that, embedding": lambda: own.backbone.vision.embed(images),
            f"of that, convolutions of TSS, one of {count} layers": lambda: tss.streams(trunk.local, trunk.grid),
            "regions (TSS with labels, norm, projection)": lambda: own.region_set.regions(
                own.backbone, trunk, labels.tss
            ),
            f"of that, one of {count} layers": lambda: tss(*trunk.streams[:2], trunk.grid, labels.tss),
            "similarities and matching": matching(own, trunk, labels),
        }
        for what, call in parts.items():
            yield row(f"batch {batch}: {what}", 1e3 * seconds_per_call(call, bench.device, budget=0.3), "ms")
    if bench.device.type == "cuda":
        yield from _attention(bench, batch)
        yield from _kernels(bench, "one batch", lambda: engine(images, labels))


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


def _kernels(bench: Bench, what: str, call: Callable[[], object]) -> Iterator[Row]:
    """Device time of one call by kind of kernel; the longest kernels by name under `top` of the last row."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize(bench.device)
    kernels = [
        (e.key, e.self_device_time_total / 1e3, e.count) for e in profile.key_averages() if "CUDA" in str(e.device_type)
    ]
    times: dict[str, float] = defaultdict(float)
    for name, ms, _ in kernels:
        times[kind_of(name)] += ms
    total = sum(times.values())
    for kind, ms in sorted(times.items(), key=lambda item: -item[1]):
        yield row(f"kernels of {what}: {kind}", ms, "ms", note=f"{100 * ms / total:.1f} %")
    top = [list(kernel) for kernel in sorted(kernels, key=lambda kernel: -kernel[1])[:TOP]]
    yield row(f"kernels of {what}: all", total, "ms", note=f"{sum(k[2] for k in kernels)} launches", top=top)


# ---------------------------------------------------------------------------------------------------- training


def line_profile_train(bench: Bench) -> Iterator[Row]:
    """Where a training step goes, eagerly: the graph runs the same kernels."""
    for batch in reversed(bench.train_batches):
        free(bench.device)
        yield from _profile_train(bench, batch)


def _profile_train(bench: Bench, batch: int) -> Iterator[Row]:
    ram = random_ram(bench.size, "paper", bench.device, backbone_dtype=bench.half).train()
    names = tuple(label_names(bench.train_labels))
    free(bench.device)
    cuda = bench.device.type == "cuda"
    base = torch.cuda.memory_allocated(bench.device) / 1e9 if cuda else 0.0
    images = random_images(batch, bench.pixels, bench.device, 1)[0]
    targets = (torch.rand(batch, len(names), device=bench.device) < 0.005).float()
    step = Step(bench, ram, names)
    step.update.recorder = None
    for _ in range(3):
        step(images, targets)
    if cuda:
        held = torch.cuda.memory_allocated(bench.device) / 1e9
        tensors, taken = peak_gb(bench.device)
        yield row(
            f"training, batch {batch}: memory between steps",
            held,
            "GB",
            note=f"weights {base:.2f}; within an eager step {tensors:.2f} in tensors, {taken:.2f} taken",
        )
    with torch.autocast(bench.device.type, dtype=torch.bfloat16, enabled=cuda, cache_enabled=False):
        for what, call in _train_parts(bench, ram, names, images, targets).items():
            yield row(
                f"training, batch {batch}: {what}",
                1e3 * seconds_per_call(call, bench.device, budget=0.1, repeats=3),
                "ms",
            )
    yield row(f"training, batch {batch}: clipping, optimisers, EMA", 1e3 * _finish_seconds(bench, step), "ms")
    if cuda:
        yield from _kernels(bench, f"a training step of {batch}", lambda: step(images, targets))


def _train_parts(
    bench: Bench, ram: RAM, names: tuple[str, ...], images: Tensor, targets: Tensor
) -> dict[str, Callable[[], object]]:
    """Calls that each do one part of the step; "both" is forward and backward."""
    backbone, regions = ram.backbone, ram.region_set
    pixels = ram.preprocess.normalize(images).to(bench.half)
    rest = range(regions.first, len(backbone.vision.blocks))
    with torch.no_grad():
        stem = regions.stem(backbone, pixels)
        trunk, guide = regions.trunk(backbone, stem, teacher=True)
        labels = ram.encode_labels(names)
        assert guide is not None
        teacher = F.normalize(guide, dim=-1) @ labels.unit.T.to(guide.dtype)
        sim = ram.similarity(regions.regions(backbone, trunk, labels.tss), labels).float()

    def guiding() -> Tensor:
        with torch.no_grad(), torch.autocast(bench.device.type, enabled=False):
            return regions.run_layers(backbone, stem, rest, class_only=True).local(1.0)

    def student() -> list[Tensor]:
        out, _ = regions.trunk(backbone, stem)
        return list(out.tensors)

    leaves, words = trunk.map(lambda t: t.detach().requires_grad_()), labels.tss.detach().requires_grad_()
    own = [p for p in regions.tss.parameters() if p.requires_grad]

    def selecting() -> list[Tensor]:
        return [regions.regions(backbone, leaves, words)]

    def both(call: Callable[[], list[Tensor]], *inputs: Tensor) -> Callable[[], object]:
        def run() -> object:
            out = [t for t in call() if t.requires_grad]
            return torch.autograd.grad(out, inputs, [torch.ones_like(t) for t in out], allow_unused=True)

        return run

    def encoded() -> list[Tensor]:
        return [ram.encode_labels(names).unit]

    return {
        "normalize": lambda: ram.preprocess.normalize(images).to(bench.half),
        "frozen prefix": lambda: regions.stem(backbone, pixels),
        "teacher's layers": guiding,
        "student's layers, convolutions of TSS": student,
        "student's layers, convolutions of TSS, both": both(student, regions.visual_prompts, *own),
        "TSS with labels and projection": selecting,
        "TSS with labels and projection, both": both(selecting, leaves.local, words, *leaves.streams, *own),
        "text": encoded,
        "text, both": both(encoded, ram.label_set.prompts),
        "similarities": lambda: ram.similarity(trunk.local[..., : backbone.dim], labels).float(),
        "matching": lambda: match(sim, backbone.logit_scale, ram.config, teacher, targets),
    }


def _finish_seconds(bench: Bench, step: Step) -> float:
    """Of everything after the backward pass, with gradients of ones."""
    for parameter in step.update.parameters:
        parameter.grad = torch.ones_like(parameter)
    seconds = seconds_per_call(step.finish, bench.device, budget=0.1, repeats=3)
    for optimizer in step.update.optimizers:
        optimizer.zero_grad(set_to_none=True)
    return seconds


PROFILE_LINES: dict[str, Line] = {"profile": line_profile, "profile_train": line_profile_train}
