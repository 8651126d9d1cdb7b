"""Vision and text transformers with per-layer steps.

RAM needs the inside of every layer (value projections, inserted tokens), and `transformers` renames its modules between
releases, so the towers are our own; weights are read by their names on disk (see `_names.py`) and the outputs are tested
against `transformers`. One `Block` serves CLIP (pre-LN), DINOv2 (pre-LN with LayerScale) and BERT (post-LN).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels.ops import add_norm, layer_norm, quick_gelu


@dataclass(frozen=True)
class TowerConfig:
    """Shape of one transformer. `patch` > 0 makes it a vision tower, `vocab` > 0 a text tower."""

    width: int
    layers: int
    heads: int
    mlp: int
    act: str = "quick_gelu"  # quick_gelu | gelu | gelu_tanh
    eps: float = 1e-5
    norm: str = "pre"  # pre: CLIP, DINOv2; post: BERT
    layer_scale: bool = False
    # vision
    patch: int = 0
    image: int = 0  # side, in pixels, that the position embeddings were trained for
    patch_bias: bool = False
    stem_norm: bool = False  # CLIP's LayerNorm before the first layer
    # text
    vocab: int = 0
    context: int = 0
    causal: bool = False
    pool: str = "eot"  # eot: feature of the end token; mean: mean of the real tokens (BERT)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def _normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


class Block(nn.Module):
    """One transformer layer, in steps: `qkv` → `attend` → `feed`, or all of it with `forward`."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.heads, self.post = c.heads, c.norm == "post"
        self.ln1 = nn.LayerNorm(c.width, eps=c.eps)
        self.qkv = nn.Linear(c.width, 3 * c.width)
        self.out = nn.Linear(c.width, c.width)
        self.ln2 = nn.LayerNorm(c.width, eps=c.eps)
        self.fc1 = nn.Linear(c.width, c.mlp)
        self.fc2 = nn.Linear(c.mlp, c.width)
        self.act = ACTIVATIONS[c.act]
        self.scale1 = nn.Parameter(torch.ones(c.width)) if c.layer_scale else None
        self.scale2 = nn.Parameter(torch.ones(c.width)) if c.layer_scale else None

    def split(self, x: Tensor) -> Tensor:
        """(B, T, W) → (B, heads, T, W/heads)"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of x (B, T, W), each (B, heads, T, W/heads)."""
        q, k, v = self.qkv(x if self.post else _normed(x, self.ln1)).chunk(3, dim=-1)
        return self.split(q), self.split(k), self.split(v)

    def values(self, x: Tensor) -> Tensor:
        """Only the value projection of x: (B, heads, T, W/heads)."""
        w = self.qkv.weight.shape[1]
        x = x if self.post else _normed(x, self.ln1)
        return self.split(F.linear(x, self.qkv.weight[2 * w :], self.qkv.bias[2 * w :]))

    def merge(self, heads: Tensor, scaled: bool = True) -> Tensor:
        """Output projection of (B, heads, T, W/heads) → (B, T, W), with LayerScale where the tower has it."""
        y = self.out(heads.transpose(1, 2).flatten(2))
        return y * self.scale1 if scaled and self.scale1 is not None else y

    def self_aware(self, v: Tensor, queries: slice = slice(None)) -> Tensor:
        """SAA (Eq. 3): attention of the values with themselves, frozen output projection; `queries` picks rows."""
        return self.merge(F.scaled_dot_product_attention(v[:, :, queries], v, v))

    def feed(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual, feed-forward, residual: everything of the layer that comes after attention."""
        if self.post:
            x = add_norm(x, attended, self.ln1.weight, self.ln1.bias, self.ln1.eps)[1]
            return add_norm(x, self.fc2(self.act(self.fc1(x))), self.ln2.weight, self.ln2.bias, self.ln2.eps)[1]
        x, y = add_norm(x, attended, self.ln2.weight, self.ln2.bias, self.ln2.eps)
        y = self.fc2(self.act(self.fc1(y)))
        return x + (y * self.scale2 if self.scale2 is not None else y)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, causal: bool = False, places: Tensor | None = None
    ) -> Tensor:
        """x (B, T, W) → (B, T, W). `mask` is True where attention is allowed. With `places` (B,): of each sequence that one place
        only, (B, 1, W), which sees what `mask` says."""
        q, k, v = self.project(x)
        if places is not None:
            q = q.gather(2, places[:, None, None, None].expand(-1, q.shape[1], 1, q.shape[3]))
            x = x.gather(1, places[:, None, None].expand(-1, 1, x.shape[2]))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)
        return self.feed(x, self.merge(attended))


class VisionTower(nn.Module):
    """ViT whose layers can be run one at a time: `embed`, then `blocks[i]`, then `norm`."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.config = c
        side = c.image // c.patch
        self.patch = nn.Conv2d(3, c.width, c.patch, stride=c.patch, bias=c.patch_bias)
        self.cls = nn.Parameter(torch.zeros(c.width))
        self.positions = nn.Parameter(torch.zeros(1 + side * side, c.width))
        self.stem = nn.LayerNorm(c.width, eps=c.eps) if c.stem_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width, eps=c.eps)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of regions for an image of this size."""
        return height // self.config.patch, width // self.config.patch

    def grid_positions(self, h: int, w: int) -> Tensor:
        """Position embeddings for an h × w grid, (1 + h·w, W), bicubic when it is not the trained one."""
        side = self.config.image // self.config.patch
        if (h, w) == (side, side):
            return self.positions
        p = self.positions
        table = p[1:].float().T.reshape(1, -1, side, side)
        table = F.interpolate(table, size=(h, w), mode="bicubic", align_corners=False)
        return torch.cat([p[:1], table.flatten(2)[0].T.to(p.dtype)])

    def embed(self, pixels: Tensor) -> Tensor:
        """pixels (B, 3, height, width) → class token and patches (B, 1+M, W), ready for the first layer."""
        x = self.patch(pixels)
        h, w = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1) + self.grid_positions(h, w)
        return self.stem(x)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features after the final norm, (B, 1+M, W)."""
        x = self.embed(pixels)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class TextTower(nn.Module):
    """CLIP-type (causal, pre-LN, end-token) or BERT-type (bidirectional, post-LN, mean) text transformer."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.config = c
        self.tokens = nn.Embedding(c.vocab, c.width)
        self.positions = nn.Parameter(torch.zeros(c.context, c.width))
        self.types = nn.Parameter(torch.zeros(c.width)) if c.norm == "post" else None
        self.stem = nn.LayerNorm(c.width, eps=c.eps) if c.norm == "post" else nn.Identity()
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width, eps=c.eps) if c.norm == "pre" else nn.Identity()

    def embed(self, ids: Tensor, words: Tensor | None = None) -> Tensor:
        """ids (N, T) (or ready word embeddings `words` (N, T, W)) → input of the first layer (N, T, W)."""
        x = self.tokens(ids) if words is None else words
        x = x + self.positions[: x.shape[1]]
        if self.types is not None:
            x = x + self.types
        return self.stem(x)

    def mask(self, lengths: Tensor, size: int) -> Tensor | None:
        """Attention mask for sequences of `lengths` real tokens padded to `size`; None when plain causal does."""
        return None if self.config.causal else self.real(lengths, size)

    @staticmethod
    def real(lengths: Tensor, size: int) -> Tensor:
        """(N, 1, 1, size): which tokens are real."""
        return (torch.arange(size, device=lengths.device) < lengths[:, None])[:, None, None, :]

    def run(self, x: Tensor, lengths: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Layers start..stop-1 on x (N, T, W)."""
        mask = self.mask(lengths, x.shape[1])
        for block in self.blocks[start:stop]:
            x = block(x, mask, self.config.causal)
        return x

    def pool(self, x: Tensor, lengths: Tensor) -> Tensor:
        """One feature per sequence, (N, T, W) → (N, W); the end token is the last real one."""
        if self.config.pool == "mean":
            keep = (torch.arange(x.shape[1], device=x.device) < lengths[:, None]).to(x.dtype)[..., None]
            return (x * keep).sum(1) / keep.sum(1)
        return self.norm(x[torch.arange(len(x), device=x.device), lengths - 1])

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """ids (N, T) of which the first `lengths` (N,) are real → pooled features before the projection, (N, W)."""
        return self.pool(self.run(self.embed(ids), lengths), lengths)
