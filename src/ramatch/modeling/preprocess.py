"""From images to the pixels a tower expects."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Preprocess:
    """Resize to size = (height, width), scale to [0, 1], normalise. The aspect ratio is not kept: labels are looked for
    in the whole image, so nothing may be cropped away (the paper's protocol)."""

    size: tuple[int, int]
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def resize(self, image: Image.Image) -> Tensor:
        """RGB image → uint8 (3, height, width)."""
        height, width = self.size
        if image.size != (width, height):
            image = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)

    def normalize(self, pixels: Tensor) -> Tensor:
        """uint8 (B, 3, H, W) → normalised float of the same shape, on the same device."""
        mean = torch.tensor(self.mean, device=pixels.device).view(3, 1, 1) * 255
        std = torch.tensor(self.std, device=pixels.device).view(3, 1, 1) * 255
        return (pixels.float() - mean) / std

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
