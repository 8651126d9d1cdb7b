"""Training from kept stems.

What lies below the first layer that learns is constant per image, so it is computed once for a few augmented views of each
image and kept on the device; a step then only pays for the last layers. For data that fits, this is the fastest way to
train RAM: studies with many settings (`bench/study.py`) and broad-vocabulary training (`adapt`) use it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from ..config import LOSSES
from ..data.views import mosaics, plain_views, random_views
from ..errors import RamatchError
from ..modeling.ram import RAM, Labels, Output, Streams
from ..settings import Bound, Count, NotNegative, OneOf, Settings
from .config import OptimConfig
from .optim import Temperatures

TEMPERATURE_FLOOR = OptimConfig.temperature_floor


@dataclass(frozen=True)
class FitConfig(Settings):
    """How one variant is trained. Defaults are the paper's for natural images."""

    epochs: Count = 3
    batch_size: Count = 32
    lr: NotNegative = 5e-6  # AdamW: TSS
    lr_prompts: NotNegative = 1e-3  # SGD: visual and label prompts
    lr_tau: NotNegative = 5e-5  # AdamW: temperatures
    weight_decay: NotNegative = 1e-4
    warmup: NotNegative = 0.05
    ema: Annotated[float, Bound(0, 1, below=True)] = 0.0
    loss: Annotated[str, OneOf(LOSSES)] = "mmc"
    clip: NotNegative = 1.0  # of the gradient's norm; 0: none
    views: tuple[int, ...] = ()  # which kept views to draw from; empty: all
    mosaics: NotNegative = 0.0  # pictures of four images each, with the labels of all four, for each image
    focus: NotNegative = 0.0  # so many times the loss of the annotated labels alone is added


@dataclass(frozen=True)
class Kept:
    """Stems of n images in v views, on the device: x (v, n, 1+M, W), base (v, n, M, W) or None, found, taps (the last one may be a
    view of x)."""

    grid: tuple[int, int]
    x: Tensor
    base: Tensor | None
    found: Tensor | None
    taps: tuple[Tensor, ...]

    def __len__(self) -> int:
        return self.x.shape[1]

    def subset(self, rows: Tensor) -> Kept:
        """Some of the images, in all views."""

        def of(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[:, rows]

        return Kept(self.grid, self.x[:, rows], of(self.base), of(self.found), tuple(t[:, rows] for t in self.taps))

    def pick(self, view: Tensor | int, rows: Tensor | slice) -> Streams:
        def of(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[view, rows]

        return Streams(
            self.x[view, rows], self.grid, of(self.base), of(self.found), tuple(t[view, rows] for t in self.taps)
        )


def with_mosaics(
    pixels: Tensor,
    targets: Tensor,
    share: float,
    size: tuple[int, int],
    seed: int = 0,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Images and targets (1 present, 0 absent, −1 not known), followed by `share` times as many mosaics."""
    count = round(share * len(pixels))
    if not count:
        return pixels, targets
    shown, sources = mosaics(pixels, count, size, torch.Generator().manual_seed(seed), device)
    if shown.shape[-2:] != pixels.shape[-2:]:
        pixels = torch.cat([plain_views(chunk, size).round().to(torch.uint8) for chunk in pixels.split(256)])
    four = targets[sources.to(targets.device)]
    joined = torch.where((four > 0).any(1), 1, four.amin(1))  # known to be absent only where all four say so
    return torch.cat([pixels, shown]), torch.cat([targets, joined.to(targets.dtype)])


@torch.no_grad()
def keep(ram: RAM, pixels: Tensor, views: int = 1, *, crop: float = 0.5, seed: int = 0, batch: int = 256) -> Kept:
    """Stems of all images (uint8 (n, 3, h, w)) as they are, flipped, and in `views` − 2 random crops."""
    device = ram.backbone.device
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(seed)
    stores: dict[str, Tensor] = {}
    last = False
    grid = ram.backbone.vision.grid(*ram.preprocess.size)

    def put(name: str, view: int, start: int, value: Tensor | None) -> None:
        if value is None:
            return
        if name not in stores:
            stores[name] = torch.empty(views, len(pixels), *value.shape[1:], dtype=half, device=device)
        stores[name][view, start : start + len(value)] = value

    for view in range(views):
        for start in range(0, len(pixels), batch):
            chunk = pixels[start : start + batch].to(device)
            if view > 1:
                chunk = random_views(chunk, ram.preprocess.size, generator, crop=crop)
            else:
                chunk = plain_views(chunk, ram.preprocess.size, flip=view == 1)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                stem = ram.region_set.stem(ram.backbone, ram.preprocess.normalize(chunk))
            put("x", view, start, stem.x)
            put("base", view, start, stem.base)
            put("found", view, start, stem.found)
            # where TSS reads the tower's output, its last input is the main stream's patches: nothing to keep twice
            last = bool(stem.taps) and stem.taps[-1].data_ptr() == stem.x[:, 1:].data_ptr()
            for i, tap in enumerate(stem.taps[: len(stem.taps) - last]):
                put(f"tap{i}", view, start, tap)
    taps = [stores[f"tap{i}"] for i in range(sum(name.startswith("tap") for name in stores))]
    if last:
        taps.append(stores["x"][:, :, 1:])
    return Kept(grid, stores["x"], stores.get("base"), stores.get("found"), tuple(taps))


def fit(
    ram: RAM, kept: Kept, targets: Tensor, labels: Sequence[str], config: FitConfig, seed: int, annotated: int = 0
) -> dict[str, Any]:
    """Train the adapters on kept stems; targets (n, N), of which the first `annotated` are what `config.focus` is for. The weights
    end as the EMA if there is one."""
    device = kept.x.device
    if any(not 0 <= view < len(kept.x) for view in config.views):
        raise RamatchError(f"views {list(config.views)}: {len(kept.x)} views were kept, counted from 0")
    torch.manual_seed(seed)
    targets = targets.to(device)
    count, batch = len(kept), min(config.batch_size, len(kept))
    total = config.epochs * (count // batch)
    adapters = [p for n, p in ram.named_parameters() if p.requires_grad and "tss" in n]
    prompts = [p for n, p in ram.named_parameters() if p.requires_grad and "prompts" in n and p.numel()]
    taus = [ram.tau_global, ram.tau_region]
    groups = [{"params": adapters, "lr": config.lr}, {"params": taus, "lr": config.lr_tau, "weight_decay": 0.0}]
    fused = device.type == "cuda"
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=config.weight_decay, fused=fused)
    ]
    if prompts and config.lr_prompts:
        optimisers.append(torch.optim.SGD(prompts, lr=config.lr_prompts, momentum=0.9, fused=fused))
    warm = max(1, int(config.warmup * total))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            o, lambda s: min((s + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, s - warm) / max(1, total - warm))))
        )
        for o in optimisers
    ]
    learning = adapters + prompts + taus
    temperatures = Temperatures(dict(ram.named_parameters()), TEMPERATURE_FLOOR)
    mean = [p.detach().clone() for p in learning] if config.ema else []
    fixed: Labels | None = None
    if ram.label_set.mode == "none":  # nothing in the label set learns
        with torch.no_grad():
            fixed = ram.encode_labels(labels)
    views = torch.tensor(config.views or range(kept.x.shape[0]), device=device)
    losses: list[Tensor] = []
    ram.train()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began, step = time.perf_counter(), 0
    for _ in range(config.epochs):
        order = torch.randperm(count, device=device)
        for b in range(count // batch):
            rows = order[b * batch : (b + 1) * batch]
            view = views[torch.randint(len(views), (batch,), device=device)]
            y = targets[rows]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                output = ram(kept.pick(view, rows), fixed if fixed is not None else labels, y)
            loss = ram.loss(output, y, config.loss)
            if config.focus and annotated:
                alone = y.clone()
                alone[:, annotated:] = -1
                loss = loss + config.focus * ram.loss(output, alone, config.loss)
            loss.backward()
            if config.clip:
                nn.utils.clip_grad_norm_(learning, config.clip)
            for optimiser, schedule in zip(optimisers, schedules, strict=True):
                optimiser.step()
                schedule.step()
                optimiser.zero_grad(set_to_none=True)
            temperatures.clamp()
            step += 1
            if mean:
                decay = min(config.ema, (1 + step) / (10 + step))
                torch._foreach_lerp_(mean, [p.detach() for p in learning], 1 - decay)
            if step % 50 == 0 or step == total:
                losses.append(loss.detach())
    if mean:
        for parameter, value in zip(learning, mean, strict=True):
            parameter.data.copy_(value)
    trace = [round(float(v), 4) for v in losses]
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 2), "images_per_second": round(step * batch / max(seconds, 1e-9)), "loss": trace,
        "tau": [ram.tau_global.item(), ram.tau_region.item()],
    }  # fmt: skip


@torch.inference_mode()
def recognised(ram: RAM, kept: Kept, labels: Sequence[str], *, batch: int = 128) -> Iterator[Output]:
    """What the model finds on the kept images' first view, batch by batch."""
    ram.eval()
    device = kept.x.device
    encoded = ram.encode_labels(labels)
    for start in range(0, len(kept), batch):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = ram.recognize(ram.trunk(kept.pick(0, slice(start, start + batch))), encoded)
        yield found


@torch.inference_mode()
def collect(ram: RAM, kept: Kept, labels: Sequence[str], *, batch: int = 128) -> Tensor:
    """s_G, s_R (plan scaled by N) and best region's cosine of every image and label: (n, N, 3), on the CPU."""
    out = []
    for o in recognised(ram, kept, labels, batch=batch):
        region = o.region / o.mass if ram.config.plan_scale == "one" else o.region
        out.append(torch.stack([o.image, region, o.best], -1).float().cpu())
    return torch.cat(out)
