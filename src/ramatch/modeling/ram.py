"""RAM: recover, match, score (Section 4). One forward pass, for training and recognizing, on CPU and GPU.

The work is split in two so that a new vocabulary costs little: `trunk` runs the frozen tower and everything that does
not depend on labels, once per image; `recognize` adds what does: attention to labels, matching, scores. Because the
local stream only accumulates, the split is exact. `fuse` gives a copy with constants folded into weights, `GraphedRAM`
the same pass as CUDA graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import PRESETS, RAMConfig
from ..errors import RamatchError
from .backbone import Backbone
from .kernels.ops import label_attention, layer_norm, spatial_selection
from .known import Known
from .learned import Learned
from .losses import GATHERED, LOSSES, Gather
from .matching import fused_scores, match, scores_without_plan
from .preprocess import HALF, Preprocess
from .text import LabelSet
from .towers import Block, drawn
from .types import Labels, Output, Streams, Trunk

__all__ = ["RAM", "TSS", "Labels", "Output", "RegionSet", "Stream", "Streams", "Trunk"]

# ------------------------------------------------------------------------------------------------ recover (Section 4.2)


class Stream(nn.Sequential):
    """Convolution, BatchNorm (part of it in a fused one), GELU: (B, W, H, W') → (B, D, H, W')."""

    def __init__(self, width: int, dim: int, kernel: int, fused: bool = False) -> None:
        conv = nn.Conv2d(width, dim, kernel, padding=kernel // 2, bias=fused)
        super().__init__(conv, nn.Identity() if fused else nn.BatchNorm2d(dim), nn.GELU())


class TSS(nn.Module):
    """Text-guided spatial selection (Eq. 4, appendix A.5): two receptive fields, a parameter-free look at the labels,
    one spatial mask per stream, and back to the tower's width."""

    def __init__(self, width: int, dim: int, config: RAMConfig, fused: bool = False) -> None:
        super().__init__()
        self.point = Stream(width, dim, 1, fused)
        self.area = Stream(width, dim, 3, fused)
        self.norm_point, self.norm_area, self.norm_labels = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        k, groups = config.mask_kernel, 2 if config.mask_conv == "depthwise" else 1
        self.mask = nn.Conv2d(2, 2, k, padding=k // 2, groups=groups, bias=False)
        self.back = nn.Conv2d(dim, width, 1, bias=False)
        if config.tss_init == "zero":
            nn.init.zeros_(self.back.weight)

    def streams(self, patches: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """patches (B, M, W) → point and area (B, M, D); no label enters."""
        if not torch.is_autocast_enabled(patches.device.type):
            patches = patches.to(self.back.weight.dtype)
        # images are channels last throughout, so that they and tokens are views of each other; 1×1 convolutions are
        # products
        patches = patches.contiguous()
        convolution, norm, act = self.point
        point = _tokens(act(norm(_image(_product(patches, convolution), grid))))
        return point, _tokens(self.area(_image(patches, grid)))

    def forward(
        self, point: Tensor, area: Tensor, grid: tuple[int, int], labels: Tensor, workspace_mb: int = 1024
    ) -> Tensor:
        """Streams (B, M, D) and labels (N, D) → (B, M, W)"""
        if not torch.is_autocast_enabled(labels.device.type):
            labels = labels.to(point.dtype)
        keys = self.norm_labels(labels)

        def look(stream: Tensor, norm: nn.LayerNorm) -> Tensor:
            return label_attention(layer_norm(stream, norm.weight, norm.bias, norm.eps), keys, workspace_mb)

        streams = point, look(point, self.norm_point), area, look(area, self.norm_area)
        return _product(spatial_selection(streams, self.mask.weight, self.mask.groups, grid), self.back)


def _product(x: Tensor, convolution: nn.Module) -> Tensor:
    """A 1×1 convolution on tokens (B, M, C)."""
    convolution = cast(nn.Conv2d, convolution)
    return F.linear(x, convolution.weight.flatten(1), convolution.bias)


def _image(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, M, C) → (B, C, H, W')"""
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def _tokens(image: Tensor) -> Tensor:
    """(B, C, H, W') → (B, M, C)"""
    return image.flatten(2).transpose(1, 2)


def _own_type(backbone: Backbone, x: Tensor) -> AbstractContextManager:
    """The frozen tower in its own half-precision type. Autocast would give it a float32 residual stream and LayerNorms
    between
    conversions: three times the memory traffic for a tower that recognizes in half precision anyway."""
    half = backbone.dtype != torch.float32 and x.dtype == backbone.dtype
    return torch.autocast(x.device.type, enabled=False) if half else nullcontext()


class RegionSet(nn.Module):
    """Ladder local adapter: image → global feature and regions, conditioned on the labels."""

    def __init__(self, backbone: Backbone, config: RAMConfig, fused: bool = False) -> None:
        super().__init__()
        self.config = config
        c, layers = backbone.vision.config, backbone.vision.config.layers
        for name in ("adapted_layers", "saa_layers"):
            if getattr(config, name) > layers:
                raise RamatchError(f"{name} is {getattr(config, name)}, but '{backbone.name}' has {layers} layers")
        self.start = layers - config.adapted_layers  # l_s, counted from 0
        self.first = self.start if config.visual_prompts else layers  # first layer whose main stream learns
        self.saa_start = 0 if config.saa_layers == -1 else layers - config.saa_layers
        count = config.adapted_layers if config.tss else 0
        self.tss = nn.ModuleList(TSS(c.width, backbone.dim, config, fused) for _ in range(count))
        rows = config.adapted_layers if config.visual_prompts else 0
        self.visual_prompts = nn.Parameter(drawn(rows, config.visual_prompts, c.width) * 0.02)
        self.region_dtype: torch.dtype | None = None  # of regions, where it is finer than the tower's (see `fuse`)
        # weight of SAA and of TSS in the adapted layers: the mean of the two when both are on (Eq. 5)
        self.weight = 0.5 if config.combine == "mean" and self.tss and config.saa_layers != 0 else 1.0
        self.tss_weight = self.weight * config.tss_share  # of TSS outside training

    @torch.no_grad()
    def stem(self, backbone: Backbone, pixels: Tensor, *, class_only: bool = False) -> Streams:
        """Pixels (B, 3, H, W) → state before the first layer that learns; constant per image, so it may be kept."""
        grid = backbone.vision.grid(*pixels.shape[-2:])
        with _own_type(backbone, pixels):
            x = backbone.vision.embed(pixels)
            return self.run_layers(backbone, Streams(x, grid), range(self.first), class_only=class_only)

    def trunk(
        self, backbone: Backbone, pixels: Tensor | Streams, *, teacher: bool = False
    ) -> tuple[Trunk, Tensor | None]:
        """Pixels (B, 3, H, W), or their `stem` → `Trunk` and, for `teacher`, the frozen tower's regions (B, M, D).

        The stem runs once for student and teacher; from there on the teacher follows its own main stream, because
        visual prompts make the student's differ.
        """
        rest = range(self.first, len(backbone.vision.blocks))
        # where nobody reads the last layer's patches (TSS comes before it, the global feature is the class token), it
        # need not compute them; attention pooling reads them all
        pooled = backbone.global_pool == "cls+mean" and self.config.pooled == "frozen"
        attends = backbone.vision.pool is not None
        read = attends or pooled or self.config.saa_layers == 0 or (bool(self.tss) and self.config.tss_input == "after")
        stem = pixels if isinstance(pixels, Streams) else self.stem(backbone, pixels, class_only=not read)
        with _own_type(backbone, stem.x):
            main = self.run_layers(backbone, stem, rest, prompts=True, class_only=not read)
        # projecting the class token alone is cheaper; the patches join only where the global feature wants them
        seen = main.x if attends else main.x[:, :1]
        image = backbone.project_image(seen if self.region_dtype is None else seen.float())
        if pooled:
            image = backbone.pool(image, backbone.project(self._finer(main.patches)))
        pairs = zip(self.tss, main.taps, strict=True)
        streams = [stream for tss, tap in pairs for stream in cast(TSS, tss).streams(tap, stem.grid)]
        out = Trunk(image, self._finer(main.local(self.weight)), tuple(streams), stem.grid)
        if not teacher:
            return out, None
        # without TSS there is nothing to average: the teacher's SAA counts in full
        with torch.no_grad(), _own_type(backbone, stem.x):
            guide = main if not rest else self.run_layers(backbone, stem, rest, class_only=not read)
            return out, backbone.project(guide.local(1.0))

    def _finer(self, x: Tensor) -> Tensor:
        return x if self.region_dtype is None else x.to(self.region_dtype)

    def run_layers(
        self, backbone: Backbone, streams: Streams, layers: range, *, prompts: bool = False, class_only: bool = False
    ) -> Streams:
        """Run some layers on the main stream, collecting SAA (Eq. 3) and the inputs of TSS on the way. `class_only`: of
        the tower's last layer, x has only the class token (B, 1, W)."""
        x, base, found, taps = streams.x, streams.base, streams.found, list(streams.taps)
        count, before = x.shape[1], self.config.tss_input == "before"
        first, rope = backbone.vision.config.prefix, backbone.vision.rope(*streams.grid)
        for i in layers:
            block = cast(Block, backbone.vision.blocks[i])
            adapted, saa, tapped = i >= self.start, i >= self.saa_start, i >= self.start and bool(self.tss)
            if saa and base is None:
                base = x[:, first:]
            if tapped and before:
                taps.append(x[:, first:])
            y = x
            if prompts and adapted:
                extra = self.visual_prompts[i - self.start].to(x.dtype)
                y = torch.cat([x, extra.expand(x.shape[0], -1, -1)], dim=1)
            last = class_only and i + 1 == len(backbone.vision.blocks)
            q, k, v = block.project(y, 1 if last else None, rope)
            if saa:
                # values of the tower's own tokens, not of the visual prompts; only patches are asked for
                seen = block.self_aware(v[:, :, :count], slice(first, None))
                if adapted:
                    found = seen if found is None else found + seen
                else:
                    base = cast(Tensor, base) + seen
            keep = 1 if last else count  # prompts are dropped after the layer
            attended = F.scaled_dot_product_attention(q[:, :, :keep], k, v)
            x = block.feed(x[:, :keep], block.merge(attended))
            if tapped and not before:
                taps.append(x[:, first:])
        return Streams(x, streams.grid, base, found, tuple(taps))

    def regions(self, backbone: Backbone, trunk: Trunk, labels: Tensor, workspace_mb: int = 1024) -> Tensor:
        """Regions (B, M, D), not normalized, for labels (N, D): Eq. 5, then the frozen norm and projection."""
        local, weight = trunk.local, self.weight if self.training else self.tss_weight
        for tss, point, area in zip(self.tss, trunk.streams[::2], trunk.streams[1::2], strict=True):
            added = tss(point, area, trunk.grid, labels, workspace_mb)
            local = local + (added if weight == 1.0 else added * weight)
        return backbone.project(local)


# ------------------------------------------------------------------------------------------------ match and score


class RAM(nn.Module):
    """A frozen backbone and the few parts that learn: TSS and visual prompts, label prompts, two temperatures."""

    foldable = True  # whether `fuse` knows how to fold it

    def __init__(self, backbone: Backbone, config: RAMConfig = PRESETS["ramatch"], *, fused: bool = False) -> None:
        """`fused`: the shape of a copy whose constants are folded into weights; `fuse` makes one."""
        super().__init__()
        self.backbone, self.config, self.fused = backbone, config, fused
        self.background: tuple[str, ...] = ()  # always matched along with the vocabulary, outside training
        self.known: Known | None = None  # the words it learned with
        self.learned: Learned | None = None  # labels that its user taught it, outside training
        self.method: dict[str, Any] | None = None  # name and settings, of a system that only has RAM's interface
        self.workspace_mb = 1024  # bound on what grows with the vocabulary, where nothing learns
        self.region_set = RegionSet(backbone, config, fused)
        self.label_set = LabelSet(backbone, config)
        self.tau_global = nn.Parameter(torch.tensor(config.tau_global or 1 / backbone.logit_scale))
        self.tau_region = nn.Parameter(torch.tensor(config.tau_region or 1 / backbone.logit_scale))

    @property
    def preprocess(self) -> Preprocess:
        own = replace(self.backbone.preprocess, interpolation=self.config.resize)
        return replace(own, mean=HALF, std=HALF) if self.config.pixels == "half" else own

    def adapters(self) -> dict[str, Tensor]:
        """State of everything that is not the frozen backbone."""
        return {k: v for k, v in self.state_dict().items() if not k.startswith("backbone.")}

    def train(self, mode: bool = True) -> RAM:
        super().train(mode)
        self.backbone.eval()
        return self

    def with_config(self, config: RAMConfig) -> RAM:
        """This model (the same modules and weights) with other settings of matching and scores."""
        twin = copy.copy(self)
        twin.config = config
        return twin

    def encode_labels(self, names: Sequence[str], templates: Sequence[str] | None = None) -> Labels:
        """Vocabulary → `Labels`, in sentences of other templates if given; differentiable in the label prompts.

        With a background, a label competes with the same everyday things whether one label is asked for or a thousand.
        """
        extra: tuple[str, ...] = ()
        if self.background and not self.training:
            asked = {name.lower() for name in names}
            extra = tuple(name for name in self.background if name.lower() not in asked)
        config = self.config if templates is None else self.config.replace(templates=tuple(templates))
        raw = self.label_set(self.backbone, (*names, *extra), config.templates)
        positive, *more = raw if raw.ndim == 3 else raw[None]
        negative, evidence, *_ = (*(F.normalize(x, dim=-1) for x in more), None, None)
        unit = F.normalize(positive, dim=-1)
        familiarity = None if self.known is None or self.training else self.known.familiarity(unit[: len(names)])
        tss = unit if self.config.tss_labels == "unit" else positive
        taught = None
        if self.learned is not None and not self.training:
            unit, taught = self.learned.place(names, unit)
            familiarity = None if familiarity is None else np.maximum(familiarity, taught)
        return Labels(tuple(names), unit, tss, negative, familiarity, taught, evidence)

    def trunk(self, images: Tensor | Streams) -> Trunk:
        """Everything about images (B, 3, H, W), or their kept stem, that no vocabulary changes. Images are uint8, or
        pixels that `preprocess` has normalized, in the backbone's type; a fused model takes uint8 only."""
        return self.region_set.trunk(self.backbone, self._pixels(images))[0]

    def _pixels(self, images: Tensor | Streams) -> Tensor | Streams:
        if isinstance(images, Streams) or images.is_floating_point() != self.fused:
            return images
        if self.fused:
            raise RamatchError(f"a fused RAM normalizes pixels itself; give uint8 images, not {images.dtype}")
        return self.preprocess.normalize(images).to(self.backbone.dtype)

    def similarity(self, features: Tensor, labels: Labels) -> Tensor:
        """Cosine of features (..., D) with each label (..., N); DualCoOp's negatives are subtracted."""
        features = F.normalize(features, dim=-1)
        return features @ labels.directions.T.to(features.dtype)

    def features(self, trunk: Trunk, labels: Labels) -> tuple[Tensor, Tensor]:
        """Global feature (B, D) and regions (B, M, D) in sight of the labels, not normalized."""
        regions = self.region_set.regions(self.backbone, trunk, labels.tss, self.workspace_mb)
        return self.backbone.pool(trunk.image, regions) if self.config.pooled == "adapted" else trunk.image, regions

    def recognize(
        self,
        trunk: Trunk,
        labels: Labels,
        *,
        plan: bool = True,
        best: bool = True,
        matcher: str | None = None,
        teacher: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Output:
        """Match a trunk's regions with the labels and score them (Eq. 14). `matcher` replaces the model's own.

        Without `plan`, neither cosines nor plan are handed on, and where `match_scores` knows the matcher none are held
        in memory at once; without `best` not even each label's best region is looked for, unless a score is made of it.
        """
        config = self.config if matcher is None else self.config.replace(matcher=matcher)
        pooled, regions = self.features(trunk, labels)
        n, mass, scale = len(labels), 1 / len(labels.unit), self.backbone.logit_scale
        image = self.similarity(pooled, labels).float()[:, :n]
        sim = found = None
        if plan or not fused_scores(config):
            sim = self.similarity(regions, labels).float()
            found = match(sim, scale, config, teacher, targets)
            if sim.shape[-1] > n:  # the background has done its part
                sim, found = sim[..., :n], replace(found, plan=found.plan[..., :n])
            region, top = (found.plan * sim).sum(1) / mass, sim.amax(1)
        else:
            best = best or config.max_weight > 0 or config.best_share > 0
            unit, sight = labels.directions.to(regions.dtype), F.normalize(regions, dim=-1)
            scores, tops = scores_without_plan(sight, unit, scale, config, best, self.workspace_mb)
            region, top = scores[:, :n], cast(Tensor, tops if tops is None else tops[:, :n])
        if config.max_weight:
            region = torch.lerp(region, top, config.max_weight)
        if config.plan_scale == "one":
            region = region * mass
        kept = {"sim": sim, "match": found} if plan else {}
        return Output(region, image, top, mass=mass, grid=trunk.grid, **kept)  # type: ignore[arg-type]

    def forward(
        self, pixels: Tensor | Streams, labels: Sequence[str] | Labels, targets: Tensor | None = None
    ) -> Output:
        """Images (B, 3, H, W) or kept stems, N labels → `Output`. With targets (B, N) the teacher guides the plan."""
        names = labels.names if isinstance(labels, Labels) else tuple(labels)
        encoded = labels if isinstance(labels, Labels) else self.encode_labels(names)
        if targets is None or self.config.matcher != "kcot" or not self.config.tkt:
            return self.recognize(self.trunk(pixels), encoded, targets=targets)
        trunk, guide = self.region_set.trunk(self.backbone, self._pixels(pixels), teacher=True)
        with torch.no_grad():
            frozen = F.normalize(self.label_set.frozen(self.backbone, names), dim=-1)
            teacher = F.normalize(cast(Tensor, guide), dim=-1)
            teacher = teacher @ frozen.T.to(teacher.dtype)
        return self.recognize(trunk, encoded, teacher=teacher, targets=targets)

    def loss(self, output: Output, targets: Tensor, kind: str = "mmc", gather: Gather | None = None) -> Tensor:
        """L_R + L_G (Eq. 15), each with its own learnable temperature."""
        options = {"gather": gather} if gather is not None and kind in GATHERED else {}
        function = LOSSES[kind]
        region, image = output.region / self.tau_region, output.image / self.tau_global
        return function(region, targets, **options) + function(image, targets, **options)

    def score(self, output: Output, rule: str | None = None) -> Tensor:
        """One number per image and label (B, N), for ranking: see `RAMConfig.score`, which `rule` replaces."""
        rule = rule or self.config.score
        if rule in ("cosine", "partial"):
            region = output.region
            if self.config.best_share:
                region = torch.lerp(region, output.best, self.config.best_share)
            mean = torch.lerp(output.image, region, self.config.region_share)
            if rule == "cosine":
                return mean
            # between cosine and softmax: a part of what all labels of the image have in common is taken off
            mean = mean * (self.backbone.logit_scale / 2)
            return mean - self.config.partial_share * mean.logsumexp(-1, keepdim=True)
        region, image = output.region / self.tau_region, output.image / self.tau_global
        if rule == "joint":
            return ((region + image) / 2).softmax(-1)
        return (region.softmax(-1) + image.softmax(-1)) / 2
