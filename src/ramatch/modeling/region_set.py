"""The visual set (Section 4.2): self-aware attention, text-guided spatial selection, and the ladder that joins them.

The work is split in two so that a new vocabulary costs little: `trunk` runs the frozen tower and everything that does not
depend on labels, once per image; `regions` adds what does (TSS) and projects. Because the local stream only accumulates, the
split is exact.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import RAMConfig
from ..errors import RamatchError
from .backbone import Backbone
from .kernels.ops import label_attention, layer_norm, spatial_selection
from .towers import Block


@dataclass(frozen=True)
class Trunk:
    """What one pass through the frozen tower leaves for the label-dependent part.

    image: global feature (B, D), not normalised. local: local stream of patches without TSS (B, M, W).
    taps: input of TSS at each adapted layer, (B, M, W) each. grid: rows and columns, M = rows · columns.
    """

    image: Tensor
    local: Tensor
    taps: tuple[Tensor, ...]
    grid: tuple[int, int]

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, rows: slice | Tensor) -> Trunk:
        return Trunk(self.image[rows], self.local[rows], tuple(t[rows] for t in self.taps), self.grid)

    def clone(self) -> Trunk:
        return Trunk(self.image.clone(), self.local.clone(), tuple(t.clone() for t in self.taps), self.grid)

    @staticmethod
    def cat(parts: list[Trunk]) -> Trunk:
        taps = tuple(torch.cat(t) for t in zip(*(p.taps for p in parts), strict=True))
        return Trunk(torch.cat([p.image for p in parts]), torch.cat([p.local for p in parts]), taps, parts[0].grid)


@dataclass(frozen=True)
class Streams:
    """State between layers: main stream x (B, 1+M, W); rows and columns of the grid; base of the local stream (B, M, W), None before it starts; sum of
    SAA over the adapted layers; inputs of TSS."""

    x: Tensor
    grid: tuple[int, int]
    base: Tensor | None = None
    found: Tensor | None = None
    taps: tuple[Tensor, ...] = ()

    def local(self, weight: float) -> Tensor:
        """Local stream (B, M, W) with SAA of the adapted layers weighted; the main stream's patches if it never started."""
        if self.base is None:
            return self.x[:, 1:]
        if self.found is None:
            return self.base
        return self.base + (self.found if weight == 1.0 else weight * self.found)


class Stream(nn.Sequential):
    """Convolution without bias, BatchNorm, GELU: (B, W, H, W') → (B, D, H, W')."""

    def __init__(self, width: int, dim: int, kernel: int) -> None:
        conv = nn.Conv2d(width, dim, kernel, padding=kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(dim), nn.GELU())


class TSS(nn.Module):
    """Text-guided spatial selection (Eq. 4, appendix A.5): two receptive fields, a parameter-free look at the labels,
    one spatial mask per stream, and back to the tower's width."""

    def __init__(self, width: int, dim: int, config: RAMConfig) -> None:
        super().__init__()
        self.point = Stream(width, dim, 1)
        self.area = Stream(width, dim, 3)
        self.norm_point, self.norm_area, self.norm_labels = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        k, groups = config.mask_kernel, 2 if config.mask_conv == "depthwise" else 1
        self.mask = nn.Conv2d(2, 2, k, padding=k // 2, groups=groups, bias=False)
        self.back = nn.Conv2d(dim, width, 1, bias=False)
        if config.tss_init == "zero":
            nn.init.zeros_(self.back.weight)

    def look(self, stream: Tensor, norm: nn.LayerNorm, labels: Tensor) -> Tensor:
        """What each position of a stream (B, M, D) finds among the labels (N, D) (after LayerNorm)."""
        return label_attention(layer_norm(stream, norm.weight, norm.bias, norm.eps), labels)

    def forward(self, patches: Tensor, grid: tuple[int, int], labels: Tensor) -> Tensor:
        """patches (B, M, W), labels (N, D) → (B, M, W)"""
        # images are channels last throughout, so that they and tokens are views of each other; 1×1 convolutions are products
        patches = patches.contiguous()
        labels = self.norm_labels(labels)
        convolution, norm, act = self.point
        point = _tokens(act(norm(_image(_product(patches, convolution), grid))))
        area = _tokens(self.area(_image(patches, grid)))
        chosen = spatial_selection(
            point, self.look(point, self.norm_point, labels), area, self.look(area, self.norm_area, labels),
            self.mask.weight, self.mask.groups, grid,
        )  # fmt: skip
        return _product(chosen, self.back)


def _product(x: Tensor, convolution: nn.Module) -> Tensor:
    """A 1×1 convolution without bias, on tokens (B, M, C)."""
    return F.linear(x, cast(nn.Conv2d, convolution).weight.flatten(1))


def _image(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, M, C) → (B, C, H, W')"""
    return tokens.unflatten(1, grid).permute(0, 3, 1, 2)


def _tokens(image: Tensor) -> Tensor:
    """(B, C, H, W') → (B, M, C)"""
    return image.flatten(2).transpose(1, 2)


def _own_type(backbone: Backbone, x: Tensor) -> AbstractContextManager:
    """The frozen tower in its own half-precision type. Autocast would give it a float32 residual stream and LayerNorms between
    conversions: three times the memory traffic for a tower that recognises in half precision anyway."""
    half = backbone.dtype != torch.float32 and x.dtype == backbone.dtype
    return torch.autocast(x.device.type, enabled=False) if half else nullcontext()


class RegionSet(nn.Module):
    """Ladder local adapter: image → global feature and regions, conditioned on the labels."""

    def __init__(self, backbone: Backbone, config: RAMConfig) -> None:
        super().__init__()
        self.config = config
        c, layers = backbone.vision.config, backbone.vision.config.layers
        if not 0 <= config.adapted_layers <= layers:
            raise RamatchError(f"adapted_layers is {config.adapted_layers}, but '{backbone.name}' has {layers} layers")
        if config.saa_layers > layers:
            raise RamatchError(f"saa_layers is {config.saa_layers}, but '{backbone.name}' has {layers} layers")
        self.start = layers - config.adapted_layers  # l_s, counted from 0
        self.first = self.start if config.visual_prompts else layers  # first layer whose main stream learns
        self.saa_start = 0 if config.saa_layers == -1 else layers - config.saa_layers
        count = config.adapted_layers if config.tss else 0
        self.tss = nn.ModuleList(TSS(c.width, backbone.dim, config) for _ in range(count))
        rows = config.adapted_layers if config.visual_prompts else 0
        self.visual_prompts = nn.Parameter(torch.randn(rows, config.visual_prompts, c.width) * 0.02)

    @torch.no_grad()
    def stem(self, backbone: Backbone, pixels: Tensor) -> Streams:
        """Normalised pixels (B, 3, H, W) → state before the first layer that learns; constant per image, so it may be kept."""
        grid = backbone.vision.grid(*pixels.shape[-2:])
        with _own_type(backbone, pixels):
            return self.climb(backbone, Streams(backbone.vision.embed(pixels), grid), range(self.first))

    def trunk(
        self, backbone: Backbone, pixels: Tensor | Streams, *, teacher: bool = False
    ) -> tuple[Trunk, Tensor | None]:
        """Normalised pixels (B, 3, H, W), or their `stem` → `Trunk` and, for `teacher`, the frozen tower's regions (B, M, D).

        The stem runs once for student and teacher; from there on the teacher follows its own main stream, because visual
        prompts make the student's differ.
        """
        tower = backbone.vision
        stem = pixels if isinstance(pixels, Streams) else self.stem(backbone, pixels)
        rest = range(self.first, len(tower.blocks))
        # where nobody reads the last layer's patches (TSS comes before it, the global feature is the class token), it need not
        # compute them
        alone = not (
            (backbone.global_pool == "cls+mean" and self.config.pooled == "frozen")
            or self.config.saa_layers == 0
            or (bool(self.tss) and self.config.tss_input == "after")
        )
        with _own_type(backbone, stem.x):
            main = self.climb(backbone, stem, rest, prompts=True, alone=alone)
        # projecting the class token alone is cheaper; the patches join only where the global feature wants them
        image = backbone.visual_projection(tower.norm(main.x[:, 0]))
        if backbone.global_pool == "cls+mean" and self.config.pooled == "frozen":
            image = backbone.pool(image, backbone.visual_projection(tower.norm(main.x[:, 1:])))
        out = Trunk(image, main.local(self._weight()), main.taps, stem.grid)
        if not teacher:
            return out, None
        # without TSS there is nothing to average: the teacher's SAA counts in full
        with torch.no_grad(), _own_type(backbone, stem.x):
            guide = main if self.first == len(tower.blocks) else self.climb(backbone, stem, rest, alone=alone)
            return out, backbone.visual_projection(tower.norm(guide.local(1.0)))

    def _weight(self) -> float:
        """Weight of SAA and of TSS in the adapted layers: the mean of the two when both are on (Eq. 5)."""
        return 0.5 if self.config.combine == "mean" and self.tss and self.config.saa_layers != 0 else 1.0

    def climb(
        self, backbone: Backbone, streams: Streams, layers: range, *, prompts: bool = False, alone: bool = False
    ) -> Streams:
        """Run some layers on the main stream, collecting SAA and the inputs of TSS on the way. `alone`: of the tower's last layer,
        x has only the class token (B, 1, W)."""
        x, base, found, taps = streams.x, streams.base, streams.found, list(streams.taps)
        count = x.shape[1]
        for i in layers:
            block = cast(Block, backbone.vision.blocks[i])
            adapted, saa = i >= self.start, i >= self.saa_start
            if saa and base is None:
                base = x[:, 1:]
            if adapted and self.tss and self.config.tss_input == "before":
                taps.append(x[:, 1:])
            y = x
            if prompts and adapted:
                extra = self.visual_prompts[i - self.start].to(x.dtype)
                y = torch.cat([x, extra.expand(len(x), -1, -1)], dim=1)
            q, k, v = block.project(y)
            if saa:
                # values of the class token and the patches, not of the visual prompts; only patches are asked for
                seen = block.self_aware(v[:, :, :count], slice(1, None))
                if adapted:
                    found = seen if found is None else found + seen
                else:
                    assert base is not None
                    base = base + seen
            keep = 1 if alone and i + 1 == len(backbone.vision.blocks) else count  # prompts are dropped after the layer
            attended = F.scaled_dot_product_attention(q[:, :, :keep], k, v)
            x = block.feed(x[:, :keep], block.merge(attended))
            if adapted and self.tss and self.config.tss_input == "after":
                taps.append(x[:, 1:])
        return Streams(x, streams.grid, base, found, tuple(taps))

    def regions(self, backbone: Backbone, trunk: Trunk, labels: Tensor) -> Tensor:
        """Regions (B, M, D), not normalised, for labels (N, D): Eq. 5, then the frozen norm and projection."""
        local, weight = trunk.local, self._weight() * (1.0 if self.training else self.config.tss_share)
        for tss, tap in zip(self.tss, trunk.taps, strict=True):
            added = tss(tap, trunk.grid, labels)
            local = local + (added if weight == 1.0 else added * weight)
        return backbone.visual_projection(backbone.vision.norm(local))
