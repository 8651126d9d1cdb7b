"""A frozen dual encoder: vision tower, text tower, two projections, tokenizer, preprocessing.

RAM needs the inside of every layer (value projections, inserted tokens), and `transformers` renames its modules between
releases, so the towers are our own; weights are read by their names on disk (`checkpoints/`) and the outputs are tested
against `transformers`. One `Block` serves CLIP (pre-LN), DINOv2 (pre-LN with LayerScale) and BERT (post-LN).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import RamatchError
from .checkpoints.tokenizer import Tokenizer
from .kernels.ops import add_norm, layer_norm, quick_gelu
from .preprocess import Preprocess


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


def drawn(*shape: int) -> Tensor:
    """Normal random numbers; on the meta device none, where drawing would first load torch's compiler and sympy for a
    third of a second."""
    numbers = torch.empty(shape)
    return numbers if numbers.is_meta else numbers.normal_()


def _normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


class Block(nn.Module):
    """One transformer layer, in steps: `project` → attention → `merge` → `feed`, or all of it with `forward`."""

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

    def project(self, x: Tensor, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of x (B, T, W), each (B, heads, T, W/heads); queries of the first so many tokens."""
        x = x if self.post else _normed(x, self.ln1)
        if queries is None:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:
            width, weight, bias = x.shape[-1], self.qkv.weight, self.qkv.bias
            q = F.linear(x[:, :queries], weight[:width], bias[:width])
            k, v = F.linear(x, weight[width:], bias[width:]).chunk(2, dim=-1)
        return self.split(q), self.split(k), self.split(v)

    def merge(self, heads: Tensor) -> Tensor:
        """Output projection of (B, heads, T, W/heads) → (B, T, W), with LayerScale where the tower has it."""
        y = self.out(heads.transpose(1, 2).flatten(2))
        return y if self.scale1 is None else y * self.scale1

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
        """x (B, T, W) → (B, T, W). `mask` is True where attention is allowed. With `places` (B,): of each sequence that
        one place only, (B, 1, W), which sees what `mask` says."""
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
        self.offset: float | None = None  # of uint8 pixels

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
        """pixels (B, 3, height, width) → class token and patches (B, 1+M, W), ready for the first layer. Normalized
        pixels; uint8 ones, less `offset`, if normalization is part of the patch embedding (see `fuse`)."""
        h, w = self.grid(*pixels.shape[-2:])
        if self.offset is None:
            x = self.patch(pixels).flatten(2).transpose(1, 2)
        else:
            x = self._embed_bytes(pixels, self.offset, h, w)
        x = torch.cat([self.cls.expand(x.shape[0], 1, -1), x], dim=1) + self.grid_positions(h, w)
        return _normed(x, self.stem) if isinstance(self.stem, nn.LayerNorm) else x

    def _embed_bytes(self, pixels: Tensor, offset: float, h: int, w: int) -> Tensor:
        """uint8 (B, 3, height, width) → patches (B, h·w, W); a convolution that does not overlap is one product."""
        b, p, weight = len(pixels), self.config.patch, self.patch.weight
        tiles = pixels[:, :, : h * p, : w * p].reshape(b, 3, h, p, w, p).permute(0, 2, 4, 1, 3, 5)
        # what is left of a byte is exact even in bfloat16
        flat = torch.empty(tiles.shape, dtype=weight.dtype, device=pixels.device)
        torch.sub(tiles, offset, out=flat)
        return F.linear(flat.view(b, h * w, -1), weight.flatten(1), self.patch.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features before the final norm, (B, 1+M, W)."""
        x = self.embed(pixels)
        for block in self.blocks:
            x = block(x)
        return x


class TextTower(nn.Module):
    """CLIP-type (causal, pre-LN, end-token) or BERT-type (bidirectional, post-LN, mean) text transformer."""

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


class Backbone(nn.Module):
    """Two towers and a joint space of size D. Its weights carry no gradient.

    `text` is None for a vision tower alone; label features must then be given (`given_labels`).
    """

    def __init__(
        self,
        vision: TowerConfig,
        text: TowerConfig | None,
        dim: int,
        preprocess: Preprocess,
        tokenizer: Tokenizer | None = None,
        *,
        logit_scale: float = 100.0,
        global_pool: str = "cls",
        name: str = "backbone",
    ) -> None:
        super().__init__()
        self.vision = VisionTower(vision)
        self.text = TextTower(text) if text else None
        self.visual_projection = nn.Linear(vision.width, dim, bias=False)
        self.text_projection = nn.Linear(text.width, dim, bias=False) if text else None
        self.dim, self.logit_scale, self.global_pool = dim, float(logit_scale), global_pool
        self.preprocess, self.tokenizer, self.name = preprocess, tokenizer, name
        self.given_labels: dict[str, Tensor] = {}
        self.requires_grad_(False)

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Backbone:
        """From a Hugging Face id, a local folder, or a state-dict file; see `loading.load_backbone`."""
        from .checkpoints.loading import load_backbone

        return load_backbone(name, **options)

    @property
    def device(self) -> torch.device:
        return self.visual_projection.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.visual_projection.weight.dtype

    def project(self, x: Tensor) -> Tensor:
        """The tower's last norm and the projection: any stream (..., W) → joint space (..., D), not normalized."""
        norm, weight = self.vision.norm, self.visual_projection.weight
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            weight = weight.to(x.dtype)
            return F.linear(layer_norm(x, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps), weight)
        return F.linear(_normed(x, norm), weight)

    def pool(self, cls: Tensor, patches: Tensor) -> Tensor:
        """Global feature from the projected class token (B, D) and patches (B, M, D)."""
        return cls + patches.mean(1, dtype=cls.dtype) if self.global_pool == "cls+mean" else cls

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Main stream after the last layer (B, 1+M, W) → global (B, D) and patches (B, M, D), not normalized."""
        y = self.project(x)
        return self.pool(y[:, 0], y[:, 1:]), y[:, 1:]

    def encode_image(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized pixels (B, 3, H, W) → global (B, D) and patches (B, M, D), not normalized."""
        return self.finish(self.vision(pixels))

    def require_text(self, what: str) -> TextTower:
        """The text tower, or an error that says what cannot be done without one."""
        if self.text is None:
            raise RamatchError(
                f"{what} needs a text tower, and '{self.name}' is a vision tower alone; "
                "give label features with --label-features F.safetensors, or use a model with both towers"
            )
        return self.text

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids (N, T), cut to the longest real length, and lengths (N,) on the backbone's device."""
        self.require_text("encoding text")
        if self.tokenizer is None:
            raise RamatchError(f"'{self.name}' has no tokenizer files; put tokenizer.json beside its weights")
        ids, lengths = self.tokenizer(texts)
        return ids.to(self.device), lengths.to(self.device)

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """Sentences → features (N, D), not normalized."""
        text = self.require_text("encoding text")
        ids, lengths = self.tokenize(texts)
        return self.project_text(text(ids, lengths))

    def project_text(self, pooled: Tensor) -> Tensor:
        assert self.text_projection is not None
        return self.text_projection(pooled)

    def set_label_features(self, path: str | Path) -> None:
        """Fixed label features from a safetensors file: `features` (N, D) and a JSON list `labels` in its metadata."""
        from .checkpoints.files import read_label_features

        labels, features = read_label_features(path)
        if features.shape[1] != self.dim:
            raise RamatchError(
                f"{path}: label features have size {features.shape[1]}, but '{self.name}' has {self.dim}; "
                "they come from another model"
            )
        self.given_labels = dict(zip(labels, F.normalize(features, dim=-1), strict=True))

    def label_features(self, labels: Sequence[str]) -> Tensor:
        """The given features of these labels, (N, D)."""
        if not self.given_labels:
            self.require_text("recognising labels")
        missing = [label for label in labels if label not in self.given_labels]
        if missing:
            raise RamatchError(
                f"no label feature is given for {', '.join(map(repr, missing[:5]))}"
                f"{' …' if len(missing) > 5 else ''}; the file has {len(self.given_labels)} labels"
            )
        return torch.stack([self.given_labels[label] for label in labels]).to(self.device, self.dtype)

    def fingerprint(self) -> str:
        """Hash of the frozen weights (in half precision, so that a fp16 copy of a model is the same model)."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().to("cpu", torch.float16).contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]
