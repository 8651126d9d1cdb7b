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
from .preprocess import Preprocess
from .tokenizer import Tokenizer
from .towers import TextTower, TowerConfig, VisionTower


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

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Main stream after the last layer (B, 1+M, W) → global (B, D) and patches (B, M, D), not normalised."""
        y = self.visual_projection(self.vision.norm(x))
        cls, patches = y[:, 0], y[:, 1:]
        return self.pool(cls, patches), patches

    def pool(self, cls: Tensor, patches: Tensor) -> Tensor:
        """Global feature from the projected class token (B, D) and patches (B, M, D)."""
        return cls + patches.mean(1) if self.global_pool == "cls+mean" else cls

    def encode_image(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised pixels (B, 3, H, W) → global (B, D) and patches (B, M, D), not normalised."""
        x = self.vision.embed(pixels)
        for block in self.vision.blocks:
            x = block(x)
        return self.finish(x)

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
        """Sentences → features (N, D), not normalised."""
        text = self.require_text("encoding text")
        ids, lengths = self.tokenize(texts)
        return self.project_text(text(ids, lengths))

    def project_text(self, pooled: Tensor) -> Tensor:
        assert self.text_projection is not None
        return self.text_projection(pooled)

    def set_label_features(self, path: str | Path) -> None:
        """Fixed label features from a safetensors file: `features` (N, D) and a JSON list `labels` in its metadata."""
        from .checkpoints.loading import read_label_features

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
