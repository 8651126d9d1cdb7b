"""Random crops and flips of a whole batch on its device: one bilinear look-up instead of a loop over images."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_views(images: Tensor, size: tuple[int, int], *, flip: bool = False) -> Tensor:
    """The whole image at another size: uint8 (B, 3, h, w) → float (B, 3, H, W) in 0..255."""
    x = images.float()
    if tuple(images.shape[-2:]) != tuple(size):
        x = F.interpolate(x, size=size, mode="bicubic", align_corners=False, antialias=True).clamp(0, 255)
    return x.flip(-1) if flip else x


def random_views(images: Tensor, size: tuple[int, int], generator: torch.Generator, *, crop: float = 0.5) -> Tensor:
    """A random crop of at least `crop` of the area (aspect 3:4 to 4:3), flipped half of the time; float in 0..255.

    images uint8 (B, 3, h, w) → (B, 3, H, W). The generator lives on the CPU, so that a seed means the same everywhere.
    Sources should not be much larger than `size`: the look-up does not smooth.
    """
    share, ratio, at_x, at_y, mirror = torch.rand(5, len(images), generator=generator)
    area = crop + (1 - crop) * share
    aspect = torch.exp((2 * ratio - 1) * math.log(4 / 3))
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    x, y = (2 * at_x - 1) * (1 - width), (2 * at_y - 1) * (1 - height)
    width = torch.where(mirror < 0.5, -width, width)
    theta = torch.zeros(len(images), 2, 3)
    theta[:, 0, 0], theta[:, 0, 2], theta[:, 1, 1], theta[:, 1, 2] = width, x, height, y
    theta = theta.to(images.device)
    grid = F.affine_grid(theta, [len(images), 3, *size], align_corners=False)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
