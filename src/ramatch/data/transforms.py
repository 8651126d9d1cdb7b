"""Augmentation and preprocessing with torchvision v2: PIL picture in, tensor (3, H, W) out.

The paper's appendix names random crop, flip, Gaussian blur and random erasing for training and a plain resize
for testing, without their parameters; the defaults here are ours and every one is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2

from ramatch.errors import RamatchError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

Size = int | Sequence[int]

INTERPOLATIONS = {
    "bicubic": InterpolationMode.BICUBIC,
    "bilinear": InterpolationMode.BILINEAR,
    "nearest": InterpolationMode.NEAREST,
}


class Normalize(nn.Module):
    """uint8 (..., 3, H, W) to float, (x / 255 - mean) / std; move it to the GPU and give it whole batches."""

    def __init__(self, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> None:
        super().__init__()
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images.float().div_(255.0) - self.mean) / self.std


def train_transform(
    size: Size,
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
    *,
    crop: Literal["resized", "plain", "none"] = "resized",
    scale: tuple[float, float] = (0.5, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    margin: float = 0.125,
    flip: float = 0.5,
    blur: float = 0.2,
    blur_sigma: tuple[float, float] = (0.1, 2.0),
    blur_kernel: int = 9,
    erasing: float = 0.25,
    erasing_scale: tuple[float, float] = (0.02, 0.2),
    erasing_ratio: tuple[float, float] = (0.3, 3.3),
    interpolation: str = "bicubic",
    as_uint8: bool = False,
) -> v2.Transform:
    """Random crop, flip, blur, erasing. size: pixels, or (height, width).

    crop: `resized` takes a part of area `scale`, whose aspect is the picture's own times `ratio`, and resizes
        it, so that the whole picture (scale 1) is what `eval_transform` gives and a tall pedestrian is not cut
        to a square; `plain` resizes to (1 + margin) times the size and crops; `none` only resizes.
    flip, blur, erasing: probabilities. Erased boxes get the mean colour, which is zero once normalised.
    as_uint8: leave normalising to `Normalize` on the GPU; the same pixels either way.
    """
    height, width = as_size(size)
    mode = _interpolation(interpolation)
    steps: list[nn.Module] = []
    if crop == "resized":
        steps.append(RandomPart(height, width, scale, ratio, mode))
    elif crop == "plain":
        larger = (round(height * (1 + margin)), round(width * (1 + margin)))
        steps += [v2.Resize(larger, interpolation=mode), v2.RandomCrop((height, width))]
    elif crop == "none":
        steps.append(v2.Resize((height, width), interpolation=mode))
    else:
        raise RamatchError(f"crop must be resized, plain or none, not {crop!r}")
    steps += [v2.PILToTensor(), v2.RandomHorizontalFlip(flip)]
    if blur > 0:
        steps.append(v2.RandomApply([v2.GaussianBlur(blur_kernel, blur_sigma)], p=blur))
    if erasing > 0:
        value: Any = [float(round(255 * m)) for m in mean]
        steps.append(v2.RandomErasing(erasing, erasing_scale, erasing_ratio, value=value))
    if not as_uint8:
        steps.append(Normalize(mean, std))
    return v2.Compose(steps)


def eval_transform(
    size: Size,
    mean: Sequence[float] = CLIP_MEAN,
    std: Sequence[float] = CLIP_STD,
    *,
    keep_aspect: bool = False,
    interpolation: str = "bicubic",
    as_uint8: bool = False,
) -> v2.Transform:
    """Plain resize to (height, width), the aspect ratio not kept, as the paper tests.

    keep_aspect: resize until the picture covers the size and cut out the middle instead, as CLIP does.
    """
    height, width = as_size(size)
    mode = _interpolation(interpolation)
    step = Cover(height, width, mode) if keep_aspect else v2.Resize((height, width), interpolation=mode)
    steps: list[nn.Module] = [step, v2.PILToTensor()]
    if not as_uint8:
        steps.append(Normalize(mean, std))
    return v2.Compose(steps)


class RandomPart(nn.Module):
    """Cut a random part of relative area `scale` and relative aspect `ratio`; resize it to (height, width)."""

    def __init__(
        self,
        height: int,
        width: int,
        scale: tuple[float, float],
        ratio: tuple[float, float],
        interpolation: InterpolationMode,
    ) -> None:
        super().__init__()
        if not (0 < scale[0] <= scale[1] <= 1 and 0 < ratio[0] <= ratio[1]):
            raise RamatchError(f"crop needs 0 < scale <= 1 and 0 < ratio, both in order; got {scale}, {ratio}")
        self.size, self.scale, self.ratio, self.interpolation = [height, width], scale, ratio, interpolation

    def forward(self, image: Any) -> Any:
        width, height = image.size
        area, aspect, x, y = torch.rand(4).tolist()
        area = self.scale[0] + area * (self.scale[1] - self.scale[0])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = math.exp(low + aspect * (high - low))
        across, down = min(1.0, math.sqrt(area * aspect)), min(1.0, math.sqrt(area / aspect))
        w, h = max(1, round(width * across)), max(1, round(height * down))
        left, top = round(x * (width - w)), round(y * (height - h))
        return v2.functional.resized_crop(image, top, left, h, w, self.size, interpolation=self.interpolation)


class Cover(nn.Module):
    """Resize a picture until it covers (height, width), then cut out the middle."""

    def __init__(self, height: int, width: int, interpolation: InterpolationMode) -> None:
        super().__init__()
        self.height, self.width, self.interpolation = height, width, interpolation

    def forward(self, image: Any) -> Any:
        width, height = image.size
        factor = max(self.height / height, self.width / width)
        covering = [max(self.height, round(height * factor)), max(self.width, round(width * factor))]
        resized = v2.functional.resize(image, covering, interpolation=self.interpolation)
        return v2.functional.center_crop(resized, [self.height, self.width])


def as_size(size: Size) -> tuple[int, int]:
    """(height, width) of a size given as one number or as a pair."""
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or min(pair) < 1:
        raise RamatchError(f"image size must be a number or (height, width), not {size!r}")
    return int(pair[0]), int(pair[1])


def _interpolation(name: str) -> InterpolationMode:
    if name not in INTERPOLATIONS:
        raise RamatchError(f"interpolation must be one of {', '.join(INTERPOLATIONS)}, not {name!r}")
    return INTERPOLATIONS[name]
