"""One augmentation pipeline, on whole batches, on the device where they are: crop, flip, blur, erasing; and mosaics.

All randomness of an epoch is one table of uniform numbers (images, 12) from (seed, epoch): what happens to an image
depends on nothing else, so a resumed run, another batch size, another number of processes or of workers sees the same
pictures."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import RamatchError
from ..settings import NotNegative, OneOf, Settings, Share, Span
from .sampler import sample_seed

DRAWS = 12  # numbers per image: crop (4), flip, blur (2), erasing (5)
KERNEL = 9
TABLE = -2  # index that the table's seed stands for: no image's, and not the sampler's -1


@dataclass(frozen=True)
class AugmentConfig(Settings):
    """Random crop, flip, blur, erasing (appendix A.6 names them; the numbers are ours). Not `enabled`: plain resize."""

    section: ClassVar[str] = "augment."

    enabled: bool = True
    crop: Annotated[str, OneOf(("resized", "plain", "none"))] = "resized"  # a part of area `scale`; a shifted window
    scale: Span = (0.5, 1.0)
    ratio: Span = (0.75, 1.3333)  # of the part's aspect to the picture's own: a tall pedestrian is not cut to a square
    margin: NotNegative = 0.125  # plain: the image is this much larger than the window
    flip: Share = 0.5
    blur: Share = 0.2
    blur_sigma: Span = (0.1, 2.0)
    erasing: Share = 0.25
    erasing_scale: Span = (0.02, 0.2)
    erasing_ratio: Span = (0.3, 3.3)

    def check(self) -> None:
        for name in ("scale", "ratio", "blur_sigma", "erasing_scale", "erasing_ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise RamatchError(f"augment.{name} must be two positive numbers in order, got {(low, high)}")
        if self.scale[1] > 1 or self.erasing_scale[1] > 1:
            raise RamatchError("augment.scale and augment.erasing_scale are shares of the image, at most 1")


class Normalize(nn.Module):
    """uint8 or float in [0, 255] (..., 3, H, W) to (x / 255 - mean) / std, with constants already on the device."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images.float() / 255.0 - self.mean) / self.std


@functools.lru_cache(maxsize=2)  # a loader's worker asks for the same table again and again
def epoch_table(count: int, seed: int, epoch: int) -> Tensor:
    """Uniform numbers (count, DRAWS) of an epoch, on the CPU, so that they are the same on every device."""
    generator = torch.Generator().manual_seed(sample_seed(seed, epoch, TABLE))
    return torch.rand(count, DRAWS, generator=generator)


def augment(
    images: Tensor, draws: Tensor, config: AugmentConfig, fill: Sequence[float], size: tuple[int, int] | None = None
) -> Tensor:
    """images (B, 3, h, w) uint8, draws (B, 12) → (B, 3, *size) float in [0, 255], erased boxes filled with `fill` (the
    mean color in [0, 255]). Without `size` the images are parts already, cut from the full picture with `crop_box`."""
    _, _, _, _, flip, blurred, sigma, erased, *box = draws.T
    flip = flip < config.flip
    if size is None:
        x = torch.where(flip[:, None, None, None], images.flip(-1), images).float()
    else:
        x = _crop(images.float(), config, size, draws, flip)
    if config.blur > 0:
        x = _blur(x, _between(sigma, *config.blur_sigma), blurred < config.blur)
    if config.erasing > 0:
        x = _erase(x, config, erased < config.erasing, box, fill)
    return x


def crop_box(draws: Tensor, config: AugmentConfig) -> tuple[float, float, float, float] | None:
    """Left, top, right, bottom (shares of the picture) of the part that these draws (12,) choose; None: all of it."""
    if config.crop == "none":
        return None
    across, down = (float(share) for share in _part(draws, config))
    left, top = float(draws[2]) * (1 - across), float(draws[3]) * (1 - down)
    return left, top, left + across, top + down


def _part(draws: Tensor, c: AugmentConfig) -> tuple[Tensor, Tensor]:
    """Width and height (B,) of each image's part, as shares of the image."""
    area, aspect = draws[..., 0], draws[..., 1]
    if c.crop == "resized":
        part, shape = _between(area, *c.scale), _log_between(aspect, *c.ratio)
        return (part * shape).sqrt().clamp(max=1), (part / shape).sqrt().clamp(max=1)
    share = torch.full_like(area, 1 / (1 + c.margin) if c.crop == "plain" else 1.0)
    return share, share


def _between(u: Tensor, low: float, high: float) -> Tensor:
    return low + u * (high - low)


def _log_between(u: Tensor, low: float, high: float) -> Tensor:
    return _between(u, math.log(low), math.log(high)).exp()


def _crop(x: Tensor, c: AugmentConfig, size: tuple[int, int], draws: Tensor, flip: Tensor) -> Tensor:
    """A part of each image, resized to `size` and mirrored where `flip`: one affine resampling."""
    if c.crop == "none" and tuple(x.shape[-2:]) == tuple(size):
        return torch.where(flip[:, None, None, None], x.flip(-1), x)
    across, down = _part(draws, c)
    # center of the part in coordinates from -1 to 1, as grid_sample has them
    cx, cy = (1 - across) * (2 * draws[:, 2] - 1), (1 - down) * (2 * draws[:, 3] - 1)
    zero = torch.zeros_like(cx)
    mirror = torch.where(flip, -across, across)
    theta = torch.stack([mirror, zero, cx, zero, down, cy], dim=1).view(-1, 2, 3)
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
    """Cover a box of relative area and aspect with the mean color (Zhong et al., 2020)."""
    h, w = x.shape[-2:]
    area, aspect, left, top = box
    part, shape = _between(area, *c.erasing_scale), _log_between(aspect, *c.erasing_ratio)
    high, wide = (part * shape).sqrt().clamp(max=1), (part / shape).sqrt().clamp(max=1)
    x0, y0 = left * (1 - wide), top * (1 - high)
    columns, rows = (torch.arange(w, device=x.device) + 0.5) / w, (torch.arange(h, device=x.device) + 0.5) / h
    inside_x = (columns >= x0[:, None]) & (columns < (x0 + wide)[:, None])
    inside_y = (rows >= y0[:, None]) & (rows < (y0 + high)[:, None])
    mask = inside_y[:, :, None] & inside_x[:, None, :] & chosen[:, None, None]
    for channel, value in enumerate(fill):  # plain numbers reach the GPU as kernel arguments: nothing waits for a copy
        x[:, channel].masked_fill_(mask, value)
    return x


def resize_batch(images: Tensor, size: tuple[int, int], *, flip: bool = False) -> Tensor:
    """The whole image at another size: uint8 (B, 3, h, w) → float (B, 3, H, W) in 0..255."""
    x = images.float()
    if tuple(images.shape[-2:]) != tuple(size):
        x = F.interpolate(x, size=size, mode="bicubic", align_corners=False, antialias=True).clamp(0, 255)
    return x.flip(-1) if flip else x


def mosaics(
    images: Tensor, count: int, size: tuple[int, int], generator: torch.Generator, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """`count` pictures of four random images each, two by two: small things in crowded scenes, with the labels of all
    four.

    images uint8 (n, 3, h, w) → uint8 (count, 3, H, W) where they are, and which images they show (count, 4). `device`:
    where the resizing is done."""
    sources = torch.randint(len(images), (count, 4), generator=generator)
    height, width = size[0] // 2, size[1] // 2
    out = images.new_empty(count, 3, *size)
    for start in range(0, count, 256):
        chunk = slice(start, start + 256)
        for place, (top, left) in enumerate(((0, 0), (0, width), (height, 0), (height, width))):
            cell = (size[0] - height if top else height, size[1] - width if left else width)
            chosen = images[sources[chunk, place].to(images.device)]
            shown = resize_batch(chosen if device is None else chosen.to(device), cell)
            out[chunk, :, top : top + cell[0], left : left + cell[1]] = shown.round().to(torch.uint8)
    return out, sources


def with_mosaics(
    pixels: Tensor,
    targets: Tensor,
    share: float,
    size: tuple[int, int],
    seed: int = 0,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Images and targets (1 present, 0 absent, −1 not known), followed by `share` times as many mosaics."""
    count = round(share * len(pixels))
    if not count:
        return pixels, targets
    shown, sources = mosaics(pixels, count, size, torch.Generator().manual_seed(seed), device)
    if shown.shape[-2:] != pixels.shape[-2:]:
        pixels = torch.cat([resize_batch(chunk, size).round().to(torch.uint8) for chunk in pixels.split(256)])
    four = targets[sources.to(targets.device)]
    joined = torch.where((four > 0).any(1), 1, four.amin(1))  # known to be absent only where all four say so
    return torch.cat([pixels, shown]), torch.cat([targets, joined.to(targets.dtype)])
