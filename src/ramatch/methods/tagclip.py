"""TagCLIP: patches are classified, refined by the tower's own attention, and each label's region is looked at again.

Yuqi Lin, Minghao Chen, Kaipeng Zhang, Hengjia Li, Mingming Li, Zheng Yang, Dongqin Lv, Binbin Lin, Haifeng Liu, Deng
Cai, "TagCLIP: A Local-to-Global Framework to Enhance Open-Vocabulary Multi-Label Classification of CLIP Without
Training", AAAI 2024.

The paper itself was not at hand, only its abstract and a reader's public digest of its equations. From these:

* coarse: softmax over labels of patches whose last self-attention is left out, P_coarse (M, N);
* DMAR: M_attn (i, j) where attention is above its layer's mean in more than K layers; P̂ = mean_l (M_attn ⊙ A_l)
  P_coarse; M_cls leaves out, label by label, patches with less than the mean of P̂; P_refined is P̂ with both masks;
* CWR: a label's region in P_refined is cropped to its box and resized; the original tower, with patches outside the
  region masked from attention, gives its class token's softmax, P_global; P_final = ½ max_i P_coarse + ½ P_global.

Decided here: a patch without self-attention has its own value in its place, and keeps residual and feed-forward of the
layer; A_l are means over heads, of all layers but the last, and K is half of them; the region is where P_refined,
scaled to [0, 1], reaches 0.5. Looking again costs a pass of the tower for each label, so only the `crops` likeliest are
looked at, and for all others P_global is the whole image's. The crop is cut from the pixels the tower saw, not from the
picture as it was.

Backbones of `ramatch align` (preset `aligned`: final patches as they are) keep their last self-attention, by which
their patches were aligned; of their global feature, class token and mean of patches, the mean is of the region's.
Cached features have neither attention nor pixels: it wants images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RamatchError
from ..modeling.backbone import Block
from ..modeling.ram import Labels, Streams, Trunk
from ..settings import Natural, Settings, Share
from .base import Method


@dataclass(frozen=True)
class TagCLIPSettings(Settings):
    """`votes`: share of the layers that must agree (K). `region`: where P_refined, from 0 to 1, makes a region.
    `crops`: labels of an image that are looked at again. `local`: share of the coarse score (λ)."""

    votes: Share = 0.5
    region: Share = 0.5
    crops: Natural = 8
    local: Share = 0.5


@dataclass(frozen=True)
class SeenTrunk(Trunk):
    """affinity: attention between patches where enough layers agree, (B, M, M). pixels: normalized, (B, 3, H, W)."""

    affinity: Tensor | None = None
    pixels: Tensor | None = None


def refine(coarse: Tensor, affinity: Tensor) -> Tensor:
    """DMAR: coarse (B, M, N), affinity (B, M, M) → (B, M, N)."""
    once = affinity @ coarse
    return affinity @ (coarse * (once >= once.mean(1, keepdim=True)))


def crop(pixels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The box of each image's mask (B, h, w), resized to the whole: pixels (B, 3, H, W), and the mask in it (B, h, w).
    Sizes do not depend on the masks, so nothing waits for them."""
    box = []
    for line in (mask.any(1), mask.any(2)):  # x, y: from the first place to the end of the last, in [0, 1]
        places = torch.arange(line.shape[1], device=mask.device)
        low = torch.where(line, places, line.shape[1]).amin(1, keepdim=True)
        high = torch.where(line, places + 1, 0).amax(1, keepdim=True)
        box.append((low / line.shape[1], high / line.shape[1]))

    def cut(image: Tensor, mode: str) -> Tensor:
        axes = []
        for (low, high), size in zip(box, image.shape[:1:-1], strict=True):
            steps = (torch.arange(size, device=image.device) + 0.5) / size
            # as if cut before it is resized: nothing beyond the box is mixed in
            axes.append((low + (high - low) * steps).clamp(low + 0.5 / size, high - 0.5 / size) * 2 - 1)
        x, y = axes
        grid = torch.stack([x[:, None].expand(-1, y.shape[1], -1), y[:, :, None].expand(-1, -1, x.shape[1])], -1)
        return F.grid_sample(image.float(), grid, mode=mode, align_corners=False)

    return cut(pixels, "bilinear").to(pixels.dtype), cut(mask[:, None].float(), "nearest")[:, 0] > 0.5


class TagCLIP(Method):
    name = "tagclip"
    settings_type = TagCLIPSettings
    settings: TagCLIPSettings
    learns = False
    needs_labels = False

    @torch.no_grad()
    def trunk(self, images: Tensor | Streams) -> SeenTrunk:
        if isinstance(images, Streams):
            raise RamatchError("method 'tagclip' looks at attention and pixels, which cached features do not have")
        whole = images.is_floating_point()
        pixels = images if whole else self.preprocess.normalize(images).to(self.backbone.dtype)
        tower, last = self.backbone.vision, len(self.backbone.vision.blocks) - 1
        x, first, grid = tower.embed(pixels), tower.config.prefix, tower.grid(*pixels.shape[-2:])
        m, rope = x.shape[1] - first, tower.rope(*grid)
        votes, total = (torch.zeros(len(x), m, m, device=x.device) for _ in range(2))
        local = x
        for i, block in enumerate(cast(list[Block], tower.blocks)):
            q, k, v = block.project(x, rope=rope)
            if i < max(last, 1):
                attention = (q @ k.mT * q.shape[-1] ** -0.5).float().softmax(-1).mean(1)[:, first:, first:]
                votes += attention > attention.mean((1, 2), keepdim=True)
                total += attention
            if i == last:
                local = block.feed(x, block.merge(v))
            x = block.feed(x, block.merge(F.scaled_dot_product_attention(q, k, v)))
        local = x if self.config.saa_layers == 0 else local
        count = max(last, 1)
        affinity = total / count * (votes > self.settings.votes * count)
        image = self.backbone.finish(x)[0] if self.config.pooled == "frozen" else self.backbone.project_image(x)
        return SeenTrunk(image, local[:, first:], (), grid, affinity, pixels)

    def look(self, trunk: Trunk, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        assert isinstance(trunk, SeenTrunk)
        assert trunk.affinity is not None
        coarse = self._softmax(regions, labels)
        refined, local, found = refine(coarse, trunk.affinity), coarse.amax(1), self._softmax(image, labels)
        chosen = local.topk(min(self.settings.crops, local.shape[1])).indices
        for label in chosen.unbind(1):
            again = self._again(trunk, refined.gather(2, label[:, None, None].expand(-1, refined.shape[1], 1))[..., 0])
            found = found.scatter(1, label[:, None], self._softmax(again.float(), labels).gather(1, label[:, None]))
        return torch.logit(torch.lerp(found, local, self.settings.local), 1e-6), refined, ()

    def _softmax(self, features: Tensor, labels: Labels) -> Tensor:
        return (self.similarity(features, labels)[..., : len(labels)] * self.backbone.logit_scale).softmax(-1)

    def _again(self, trunk: SeenTrunk, scores: Tensor) -> Tensor:
        """Global features (B, D) of the regions where scores (B, M) are large."""
        assert trunk.pixels is not None
        low, high = scores.amin(1, keepdim=True), scores.amax(1, keepdim=True)
        mask = (scores - low >= self.settings.region * (high - low)).unflatten(1, trunk.grid)
        pixels, mask = crop(trunk.pixels, mask)
        return self.encode_region(pixels, mask.flatten(1))

    def encode_region(self, pixels: Tensor, mask: Tensor) -> Tensor:
        """Global features (B, D) of normalized pixels (B, 3, H, W) whose other patches than those of a mask (B, M)
        nobody attends to."""
        tower = self.backbone.vision
        x, first, rope = tower.embed(pixels), tower.config.prefix, tower.rope(*tower.grid(*pixels.shape[-2:]))
        allowed = F.pad(mask, (first, 0), value=True)
        for block in tower.blocks:
            x = block(x, allowed[:, None, None], rope=rope)
        image = self.backbone.project_image(x, allowed)
        if self.backbone.global_pool != "cls+mean":
            return image
        share = mask / mask.sum(1, keepdim=True).clamp(min=1)
        return image + (self.backbone.project(x[:, first:]) * share[..., None].to(image.dtype)).sum(1)
