"""The computation behind `FastRAM`, step by step and without graphs; see `fast.py` for what is different from RAM's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RamatchError
from ..ot import match_scores
from ._folded import CENTRE, Affine, Keys, Select, fold_block, fold_keys, fold_norm, fold_patches, fold_tss
from .kernels.ops import layer_norm
from .matching import match
from .ram import RAM, Labels

FUSED = ("kcot", "ot")  # matchers that `match_scores` computes
attention = F.scaled_dot_product_attention


def _wave(device: torch.device, dim: int) -> int:
    """Rows of a product with `dim` columns that give every processor of the GPU one tile of 128 × 256: a product of a few waves
    and a bit takes as long as one of another whole wave."""
    if device.type != "cuda":
        return 1
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count * 128 * 256 // dim)


@dataclass(frozen=True)
class FastTrunk:
    """What of B images no vocabulary changes: global feature (B, D) float32; local stream without TSS (B, M, W); the two
    streams of each adapted layer after their activation, (2, B, M, D); rows and columns of the grid."""

    image: Tensor
    local: Tensor
    streams: tuple[Tensor, ...]
    grid: tuple[int, int]

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, rows: slice) -> FastTrunk:
        return FastTrunk(self.image[rows], self.local[rows], tuple(s[:, rows] for s in self.streams), self.grid)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.image, self.local, *self.streams)

    def clone(self) -> FastTrunk:
        image, local, *streams = (t.clone() for t in self.tensors)
        return FastTrunk(image, local, tuple(streams), self.grid)

    @staticmethod
    def cat(parts: list[FastTrunk]) -> FastTrunk:
        streams = tuple(torch.cat(s, dim=1) for s in zip(*(p.streams for p in parts), strict=True))
        return FastTrunk(
            torch.cat([p.image for p in parts]), torch.cat([p.local for p in parts]), streams, parts[0].grid
        )


@dataclass(frozen=True)
class FastOutput:
    """Scores by the model's rule, s_R and s_G, (B, N) float32 each; each label's best region (B, N) if asked for."""

    scores: Tensor
    region: Tensor
    image: Tensor
    best: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> FastOutput:
        best = None if self.best is None else function(self.best)
        return FastOutput(function(self.scores), function(self.region), function(self.image), best)


@dataclass(frozen=True)
class Vocabulary:
    """Labels made ready: names of the n asked for; features (N, D) of all that are matched, for regions and (float32) for
    images; keys for each TSS."""

    names: tuple[str, ...]
    units: Tensor
    units32: Tensor
    keys: tuple[Keys, ...]

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.names), len(self.units)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.units, self.units32, *(t for k in self.keys for t in k.tensors()))


class FastPath:
    """Folded weights of one RAM and the eager passes over them."""

    def __init__(
        self, ram: RAM, dtype: torch.dtype, fine: torch.dtype, workspace_mb: int, tol: float, best: bool, fused: bool
    ) -> None:
        own, regions, c = ram.backbone, ram.region_set, ram.config
        tower = own.vision
        if any(block.post for block in tower.blocks):
            raise RamatchError("FastRAM: the vision tower has post-LN layers, which only RAM itself runs")
        self.ram, self.config, self.device = ram, c, own.device
        self.dtype, self.fine, self.workspace_mb, self.tol = dtype, fine, workspace_mb, tol
        self.fused, self.best = fused and c.matcher in FUSED, best or c.max_weight > 0 or c.best_share > 0
        self.side = tower.config.patch
        self.patch = fold_patches(tower, ram.preprocess, dtype)
        self.stem = fold_norm(tower.stem, dtype) if isinstance(tower.stem, torch.nn.LayerNorm) else None
        self.layers = [fold_block(block, dtype) for block in tower.blocks]
        self.norm, self.norm32 = fold_norm(tower.norm, fine), fold_norm(tower.norm, torch.float32)
        weight = own.visual_projection.weight.detach()
        self.projection, self.projection32 = Affine(weight.to(fine), None), Affine(weight.float(), None)
        self.selects = [fold_tss(tss, fine) for tss in regions.tss]
        self.prompts = [p.detach().to(dtype, copy=True) for p in regions.visual_prompts]
        self.start, self.saa_start = regions.start, regions.saa_start
        pools = own.global_pool == "cls+mean"
        self.mean_frozen, self.mean_adapted = pools and c.pooled == "frozen", pools and c.pooled == "adapted"
        both = c.combine == "mean" and len(regions.tss) > 0 and c.saa_layers != 0
        self.weight = 0.5 if both else 1.0  # of SAA and TSS in the adapted layers (Eq. 5)
        self.tss_share = c.tss_share
        # SAA's output projections accumulate in place and without their biases, which add up to one constant
        shares = [self._share(i) * layer.out.bias.float() for i, layer in enumerate(self.layers) if i >= self.saa_start]  # type: ignore[union-attr]
        self.saa_bias = torch.stack(shares).sum(0).to(dtype) if shares else None
        # without these, nobody reads the last layer's patches, and its class token is all it needs to compute
        self.whole = self.mean_frozen or c.saa_layers == 0 or (bool(self.selects) and c.tss_input == "after")
        self.wave = _wave(own.device, own.dim)
        self._positions: dict[tuple[int, int], Tensor] = {}

    def _share(self, i: int) -> float:
        return self.weight if i >= self.start else 1.0

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """Position embeddings (1 + M, W) with the class token added to the first; made once per grid."""
        if grid not in self._positions:
            tower = self.ram.backbone.vision
            table = tower.grid_positions(*grid).float().clone()
            table[0] += tower.cls.float()
            self._positions[grid] = table.to(self.dtype)
        return self._positions[grid]

    def grid(self, images: Tensor) -> tuple[int, int]:
        return images.shape[2] // self.side, images.shape[3] // self.side

    def vocabulary(self, labels: Labels) -> Vocabulary:
        # a copy: `set_labels` writes the next vocabulary over it, and the caller's labels are the caller's
        unit = labels.unit.detach().to(self.device, torch.float32, copy=True)
        if labels.negative is not None:  # cos(x, positive) − cos(x, negative) is one product with the difference
            unit = unit - labels.negative.detach().to(self.device).float()
        tss = labels.tss.detach().to(self.device)
        keys = tuple(fold_keys(select, tss, self.fine) for select in self.selects)
        return Vocabulary(labels.names, unit.to(self.fine), unit, keys)

    # ---------------------------------------------------------------------------------------------- recover

    def embed(self, images: Tensor) -> Tensor:
        """uint8 (B, 3, H, W) → input of the first layer (B, 1+M, W)."""
        b, p, (h, w) = len(images), self.side, self.grid(images)
        tiles = images[:, :, : h * p, : w * p].reshape(b, 3, h, p, w, p).permute(0, 2, 4, 1, 3, 5)
        flat = torch.empty(tiles.shape, dtype=self.dtype, device=self.device)
        torch.sub(tiles, CENTRE, out=flat)
        positions = self.positions((h, w))
        x = flat.new_empty(b, 1 + h * w, positions.shape[1])
        x[:, 0] = positions[0]
        torch.add(self.patch(flat.view(b, h * w, -1)), positions[1:], out=x[:, 1:])
        return x if self.stem is None else self.stem(x)

    def trunk(self, images: Tensor) -> FastTrunk:
        """uint8 (B, 3, H, W) on the device → `FastTrunk`."""
        grid, x = self.grid(images), self.embed(images)
        t, width = x.shape[1:]
        local: Tensor | None = None
        streams: list[Tensor] = []
        before = self.config.tss_input == "before"
        padded = x if self.start else self._with_prompts(x, 0)
        for i, layer in enumerate(self.layers):
            adapted, alone = i >= self.start, i + 1 == len(self.layers) and not self.whole
            if self.saa_bias is not None and i == self.saa_start:
                local = x[:, 1:] + self.saa_bias
            if adapted and self.selects and before:
                streams.append(self.selects[i - self.start].streams(self._patches(x), grid))
            y = layer.ln1(padded)
            if alone:
                q, (k, v) = layer.query(y[:, :1]), layer.key_value(y)
            else:
                q, k, v = layer.split(layer.qkv(y), 3)
            if local is not None:
                values = v[:, :, :t]  # of the class token and the patches, not of the visual prompts
                seen = attention(values[:, :, 1:], values, values).transpose(1, 2).reshape(-1, width)
                local.view(-1, width).addmm_(seen, layer.out.weight.T, alpha=self._share(i))
            attended = attention(q[:, :, :t], k, v)
            room = self._room(x, i + 1)
            x = layer.feed(x[:, :1] if alone else x, attended, None if room is None else room[:, :t])
            padded = x if room is None else room
            if adapted and self.selects and not before:
                streams.append(self.selects[i - self.start].streams(self._patches(x), grid))
        image = self.projection32(self.norm32(x[:, 0].float()))
        if self.mean_frozen:  # the mean of projections is the projection of the mean
            image = image + self.projection32(self.norm32(x[:, 1:].float()).mean(1))
        local = x[:, 1:] if local is None else local
        return FastTrunk(image, local.to(self.fine).contiguous(), tuple(streams), grid)

    def _patches(self, x: Tensor) -> Tensor:
        """Patches of (B, 1+M, W), contiguous and in the finer type, in one copy."""
        b, t, width = x.shape
        return torch.empty(b, t - 1, width, dtype=self.fine, device=x.device).copy_(x[:, 1:])

    def _with_prompts(self, x: Tensor, i: int) -> Tensor:
        if not self.prompts:
            return x
        return torch.cat([x, self.prompts[i - self.start].expand(len(x), -1, -1)], dim=1)

    def _room(self, x: Tensor, i: int) -> Tensor | None:
        """For the input of layer i: a tensor that has its visual prompts already, so that nothing is copied to join them."""
        if not self.prompts or not self.start <= i < len(self.layers):
            return None
        prompts = self.prompts[i - self.start]
        b, t, width = x.shape
        room = x.new_empty(b, t + len(prompts), width)
        room[:, t:] = prompts
        return room

    def regions(self, trunk: FastTrunk, vocabulary: Vocabulary) -> Tensor:
        """Regions (B, M, D), not normalised: Eq. 5, then the frozen norm and projection."""
        local = trunk.local.flatten(0, 1)
        for select, keys, streams in zip(self.selects, vocabulary.keys, trunk.streams, strict=True):
            chosen = self.select(select, keys, streams.flatten(1, 2), trunk.grid)
            local = torch.addmm(local, chosen, select.back, alpha=self.weight * self.tss_share)
        return self.projection(self.norm(local)).view(*trunk.local.shape[:2], -1)

    def select(self, select: Select, keys: Keys, streams: Tensor, grid: tuple[int, int]) -> Tensor:
        """What TSS lets through of streams (2, B·M, D), before the way back: (B·M, D)."""
        queries = layer_norm(streams, None, None, select.norms[0].eps)
        rows = streams.shape[1]
        # attention logits, which become the weights in place, are all that grows with the vocabulary here
        step = max(1, (self.workspace_mb << 20) // (keys.values.shape[0] * queries.element_size()))
        if rows > step > self.wave:
            step -= step % self.wave
        looked = torch.empty_like(streams)
        for stream, query, key, bias, out in zip(streams, queries, keys.keys, keys.biases, looked, strict=True):
            for a in range(0, rows, step):
                part = slice(a, a + step)
                weights = torch.addmm(bias, query[part], key)
                torch.softmax(weights, dim=-1, out=weights)
                torch.addmm(stream[part], weights, keys.values, out=out[part])
                del weights  # before the next ones are made
        mean, top = looked.mean(-1, dtype=torch.float32).mean(0), looked.amax(-1).amax(0).float()
        pooled = torch.stack([mean.view(-1, *grid), top.view(-1, *grid)], dim=1)
        masks = F.conv2d(pooled, select.mask, padding=select.mask.shape[-1] // 2, groups=select.groups).sigmoid()
        masks = masks.transpose(0, 1).reshape(2, rows, 1).to(looked.dtype)
        return (looked[0] * masks[0]).addcmul_(looked[1], masks[1])

    # ---------------------------------------------------------------------------------------------- match

    def recognise(self, trunk: FastTrunk, vocabulary: Vocabulary) -> FastOutput:
        """Regions, matching and scores (Eq. 13)."""
        n = len(vocabulary.names)
        regions = self.regions(trunk, vocabulary)
        image = trunk.image + regions.mean(1, dtype=torch.float32) if self.mean_adapted else trunk.image
        image = (F.normalize(image, dim=-1) @ vocabulary.units32.T)[:, :n]
        region, best = self.match(regions, vocabulary.units)
        region, best = region[:, :n], None if best is None else best[:, :n]
        if self.config.max_weight:
            assert best is not None
            region = torch.lerp(region, best, self.config.max_weight)
        if self.config.plan_scale == "one":
            region = region / len(vocabulary.units)
        found = FastOutput(region, region, image, best)
        return replace(found, scores=self.ram.score(found))

    def match(self, regions: Tensor, units: Tensor) -> tuple[Tensor, Tensor | None]:
        """s_R (B, N) of regions (B, M, D), for a plan scaled by N, and each label's best region (B, N) if wanted."""
        regions = F.normalize(regions, dim=-1)
        if self.fused and not self.best:
            return self._fused(regions=regions, labels=units), None
        # similarities of as many images at a time as the workspace allows (with cost, plan and temporaries)
        size = max(1, (self.workspace_mb << 20) // (24 * regions.shape[1] * len(units)))
        region, best = [], []
        for part in regions.split(size):
            sim = part @ units.T
            best.append(sim.amax(1).float())
            if self.fused:
                region.append(self._fused(sim))
            else:
                sim = sim.float()
                plan = match(sim, self.ram.backbone.logit_scale, self.config).plan
                region.append((plan * sim).sum(1) * len(units))
        return torch.cat(region), torch.cat(best)

    def _fused(self, sim: Tensor | None = None, **sets: Any) -> Tensor:
        c, scale = self.config, self.ram.backbone.logit_scale
        uniform = c.matcher == "ot" or not c.lpd
        return match_scores(
            sim, **sets, logit_scale=scale, tau_u=None if uniform else c.tau_u or 1 / scale, eps=c.lambda1,
            max_iter=c.max_iter, tol=self.tol, workspace_mb=self.workspace_mb,
        ).scores  # fmt: skip
