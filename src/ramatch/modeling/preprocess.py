"""From images to the pixels a tower expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@dataclass(frozen=True)
class Preprocess:
    """Resize to size = (height, width), scale to [0, 1], normalise. The aspect ratio is not kept: labels are looked for
    in the whole image, so nothing may be cropped away (the paper's protocol)."""

    size: tuple[int, int]
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    interpolation: str = "bicubic"  # or bilinear: `RAMConfig.resize`

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def resize(self, image: Image.Image, box: tuple[float, float, float, float] | None = None) -> Tensor:
        """RGB image, or the part of it in `box` (left, top, right, bottom as shares) → uint8 (3, height, width)."""
        height, width = self.size
        image = image if image.mode == "RGB" else image.convert("RGB")  # which copies in any case
        if box is not None:
            box = (box[0] * image.width, box[1] * image.height, box[2] * image.width, box[3] * image.height)
        if image.size != (width, height) or box is not None:
            image = image.resize((width, height), RESAMPLING[self.interpolation], box)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def normalize(self, pixels: Tensor) -> Tensor:
        """uint8 (B, 3, H, W) → normalised float of the same shape, on the same device."""
        mean = torch.tensor(self.mean, device=pixels.device).view(3, 1, 1) * 255
        std = torch.tensor(self.std, device=pixels.device).view(3, 1, 1) * 255
        return (pixels.float() - mean) / std

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("size", "mean", "std")}
