"""The alignment loop.

Losses, with equal weight: captions against images of the batch (InfoNCE) and mined tags against each other, each on the global
feature and on the pooled regions; mosaics of four images have tags only. Only the last vision layers, the text layers and the two projections learn; what lies
below in the vision tower is computed once for a few augmented views and kept on the device.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import RAMConfig
from ..data.tags import Tags, mine_tags
from ..data.views import mosaics, plain_views, random_views
from ..errors import RamatchError
from ..modeling.backbone import Backbone
from ..modeling.checkpoints.folder import save_backbone
from ..modeling.ram import RegionSet, Streams
from .align_config import AlignConfig
from .align_model import contrast, join_towers, log_mean_exp

Log = Callable[[dict[str, Any]], None]


@dataclass
class AlignResult:
    """The aligned backbone, the mined tags' names, the log, and seconds of training."""

    backbone: Backbone
    tags: tuple[str, ...]
    log: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


class _Student(nn.Module):
    """What learns: last vision layers, text layers, projections, and a temperature for each of the four losses."""

    def __init__(self, backbone: Backbone, config: AlignConfig) -> None:
        super().__init__()
        self.backbone, self.config = backbone, config
        self.start = len(backbone.vision.blocks) - config.vision_layers
        if self.start < 0:
            raise RamatchError(
                f"vision_layers is {config.vision_layers}, but the vision tower has {len(backbone.vision.blocks)} layers"
            )
        self.ladder = RegionSet(
            backbone, RAMConfig(tss=False, visual_prompts=0, adapted_layers=0, saa_layers=config.saa_layers)
        )
        self.log_scales = nn.Parameter(torch.full((4,), math.log(20.0)))
        assert backbone.text is not None
        assert backbone.text_projection is not None
        backbone.visual_projection.requires_grad_(True)
        backbone.text_projection.requires_grad_(True)
        backbone.text.blocks.requires_grad_(True)
        backbone.vision.blocks[self.start :].requires_grad_(True)
        backbone.vision.norm.requires_grad_(True)

    def groups(self) -> list[dict[str, Any]]:
        """Optimiser groups: matrices decay, vectors do not."""
        c, b = self.config, self.backbone
        assert b.text is not None
        assert b.text_projection is not None
        sets = [
            (c.lr_heads, [*b.visual_projection.parameters(), *b.text_projection.parameters()]),
            (c.lr_text, list(b.text.blocks.parameters())),
            (c.lr_vision, [*b.vision.blocks[self.start :].parameters(), *b.vision.norm.parameters()]),
            (c.lr_scale, [self.log_scales]),
        ]
        out = []
        for lr, parameters in sets:
            for decay in (True, False):
                chosen = [p for p in parameters if p.requires_grad and (p.ndim > 1) == decay]
                if chosen:
                    out.append({"params": chosen, "lr": lr, "weight_decay": c.weight_decay if decay else 0.0})
        return out

    def look(self, state: Streams) -> tuple[Tensor, Tensor]:
        """From the kept state to unit global features (B, D) and unit regions (B, M, D)."""
        b = self.backbone
        done = self.ladder.run_layers(b, state, range(self.start, len(b.vision.blocks)))
        image, patches = b.finish(done.x)
        regions = patches if done.base is None else b.visual_projection(b.vision.norm(done.local(1.0)))
        return F.normalize(image.float(), dim=-1), F.normalize(regions.float(), dim=-1)

    def read(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Unit text features (N, D)."""
        b = self.backbone
        assert b.text is not None
        return F.normalize(b.project_text(b.text(ids, lengths)).float(), dim=-1)


def align(
    vision: str | Path,
    text: str | Path,
    images: Tensor,
    captions: Sequence[Sequence[str]],
    config: AlignConfig | None = None,
    *,
    device: str | torch.device | None = None,
    out: str | Path | None = None,
    on_log: Log | None = None,
    kept: _Kept | None = None,
) -> AlignResult:
    """Align two towers. images: uint8 (n, 3, H, W) of any size; captions: a list of captions for each image.

    `out` writes the aligned backbone (`Backbone.from_pretrained` reads it). `kept` reuses another run's frozen views.
    """
    config = config or AlignConfig()
    if len(images) != len(captions) or len(images) < 2:
        raise RamatchError(
            f"{len(images)} images and {len(captions)} lists of captions: they must be as many, and at least 2"
        )
    if any(not texts for texts in captions):
        raise RamatchError("an image has no caption; leave it out")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.manual_seed(config.seed)
    backbone = join_towers(
        vision, text, image_size=config.image_size, dim=config.dim, global_pool=config.global_pool
    ).to(device)
    student = _Student(backbone, config).to(device)
    tags = mine_tags(captions, min_images=config.min_images, max_tags=config.max_tags)
    if not tags.names and config.tag_weight:
        raise RamatchError(f"no tag occurs in {config.min_images} images; lower min_images or set tag_weight to 0")
    kept = kept or keep_views(student, images, config, device)
    words = _Words(backbone, captions, tags, config, device)
    began = time.perf_counter()
    log = _train(student, kept, words, config, on_log)
    backbone.requires_grad_(False)
    scales = student.log_scales.detach()[2:] if config.tag_weight else student.log_scales.detach()[:2]
    backbone.logit_scale = float(scales.mean().exp().clamp(max=200))
    result = AlignResult(backbone.eval(), tags.names, log, time.perf_counter() - began)
    if out is not None:
        save_backbone(backbone, out)
    return result


@dataclass(frozen=True)
class _Kept:
    """State of every image and view before the first layer that learns: main stream and the local stream so far."""

    x: Tensor  # (views, n, 1+M, W)
    base: Tensor | None  # (views, n, M, W)
    grid: tuple[int, int]
    mosaics: _Kept | None = None  # likewise
    sources: Tensor | None = None  # (mosaics, 4) which images each of them shows

    def pick(self, view: Tensor, rows: Tensor) -> Streams:
        return Streams(self.x[view, rows], self.grid, None if self.base is None else self.base[view, rows])


@torch.no_grad()
def keep_views(student: _Student, images: Tensor, config: AlignConfig, device: torch.device) -> _Kept:
    """Run the frozen layers on each image as it is, flipped, and in `views` − 2 random crops, and on as many mosaics."""
    generator = torch.Generator().manual_seed(config.seed)
    size = (config.image_size, config.image_size)
    kept = _keep(student, images, config, config.views, generator, device)
    if not config.mosaics:
        return kept
    shown, sources = mosaics(images, len(images), size, generator, device)
    return dataclasses.replace(
        kept, mosaics=_keep(student, shown, config, min(2, config.views), generator, device), sources=sources.to(device)
    )


def _keep(
    student: _Student,
    images: Tensor,
    config: AlignConfig,
    views: int,
    generator: torch.Generator,
    device: torch.device,
) -> _Kept:
    size, pre = (config.image_size, config.image_size), student.backbone.preprocess
    xs, bases = [], []
    grid = student.backbone.vision.grid(*size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for view in range(views):
        rows_x, rows_base = [], []
        for start in range(0, len(images), 256):
            batch = images[start : start + 256].to(device, non_blocking=True)
            if view > 1:
                batch = random_views(batch, size, generator, crop=config.crop)
            else:
                batch = plain_views(batch, size, flip=view == 1)
            pixels = pre.normalize(batch)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                state = student.ladder.run_layers(
                    student.backbone, Streams(student.backbone.vision.embed(pixels), grid), range(student.start)
                )
            rows_x.append(state.x.to(dtype))
            if state.base is not None:
                rows_base.append(state.base.to(dtype))
        xs.append(torch.cat(rows_x))
        if rows_base:
            bases.append(torch.cat(rows_base))
    return _Kept(torch.stack(xs), torch.stack(bases) if bases else None, grid)


class _Words:
    """Tokenised captions and tags on the device, and which tags may serve as negatives."""

    def __init__(
        self,
        backbone: Backbone,
        captions: Sequence[Sequence[str]],
        tags: Tags,
        config: AlignConfig,
        device: torch.device,
    ) -> None:
        flat = [c for texts in captions for c in texts]
        self.ids, self.lengths = backbone.tokenize(flat)
        counts = torch.tensor([len(texts) for texts in captions], device=device)
        self.counts, self.first = counts, counts.cumsum(0) - counts
        self.targets = tags.targets.to(device)
        self.tag_ids, self.tag_lengths = backbone.tokenize(tags.names)
        with torch.no_grad():
            assert backbone.text is not None
            plain = F.normalize(backbone.text(self.tag_ids, self.tag_lengths).float(), dim=-1)
            self.close = (plain @ plain.T > config.ignore_above).float()  # (T, T)

    def captions(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """One random caption for each image of `rows`."""
        pick = self.first[rows] + (torch.rand(len(rows), device=rows.device) * self.counts[rows]).long()
        lengths = self.lengths[pick]
        return self.ids[pick][:, : int(lengths.max())], lengths

    def masks(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Positive and negative tags (B, T) of these images (B,), or of pictures that show several each (B, 4)."""
        positive = self.targets[rows] if rows.ndim == 1 else self.targets[rows].any(1)
        return positive, positive.float() @ self.close == 0


def _train(
    student: _Student, kept: _Kept, words: _Words, config: AlignConfig, on_log: Log | None
) -> list[dict[str, Any]]:
    device, count = kept.x.device, kept.x.shape[1]
    batch = min(config.batch_size, count)
    steps_per_epoch = count // batch
    total = config.epochs * steps_per_epoch
    optimiser = torch.optim.AdamW(student.groups(), betas=(0.9, 0.98), fused=device.type == "cuda")
    warm = max(1, int(config.warmup * total))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda s: min((s + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, s - warm) / max(1, total - warm)))),
    )
    learning = [p for p in student.parameters() if p.requires_grad]
    captions, tags = config.caption_weight, config.tag_weight
    weights = torch.tensor([captions, captions, tags, tags], device=device)
    mean = _Mean(learning, int(total * (1 - config.average))) if config.average else None
    log: list[dict[str, Any]] = []
    student.train()
    step = 0
    for epoch in range(config.epochs):
        order = torch.randperm(count, device=device)
        sums = torch.zeros(4, device=device)
        for b in range(steps_per_epoch):
            rows = order[b * batch : (b + 1) * batch]
            view = torch.randint(len(kept.x), (len(rows),), device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                losses = _losses(
                    student, kept, words, rows, view, config, config.leave_out if 4 * step >= total else 0.0
                )
            (losses * weights).sum().backward()
            nn.utils.clip_grad_norm_(learning, config.clip)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
            sums += losses.detach()
            step += 1
            if mean is not None:
                mean.add(step)
        entry = {"epoch": epoch + 1, "step": step, "losses": (sums / max(1, steps_per_epoch)).tolist()}
        entry["scales"] = student.log_scales.detach().exp().tolist()
        log.append(entry)
        if on_log is not None:
            on_log(entry)
    if mean is not None:
        mean.copy_to(learning)
    return log


def _losses(
    student: _Student,
    kept: _Kept,
    words: _Words,
    rows: Tensor,
    view: Tensor,
    config: AlignConfig,
    leave_out: float = 0.0,
) -> Tensor:
    """Caption loss on global and regions, tag loss on global and regions: (4,)."""
    image, regions = student.look(kept.pick(view, rows))
    captions = student.read(*words.captions(rows))
    scale = student.log_scales.exp().clamp(max=200)
    same = torch.arange(len(rows), device=rows.device)
    pooled = log_mean_exp(_region_cosines(regions, captions), config.beta, 1)  # (B images, B captions)
    found = []
    for i, cosines in enumerate((image @ captions.T, pooled)):
        logits = cosines * scale[i]
        found.append((F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2)
    tags = student.read(words.tag_ids, words.tag_lengths)
    found += _tag_losses(image, regions, tags, scale[2:], words.masks(rows), config, leave_out)
    count = round(config.mosaics * len(rows))
    if kept.mosaics is not None and kept.sources is not None and count:
        rows = torch.randint(len(kept.sources), (count,), device=rows.device)
        view = torch.randint(len(kept.mosaics.x), (count,), device=rows.device)
        image, regions = student.look(kept.mosaics.pick(view, rows))
        masks = words.masks(kept.sources[rows])
        more = _tag_losses(image, regions, tags, scale[2:], masks, config, leave_out)
        found[2:] = [a + config.mosaics * b for a, b in zip(found[2:], more, strict=True)]
    return torch.stack(found)


def _tag_losses(
    image: Tensor,
    regions: Tensor,
    tags: Tensor,
    scales: Tensor,
    masks: tuple[Tensor, Tensor],
    config: AlignConfig,
    leave_out: float,
) -> list[Tensor]:
    """Tag loss on global features (B, D) and on regions (B, M, D)."""
    positive, negative = masks
    pooled = log_mean_exp(_region_cosines(regions, tags), config.beta, 1)
    found = []
    for cosines, scale in zip((image @ tags.T, pooled), scales, strict=True):
        logits = cosines * scale
        loss = contrast(logits, positive, negative, leave_out=leave_out)  # which tags of this image
        if config.tag_across:  # which images of this tag: what ranks images for a label
            across = contrast(logits.T, positive.T, negative.T, even=config.even_tags, leave_out=leave_out)
            loss = torch.lerp(loss, across, config.tag_across)
        found.append(loss)
    return found


def _region_cosines(regions: Tensor, texts: Tensor) -> Tensor:
    """Cosines (B, M, N), in bf16 under autocast: the largest tensor of the step."""
    return torch.einsum("bmd,nd->bmn", regions, texts)


class _Mean:
    """Running mean of the weights from a given step on."""

    def __init__(self, parameters: list[nn.Parameter], start: int) -> None:
        self.parameters, self.start, self.count = parameters, start, 0
        self.sums: list[Tensor] = []

    def add(self, step: int) -> None:
        if step < self.start:
            return
        now = [p.detach() for p in self.parameters]
        self.count += 1
        if not self.sums:
            self.sums = [p.clone() for p in now]
        else:
            torch._foreach_lerp_(self.sums, now, 1 / self.count)

    def copy_to(self, parameters: list[nn.Parameter]) -> None:
        for parameter, value in zip(parameters, self.sums, strict=True):
            parameter.data.copy_(value)
