"""Random crops and flips of a whole batch on its device (one bilinear look-up instead of a loop over images), and mosaics."""

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


def mosaics(
    images: Tensor, count: int, size: tuple[int, int], generator: torch.Generator, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """`count` pictures of four random images each, two by two: small things in crowded scenes, with the labels of all four.

    images uint8 (n, 3, h, w) → uint8 (count, 3, H, W) where they are, and which images they show (count, 4). `device`: where
    the resizing is done.
    """
    sources = torch.randint(len(images), (count, 4), generator=generator)
    height, width = size[0] // 2, size[1] // 2
    out = images.new_empty(count, 3, *size)
    for start in range(0, count, 256):
        chunk = slice(start, start + 256)
        for place, (top, left) in enumerate(((0, 0), (0, width), (height, 0), (height, width))):
            cell = (size[0] - height if top else height, size[1] - width if left else width)
            chosen = images[sources[chunk, place].to(images.device)]
            shown = plain_views(chosen if device is None else chosen.to(device), cell)
            out[chunk, :, top : top + cell[0], left : left + cell[1]] = shown.round().to(torch.uint8)
    return out, sources
