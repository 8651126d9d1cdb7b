"""A frozen dual encoder: vision tower, text tower, two projections, tokenizer, preprocessing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import RamatchError
from .checkpoints.tokenizer import Tokenizer
from .preprocess import Preprocess
from .towers import Block, TextTower, TowerConfig, VisionTower
from .vision_parts import linear_as, norm_as

__all__ = ["Backbone", "Block", "TextTower", "TowerConfig", "VisionTower"]


def _head(c: TowerConfig, dim: int) -> nn.Linear | nn.Sequential:
    """Projection of a tower into the joint space."""
    if not c.head_hidden:
        return nn.Linear(c.width, dim, bias=c.head_bias)
    first, last = (nn.Linear(*sizes, bias=c.head_bias) for sizes in ((c.width, c.head_hidden), (c.head_hidden, dim)))
    return nn.Sequential(first, nn.GELU(), last)


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
        self.visual_projection = nn.Linear(vision.width, dim, bias=vision.head_bias)
        self.text_projection = _head(text, dim) if text else None
        self.dim, self.logit_scale, self.global_pool = dim, float(logit_scale), global_pool
        self.logit_bias: float | None = None  # of SigLIP, which learned with a sigmoid
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
        """The tower's last norm and the projection: any stream (..., W) → joint space (..., D), not normalized.

        Where a tower ends in attention pooling, each token goes through it alone: its value, output product and
        feed-forward, which is what pooling gives for an image of that one token. So MaskCLIP (Zhou et al., ECCV 2022)
        reads dense features off CLIP's attention pooling, without training."""
        x = norm_as(x, self.vision.norm)
        return linear_as(x if self.vision.pool is None else self.vision.pool.alone(x), self.visual_projection)

    def project_image(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Main stream after the last layer (B, T, W) → the image's feature (B, D), not normalized: of the class token,
        the first, or of all tokens (or those `allowed`, (B, T)) by attention pooling."""
        if self.vision.pool is None:
            return self.project(x[:, 0])
        return linear_as(self.vision.pool(norm_as(x, self.vision.norm), allowed), self.visual_projection)

    def pool(self, image: Tensor, patches: Tensor) -> Tensor:
        """Global feature from that of the class token or attention pooling (B, D) and projected patches (B, M, D)."""
        return image + patches.mean(1, dtype=image.dtype) if self.global_pool == "cls+mean" else image

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Main stream after the last layer (B, prefix+M, W) → global (B, D) and patches (B, M, D), not normalized."""
        y = self.project(x)
        image, patches = self.project_image(x) if self.vision.pool else y[:, 0], y[:, self.vision.config.prefix :]
        return self.pool(image, patches), patches

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
