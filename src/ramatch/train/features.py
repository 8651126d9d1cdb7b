"""A cache of frozen features.

What lies below the first layer that learns is constant per image, so it is computed once for a few views of each image
and kept on the device; a step then only pays for the last layers. For data that fits, this is the fastest way to train.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data.augment import AugmentConfig, augment, epoch_table, resize_batch
from ..data.sampler import ResumableSampler, sample_seed
from ..modeling.preprocess import Preprocess
from ..modeling.ram import Streams

VIEW = -3  # index that the seed of an epoch's choice of views stands for (see `data.augment.TABLE`)


@dataclass(frozen=True)
class Stem:
    """Frozen layers. `run`: normalized pixels (B, 3, H, W) → state before the first layer that learns."""

    run: Callable[[Tensor], Streams]
    preprocess: Preprocess
    device: torch.device
    dtype: torch.dtype  # of the computation, and of what is kept

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Streams:
        """Images (B, 3, H, W) in [0, 255]."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.run(self.preprocess.normalize(images))


@dataclass(frozen=True)
class FeatureCache:
    """Streams of n images in v views: each tensor (v, n, …)."""

    streams: Streams

    def __len__(self) -> int:
        return self.streams.x.shape[1]

    @property
    def views(self) -> int:
        return len(self.streams.x)

    def pick(self, view: Tensor | int, rows: Tensor | slice) -> Streams:
        return self.streams.map(lambda t: t[view, rows])

    def batches(self, sampler: ResumableSampler) -> Iterator[tuple[Tensor, Tensor]]:
        """(views (B,), rows (B,)) on the device, of what is left in the sampler's epoch: a random view of each
        image."""
        device = self.streams.x.device
        generator = torch.Generator().manual_seed(sample_seed(sampler.seed, sampler.epoch, VIEW))
        chosen = torch.randint(self.views, (len(self),), generator=generator).to(device)
        for rows in sampler.rows(device):
            yield chosen[rows], rows


@dataclass(frozen=True)
class Views:
    """Each image as it is, its mirror, and random parts (of at least `crop` of the area): so many in all."""

    count: int = 1
    crop: float = 0.5
    seed: int = 0

    def make(self, images: Tensor, view: int, rows: slice, total: int, size: tuple[int, int]) -> Tensor:
        """One view of images (B, 3, h, w), the `rows` of `total`: float in [0, 255] (B, 3, *size)."""
        if view < 2:
            return resize_batch(images, size, flip=view == 1)
        config = AugmentConfig(scale=(self.crop, 1.0), ratio=(3 / 4, 4 / 3), blur=0.0, erasing=0.0)
        draws = epoch_table(total, self.seed, view)[rows].to(images.device)
        return augment(images, draws, config, (), size)


@torch.no_grad()
def cache_features(stem: Stem, pixels: Tensor, views: Views) -> FeatureCache:
    """Features of all images (uint8 (n, 3, h, w)), kept on the stem's device."""
    shape, batch, store = (views.count, len(pixels)), 256, None
    for view in range(views.count):
        for start in range(0, len(pixels), batch):
            rows = slice(start, start + batch)
            chunk = pixels[rows].to(stem.device)
            state = stem(views.make(chunk, view, rows, len(pixels), stem.preprocess.size))
            # where TSS reads the tower's output, its last input is the main stream's patches: nothing to keep twice
            shared = bool(state.taps) and state.taps[-1].data_ptr() == state.patches.data_ptr()
            state = replace(state, taps=state.taps[: len(state.taps) - shared])
            if store is None:
                store = state.map(lambda t: torch.empty(*shape, *t.shape[1:], dtype=stem.dtype, device=stem.device))
            for kept, part in zip(store.tensors, state.tensors, strict=True):
                kept[view, rows] = part
    assert store is not None
    return FeatureCache(
        replace(store, taps=(*store.taps, store.x[:, :, -math.prod(store.grid) :])) if shared else store
    )


class FeatureStore:
    """The last cache of each name, made anew when anything that shaped it changed: images (another tensor), views,
    preprocessing, frozen weights, settings of the stem. The last two show in what the stem makes of a probe: no list of
    them is needed."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Tensor, object, FeatureCache]] = {}

    def get(self, name: str, stem: Stem, pixels: Tensor, views: Views) -> FeatureCache:
        key = views, stem.preprocess, stem.dtype, fingerprint(stem)
        if name not in self._held or self._held[name][0] is not pixels or self._held[name][1] != key:
            # the last one goes before the next is made: they take tens of gigabytes on a real set
            if self._held.pop(name, None) is not None and stem.device.type == "cuda":
                torch.cuda.empty_cache()
            self._held[name] = pixels, key, cache_features(stem, pixels, views)
        return self._held[name][2]


def fingerprint(stem: Stem) -> str:
    """The same for stems that give the same streams, seen on one image of noise."""
    size = (1, 3, *stem.preprocess.size)
    state = stem(torch.randint(0, 256, size, generator=torch.Generator().manual_seed(0)).to(stem.device))
    shapes = [t.shape for t in state.tensors]
    found = hashlib.blake2b(f"{state.grid} {shapes} {state.base is None} {state.found is None}".encode())
    for tensor in state.tensors:
        found.update(tensor.float().cpu().numpy().tobytes())
    return found.hexdigest()
