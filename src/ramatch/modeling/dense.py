"""Where labels are, finer and steadier than the cosines of the tower's regions. Nothing is trained.

A second look at more pixels is averaged with the first; what a typical region has in common with every label is taken
off; and each region gets the mean of the regions that look like it (`correspond`), so that outliers, which
resemble nothing around them, go down and an object is marked as a whole. What is left is asked against words for
surroundings (SURROUNDINGS), which stand for everything that is not among the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ..settings import Bound, Settings, Share
from .graph import GraphedRAM
from .ram import RAM, Labels, Trunk

SURROUNDINGS = tuple(
    """sky, blue sky, cloud, grass, field, lawn, street, road, sidewalk, snow, tree, bush, forest, beach, sand,
    mountain, hill, rock, cliff, ocean, wave, lake, river, water, wall, floor, ceiling, carpet, building, house,
    fence, window, door, curtain, dirt, ground, bridge, park, leaf, sun, shadow, night, pavement, brick wall,
    tile, rug, blanket, bed, shelf, cabinet, kitchen, bathroom, living room, room, stone, gravel, hay, sign,
    pole, box, paper, cloth, picture frame, mirror, lamp""".replace("\n   ", "").split(", ")
)


@dataclass(frozen=True)
class DenseConfig(Settings):
    """How maps are made; chosen on half of VOC's images (docs/segmentation.md).

    finer: sides of the second look, as a multiple of the tower's own (1: no second look).
    typical: how much of what a typical region has in common with a label is taken off.
    sharpness, reach: region j speaks for region i with weight softmax_j(sharpness · (cos_ij − reach · mean cosine)),
    where that is positive; a sharpness of 0 lets each speak for itself.
    whole: how much of a label's largest value is taken off its map, so that labels meet as equals.
    """

    finer: Annotated[float, Bound(1, 4)] = 1.21
    typical: Share = 1.0
    sharpness: Annotated[float, Bound(0)] = 15.0
    reach: Annotated[float, Bound(0)] = 1.2
    whole: Share = 0.4


@dataclass(frozen=True)
class DenseScores:
    """Of B images: scores (B, h, w, N) of labels; rest (B, h, w) of what surrounds them, None where there are no words
    for that; alike (B, M, M): for each region the weights of those that look like it."""

    scores: Tensor
    rest: Tensor | None
    alike: Tensor


class DenseMaps:
    """Maps of one model. Threads may share one.

    >>> maps = DenseMaps(ram, engine, photos)
    >>> maps(trunk, maps.pixels(pictures), labels).scores
    """

    def __init__(
        self, ram: RAM, engine: GraphedRAM, photos: Sequence[Tensor], config: DenseConfig | None = None
    ) -> None:
        """`photos`: uint8 (3, H, W) of ordinary pictures: their regions' mean is the typical region."""
        self.ram, self.engine, self.config = ram, engine, config or DenseConfig()
        height, width = ram.preprocess.size
        patch = ram.backbone.vision.config.patch
        tall, wide = (max(1, round(side * self.config.finer / patch)) * patch for side in (height, width))
        self.preprocess = replace(ram.preprocess, size=(tall, wide))
        self.surroundings: Labels | None = None
        if ram.backbone.text is not None:
            self.surroundings = ram.encode_labels(SURROUNDINGS)
        self.typical = self._typical(photos)

    def pixels(self, pictures: Sequence[Image.Image]) -> Tensor:
        """What the second look sees, uint8 (B, 3, H, W)."""
        return torch.stack([self.preprocess.resize(picture) for picture in pictures])

    @torch.no_grad()
    def __call__(self, trunk: Trunk, pixels: Tensor, labels: Labels) -> DenseScores:
        """`trunk` of the images as they are tagged, and their finer `pixels`."""
        ram, config = self.engine.ram, self.config
        coarse = self._regions(trunk, labels)
        if config.finer > 1:
            finer = ram.trunk(pixels.to(ram.backbone.device))
            regions = self._regions(finer, labels)
            regions = F.normalize(regions + resized(coarse, trunk.grid, finer.grid), dim=-1)
        else:
            finer, regions = trunk, coarse
        alike = correspond(finer.local, config)
        regions = alike @ (regions - config.typical * self.typical)
        scores = self._against(regions, labels.directions[: len(labels)]).unflatten(1, finer.grid)
        if self.surroundings is None:
            return DenseScores(scores, None, alike)
        asked = {name.lower() for name in labels.names}
        others = [i for i, name in enumerate(self.surroundings.names) if name not in asked]
        if not others:
            return DenseScores(scores, None, alike)
        rest = self._against(regions, self.surroundings.directions[others]).amax(-1)
        return DenseScores(scores, rest.unflatten(1, finer.grid), alike)

    def _regions(self, trunk: Trunk, labels: Labels) -> Tensor:
        """Unit regions (B, M, D) in float32."""
        ram = self.engine.ram
        found = ram.region_set.regions(ram.backbone, trunk, labels.tss, ram.workspace_mb)
        return F.normalize(found.float(), dim=-1)

    def _against(self, regions: Tensor, directions: Tensor) -> Tensor:
        """(B, M, N), each label's values less a part of its largest."""
        found = regions @ directions.float().T
        return found - self.config.whole * found.amax(1, keepdim=True)

    @torch.no_grad()
    def _typical(self, photos: Sequence[Tensor]) -> Tensor:
        """(D,): the mean region."""
        labels = self.surroundings or self.ram.encode_labels(tuple(self.ram.backbone.given_labels))
        trunk = self.engine.ram.trunk(torch.stack(list(photos)).to(labels.unit.device))
        return self._regions(trunk, labels).mean((0, 1))


def correspond(local: Tensor, config: DenseConfig) -> Tensor:
    """(B, M, M): for each region the weights of those that look like it, by the tower's own features (B, M, W)."""
    local = F.normalize(F.layer_norm(local.float(), local.shape[-1:]), dim=-1)
    alike = local @ local.transpose(1, 2)
    if config.sharpness == 0:
        return torch.eye(alike.shape[1], device=alike.device).expand_as(alike)
    alike = alike - config.reach * alike.mean((1, 2), keepdim=True)
    own = torch.eye(alike.shape[1], dtype=torch.bool, device=alike.device)
    return (config.sharpness * alike).masked_fill((alike < 0) & ~own, -torch.inf).softmax(-1)


def resized(regions: Tensor, grid: tuple[int, int], to: tuple[int, int]) -> Tensor:
    """Regions (B, M, D) of one grid on another."""
    image = regions.transpose(1, 2).unflatten(2, grid)
    return F.interpolate(image, size=to, mode="bilinear", align_corners=False).flatten(2).transpose(1, 2)
