"""Vision and text transformers, one for every family, by the fields of `TowerConfig`.

RAM needs the inside of every layer (value projections, inserted tokens), and `transformers` renames its modules between
releases, so the towers are our own; weights are read by their names on disk (`checkpoints/`) and the outputs are tested
against `transformers`, open_clip and timm. One `Block` serves CLIP and SigLIP (pre-LN), DINOv2 and DINOv3 (pre-LN with
LayerScale), EVA02 (SwiGLU, more norms) and BERT (post-LN). Which families can be read: docs/backbones.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels.ops import add_norm, layer_norm, quick_gelu
from .vision_parts import AttentionPool, Rope, Stem


@dataclass(frozen=True)
class TowerConfig:
    """Shape of one transformer. `patch` > 0 makes it a vision tower, `vocab` > 0 a text tower."""

    width: int
    layers: int
    heads: int
    mlp: int
    act: str = "quick_gelu"  # quick_gelu | gelu | gelu_tanh | silu
    eps: float = 1e-5
    norm: str = "pre"  # pre: CLIP, DINOv2; post: BERT
    layer_scale: bool = False
    gated: bool = False  # feed-forward of act(gate) · value: SwiGLU
    sub_norm: bool = False  # EVA02: LayerNorm before both output products of a layer too
    head_bias: bool = False  # of the projection into the joint space
    # vision
    patch: int = 0
    image: int = 0  # side, in pixels, that the position embeddings were trained for
    patch_bias: bool = False
    stem_norm: bool = False  # CLIP's LayerNorm before the first layer
    conv_stem: bool = False  # MobileCLIP
    class_token: bool = True
    registers: int = 0  # tokens between class token and patches, that nobody reads
    learned_positions: bool = True
    resample: str = "bicubic"  # of position embeddings for another size: one of RESAMPLINGS
    rope_base: float = 0.0  # of the frequencies of rotary positions (see `Rope`); 0: none
    rope_span: float = 0.0
    rope_start: float = 0.0
    rope_zero: float = 0.0
    pool_heads: int = 0  # attention pooling in place of the class token; 0: none
    pool_mlp: int = 0
    # text
    vocab: int = 0
    context: int = 0
    causal: bool = False
    pool: str = "eot"  # eot: feature of the end token; last: of the last place (SigLIP); mean: of real tokens (BERT)
    pad: int = -1  # every text is filled with this token up to `context`, and padding is read too; -1: neither
    head_hidden: int = 0  # open_clip's XLM-R: width of a projection's hidden layer

    @property
    def prefix(self) -> int:
        """Tokens of a vision tower before the patches."""
        return self.class_token + self.registers

    @property
    def opening(self) -> int:
        """Tokens of a text tower before the words: one, but SigLIP has none."""
        return 0 if self.pool == "last" else 1


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": quick_gelu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
RESAMPLINGS: dict[str, dict[str, Any]] = {
    "bicubic": {"mode": "bicubic"},
    "bicubic, smoothed": {"mode": "bicubic", "antialias": True},  # timm, and transformers for DINOv2 with registers
    "bilinear, smoothed": {"mode": "bilinear", "antialias": True},  # SigLIP 2 NaFlex
}


def _normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


def drawn(*shape: int) -> Tensor:
    """Normal random numbers; on the meta device none, where drawing would first load torch's compiler and sympy for a
    third of a second."""
    numbers = torch.empty(shape)
    return numbers if numbers.is_meta else numbers.normal_()


class Block(nn.Module):
    """One transformer layer, in steps: `project` → attention → `merge` → `feed`, or all of it with `forward`."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.heads, self.post = c.heads, c.norm == "post"
        self.ln1 = nn.LayerNorm(c.width, eps=c.eps)
        self.qkv = nn.Linear(c.width, 3 * c.width)
        self.out = nn.Linear(c.width, c.width)
        self.ln2 = nn.LayerNorm(c.width, eps=c.eps)
        self.gated = c.gated
        self.fc1 = nn.Linear(c.width, 2 * c.mlp if c.gated else c.mlp)  # gated: gate, then value
        self.fc2 = nn.Linear(c.mlp, c.width)
        self.act = ACTIVATIONS[c.act]
        self.norm_out = nn.LayerNorm(c.width, eps=c.eps) if c.sub_norm else None
        self.norm_fc2 = nn.LayerNorm(c.mlp, eps=c.eps) if c.sub_norm else None
        self.scale1 = nn.Parameter(torch.ones(c.width)) if c.layer_scale else None
        self.scale2 = nn.Parameter(torch.ones(c.width)) if c.layer_scale else None

    def split(self, x: Tensor) -> Tensor:
        """(B, T, W) → (B, heads, T, W/heads)"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def project(self, x: Tensor, queries: int | None = None, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of x (B, T, W), each (B, heads, T, W/heads); queries of the first so many tokens."""
        x = x if self.post else _normed(x, self.ln1)
        if queries is None:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:
            width, weight, bias = x.shape[-1], self.qkv.weight, self.qkv.bias
            q = F.linear(x[:, :queries], weight[:width], bias[:width])
            k, v = F.linear(x, weight[width:], bias[width:]).chunk(2, dim=-1)
        q, k, v = self.split(q), self.split(k), self.split(v)
        return (q, k, v) if rope is None else (rope.turn(q), rope.turn(k), v)

    def merge(self, heads: Tensor) -> Tensor:
        """Output projection of (B, heads, T, W/heads) → (B, T, W), with LayerScale where the tower has it."""
        y = heads.transpose(1, 2).flatten(2)
        y = self.out(y if self.norm_out is None else _normed(y, self.norm_out))
        return y if self.scale1 is None else y * self.scale1

    def self_aware(self, v: Tensor, queries: slice = slice(None)) -> Tensor:
        """SAA (Eq. 3): attention of the values with themselves, frozen output projection; `queries` picks rows."""
        return self.merge(F.scaled_dot_product_attention(v[:, :, queries], v, v))

    def feed_forward(self, x: Tensor) -> Tensor:
        y = self.fc1(x)
        if self.gated:
            gate, value = y.chunk(2, dim=-1)
            y = self.act(gate) * value
        else:
            y = self.act(y)
        return self.fc2(y if self.norm_fc2 is None else _normed(y, self.norm_fc2))

    def feed(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual, feed-forward, residual: everything of the layer that comes after attention."""
        if self.post:
            x = add_norm(x, attended, self.ln1.weight, self.ln1.bias, self.ln1.eps)[1]
            return add_norm(x, self.feed_forward(x), self.ln2.weight, self.ln2.bias, self.ln2.eps)[1]
        x, y = add_norm(x, attended, self.ln2.weight, self.ln2.bias, self.ln2.eps)
        y = self.feed_forward(y)
        return x + (y * self.scale2 if self.scale2 is not None else y)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        places: Tensor | None = None,
        rope: Rope | None = None,
    ) -> Tensor:
        """x (B, T, W) → (B, T, W). `mask` is True where attention is allowed. With `places` (B,): of each sequence that
        one place only, (B, 1, W), which sees what `mask` says."""
        q, k, v = self.project(x, rope=rope)
        if places is not None:
            q = q.gather(2, places[:, None, None, None].expand(-1, q.shape[1], 1, q.shape[3]))
            x = x.gather(1, places[:, None, None].expand(-1, 1, x.shape[2]))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)
        return self.feed(x, self.merge(attended))


class VisionTower(nn.Module):
    """ViT whose layers can be run one at a time: `embed`, then `blocks[i]`, then `norm`. Its tokens are the class token
    if it has one, registers, patches; where there is attention pooling (`pool`), that makes the global feature."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.config, self.resampling = c, RESAMPLINGS[c.resample]
        side, size, width = c.image // c.patch, c.patch, c.width
        self.deeper = None
        if c.conv_stem:
            self.deeper, size, width = Stem(c.width), Stem.FIRST, c.width // 4
        self.patch = nn.Conv2d(3, width, size, stride=size, bias=c.patch_bias)
        self.cls = nn.Parameter(torch.zeros(c.width)) if c.class_token else None
        self.registers = nn.Parameter(torch.zeros(c.registers, c.width)) if c.registers else None
        self.positions = nn.Parameter(torch.zeros(c.class_token + side**2, c.width)) if c.learned_positions else None
        self.stem = nn.LayerNorm(c.width, eps=c.eps) if c.stem_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width, eps=c.eps)
        self.pool = None
        if c.pool_heads:
            self.pool = AttentionPool(c.width, c.pool_heads, c.pool_mlp, c.eps, ACTIVATIONS[c.act])
        self.offset: float | None = None  # of uint8 pixels

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of regions for an image of this size."""
        return height // self.config.patch, width // self.config.patch

    def grid_positions(self, h: int, w: int) -> Tensor | None:
        """Position embeddings of class token and an h × w grid, interpolated when it is not the trained one."""
        side, first = self.config.image // self.config.patch, int(self.config.class_token)
        if self.positions is None or (h, w) == (side, side):
            return self.positions
        p = self.positions
        table = p[first:].float().T.reshape(1, -1, side, side)
        table = F.interpolate(table, size=(h, w), align_corners=False, **self.resampling)
        return torch.cat([p[:first], table.flatten(2)[0].T.to(p.dtype)])

    def rope(self, h: int, w: int) -> Rope | None:
        """Rotary positions of an h × w grid, where the tower has them."""
        c = self.config
        if not c.rope_base:
            return None
        count = c.width // c.heads // 4
        frequencies = c.rope_base ** -(torch.arange(count, device=self.patch.weight.device) / count)
        places = {"span": c.rope_span, "start": c.rope_start, "zero": c.rope_zero}
        return Rope.of_grid((h, w), frequencies, first=c.prefix, **places)

    def embed(self, pixels: Tensor) -> Tensor:
        """pixels (B, 3, height, width) → tokens (B, prefix+M, W), ready for the first layer. Normalized pixels; uint8
        ones, less `offset`, if normalization is part of the patch embedding (see `fuse`)."""
        h, w = self.grid(*pixels.shape[-2:])
        x = self._patches(pixels, h, w)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(x.shape[0], 1, -1), x], dim=1)
        if (positions := self.grid_positions(h, w)) is not None:
            x = x + positions
        if self.registers is not None:
            first = int(self.config.class_token)
            x = torch.cat([x[:, :first], self.registers.expand(len(x), -1, -1), x[:, first:]], dim=1)
        return _normed(x, self.stem) if isinstance(self.stem, nn.LayerNorm) else x

    def _patches(self, pixels: Tensor, h: int, w: int) -> Tensor:
        """pixels (B, 3, height, width) → patches (B, h·w, W)"""
        steps = self.config.patch // self.patch.kernel_size[0]  # of the first convolution, in a patch
        if self.offset is not None:
            x = self._embed_bytes(pixels, self.offset, h * steps, w * steps)
        else:
            size = self.config.patch
            x = self.patch(pixels[..., : h * size, : w * size]).flatten(2).transpose(1, 2)
        if self.deeper is None:
            return x
        return self.deeper(x.transpose(1, 2).unflatten(2, (h * steps, w * steps))).flatten(2).transpose(1, 2)

    def _embed_bytes(self, pixels: Tensor, offset: float, h: int, w: int) -> Tensor:
        """uint8 (B, 3, height, width) → h·w steps of the first convolution; one that does not overlap is one
        product."""
        b, p, weight = len(pixels), self.patch.kernel_size[0], self.patch.weight
        tiles = pixels[:, :, : h * p, : w * p].reshape(b, 3, h, p, w, p).permute(0, 2, 4, 1, 3, 5)
        # what is left of a byte is exact even in bfloat16
        flat = torch.empty(tiles.shape, dtype=weight.dtype, device=pixels.device)
        torch.sub(tiles, offset, out=flat)
        return F.linear(flat.view(b, h * w, -1), weight.flatten(1), self.patch.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features before the final norm, (B, prefix+M, W)."""
        x, rope = self.embed(pixels), self.rope(*self.grid(*pixels.shape[-2:]))
        for block in self.blocks:
            x = block(x, rope=rope)
        return x


class TextTower(nn.Module):
    """CLIP-type (causal, pre-LN, end-token), BERT-type (bidirectional, post-LN, mean) or SigLIP-type (bidirectional,
    pre-LN, last token of a text that is filled up) text transformer."""

    def __init__(self, c: TowerConfig) -> None:
        super().__init__()
        self.config = c
        self.tokens = nn.Embedding.from_pretrained(drawn(c.vocab, c.width), freeze=False)  # its own way draws on meta
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
        return None if self.config.causal else self.visible(lengths, size)

    def visible(self, lengths: Tensor, size: int) -> Tensor:
        """(N, 1, 1, size): which tokens a text's last one may look at; padding where the tower reads it."""
        lengths = lengths if self.config.pad < 0 else torch.full_like(lengths, size)
        return (torch.arange(size, device=lengths.device) < lengths[:, None])[:, None, None, :]

    def run(self, x: Tensor, lengths: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Layers start..stop-1 on x (N, T, W)."""
        mask = self.mask(lengths, x.shape[1])
        for block in self.blocks[start:stop]:
            x = block(x, mask, self.config.causal)
        return x

    def pool(self, x: Tensor, lengths: Tensor) -> Tensor:
        """One feature per sequence, (N, T, W) → (N, W)."""
        if self.config.pool == "mean":
            keep = (torch.arange(x.shape[1], device=x.device) < lengths[:, None]).to(x.dtype)[..., None]
            return (x * keep).sum(1) / keep.sum(1)
        return self.norm(x[torch.arange(len(x), device=x.device), self.places(lengths, x.shape[1])])

    def places(self, lengths: Tensor, size: int) -> Tensor:
        """(N,): where the feature of a sequence is: at its end token, the last real one, or at the last place."""
        return torch.full_like(lengths, size - 1) if self.config.pool == "last" else lengths - 1

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """ids (N, T) of which the first `lengths` (N,) are real → pooled features before the projection, (N, W)."""
        return self.pool(self.run(self.embed(ids), lengths), lengths)
