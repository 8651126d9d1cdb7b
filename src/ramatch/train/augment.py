"""The paper's augmentations for a whole batch at once, on the device where the images are.

All randomness of an epoch is one table of uniform numbers (images, 12) from (seed, epoch): what happens to an image depends
on nothing else, so a resumed run, another batch size or another number of processes sees the same pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.sampler import sample_seed
from .config import AugmentConfig

DRAWS = 12  # numbers per image: crop (4), flip, blur (2), erasing (5)
KERNEL = 9
TABLE = -2  # index that the table's seed stands for: no image's, and not the sampler's -1


def epoch_table(count: int, seed: int, epoch: int) -> Tensor:
    """Uniform numbers (count, DRAWS) of an epoch, on the CPU, so that they are the same on every device."""
    generator = torch.Generator().manual_seed(sample_seed(seed, epoch, TABLE))
    return torch.rand(count, DRAWS, generator=generator)


def augment(
    images: Tensor, draws: Tensor, config: AugmentConfig, size: tuple[int, int], fill: Sequence[float]
) -> Tensor:
    """images (B, 3, h, w) uint8, draws (B, 12) → (B, 3, *size) float in [0, 255], erased boxes filled with `fill` (the
    mean colour in [0, 255])."""
    x = images.float()
    area, aspect, left, top, flip, blurred, sigma, erased, *box = draws.T
    x = _crop(x, config, size, area, aspect, left, top, flip < config.flip)
    if config.blur > 0:
        low, high = config.blur_sigma
        x = _blur(x, low + sigma * (high - low), blurred < config.blur)
    if config.erasing > 0:
        x = _erase(x, config, erased < config.erasing, box, fill)
    return x


def _between(u: Tensor, low: float, high: float) -> Tensor:
    return low + u * (high - low)


def _log_between(u: Tensor, low: float, high: float) -> Tensor:
    return _between(u, math.log(low), math.log(high)).exp()


def _crop(
    x: Tensor,
    c: AugmentConfig,
    size: tuple[int, int],
    area: Tensor,
    aspect: Tensor,
    left: Tensor,
    top: Tensor,
    flip: Tensor,
) -> Tensor:
    """A part of each image, resized to `size` and mirrored where `flip`: one affine resampling."""
    if c.crop == "resized":
        part, shape = _between(area, *c.scale), _log_between(aspect, *c.ratio)
        across, down = (part * shape).sqrt().clamp(max=1), (part / shape).sqrt().clamp(max=1)
    else:
        across = down = torch.full_like(area, 1 / (1 + c.margin) if c.crop == "plain" else 1.0)
    # centre of the part in coordinates from -1 to 1, as grid_sample has them
    cx, cy = (1 - across) * (2 * left - 1), (1 - down) * (2 * top - 1)
    zero = torch.zeros_like(cx)
    mirror = torch.where(flip, -across, across)
    theta = torch.stack([mirror, zero, cx, zero, down, cy], dim=1).view(-1, 2, 3)
    if c.crop == "none" and tuple(x.shape[-2:]) == tuple(size):
        return torch.where(flip[:, None, None, None], x.flip(-1), x)
    grid = F.affine_grid(theta, [len(x), 3, *size], align_corners=False)
    return F.grid_sample(x, grid, mode="bicubic", padding_mode="reflection", align_corners=False).clamp(0, 255)


def _blur(x: Tensor, sigma: Tensor, chosen: Tensor) -> Tensor:
    """Gaussian blur with a width per image; the others get a kernel that changes nothing."""
    offsets = torch.arange(KERNEL, device=x.device) - KERNEL // 2
    kernel = (-0.5 * (offsets / sigma[:, None]) ** 2).exp()
    kernel = kernel / kernel.sum(1, keepdim=True)
    kernel = torch.where(chosen[:, None], kernel, (offsets == 0).to(kernel.dtype))
    b, channels, h, w = x.shape
    k, half = kernel.repeat_interleave(channels, 0), KERNEL // 2
    flat = x.reshape(1, b * channels, h, w)
    flat = F.pad(flat, (half, half, half, half), mode="reflect" if min(h, w) > half else "replicate")
    flat = F.conv2d(flat, k[:, None, :, None], groups=b * channels)
    return F.conv2d(flat, k[:, None, None, :], groups=b * channels).view(b, channels, h, w)


def _erase(x: Tensor, c: AugmentConfig, chosen: Tensor, box: Sequence[Tensor], fill: Sequence[float]) -> Tensor:
    """Cover a box of relative area and aspect with the mean colour (Zhong et al., 2020)."""
    h, w = x.shape[-2:]
    area, aspect, left, top = box
    part, shape = _between(area, *c.erasing_scale), _log_between(aspect, *c.erasing_ratio)
    high, wide = (part * shape).sqrt().clamp(max=1), (part / shape).sqrt().clamp(max=1)
    x0, y0 = left * (1 - wide), top * (1 - high)
    columns, rows = (torch.arange(w, device=x.device) + 0.5) / w, (torch.arange(h, device=x.device) + 0.5) / h
    inside_x = (columns >= x0[:, None]) & (columns < (x0 + wide)[:, None])
    inside_y = (rows >= y0[:, None]) & (rows < (y0 + high)[:, None])
    mask = inside_y[:, None, :, None] & inside_x[:, None, None, :] & chosen[:, None, None, None]
    for channel, value in enumerate(fill):  # plain numbers reach the GPU as kernel arguments: nothing waits for a copy
        x[:, channel].masked_fill_(mask[:, 0], value)
    return x
