"""Where a training step's pixels come from: worker processes that decode, or images kept on the device.

Both give (pixels uint8 or float in [0, 255] (B, 3, H, W), targets (B, N)) on the device, in the order of a
`ResumableSampler`, with one augmentation that depends on (seed, epoch, image) alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..data.annotations import Annotations
from ..data.augment import augment, epoch_table
from ..data.decode import ImageCache, ImageDataset, ImageLoader
from ..data.sampler import ResumableSampler
from ..modeling.preprocess import Preprocess
from .config import TrainConfig

Pixels = tuple[Tensor, Tensor]


def make_batches(
    config: TrainConfig,
    data: Annotations,
    sampler: ResumableSampler,
    preprocess: Preprocess,
    device: torch.device,
    images: ImageCache | None = None,
    progress: bool = True,
) -> Iterable[Pixels]:
    """Iterating gives the batches left in the sampler's epoch. `images`: decoded pictures, with data.cache = device."""
    if config.data.cache == "none":
        return LoaderBatches(config, data, sampler, preprocess, device)
    cache = images if images is not None else ImageCache(config.data.workers)
    pixels = cache.stack(data.records, preprocess, progress=progress)
    return DeviceBatches(config, pixels.to(device), data.targets().to(device), sampler, preprocess)


class LoaderBatches:
    """Decoded in workers, where the part is cut from the full picture; flip, blur and erasing on the device."""

    def __init__(
        self,
        config: TrainConfig,
        data: Annotations,
        sampler: ResumableSampler,
        preprocess: Preprocess,
        device: torch.device,
    ) -> None:
        self.config, self.sampler, self.device, self.targets = config, sampler, device, data.targets().float()
        self.fill = [255 * m for m in preprocess.mean]
        a, workers = config.augment, config.data.workers
        dataset = ImageDataset(data.records, preprocess, augment=a if a.enabled else None, seed=config.seed)
        options = {"pin_memory": device.type == "cuda", "persistent_workers": workers > 0}
        self.loader = ImageLoader(dataset, workers=workers, batch_sampler=sampler, **options)

    def __iter__(self) -> Iterator[Pixels]:
        table = epoch_table(len(self.targets), self.config.seed, self.sampler.epoch)
        for pixels, rows in self.loader:
            pixels = pixels.to(self.device, non_blocking=True)
            if self.config.augment.enabled:
                draws = table[rows].to(self.device, non_blocking=True)
                pixels = augment(pixels, draws, self.config.augment, self.fill)
            yield pixels, self.targets[rows].to(self.device, non_blocking=True)


class DeviceBatches:
    """All images decoded once and kept as uint8 on the device; augmentation there. No worker, no copy, no wait."""

    def __init__(
        self, config: TrainConfig, pixels: Tensor, targets: Tensor, sampler: ResumableSampler, preprocess: Preprocess
    ) -> None:
        self.config, self.pixels, self.targets = config, pixels, targets
        self.sampler, self.preprocess = sampler, preprocess
        self.fill = [255 * m for m in preprocess.mean]

    def __iter__(self) -> Iterator[Pixels]:
        device, a = self.pixels.device, self.config.augment
        # the whole epoch's indices and random numbers go to the device at once: nothing to wait for in a step
        table = epoch_table(len(self.pixels), self.config.seed, self.sampler.epoch).to(device)
        for rows in self.sampler.rows(device):
            pixels = self.pixels[rows]
            if a.enabled:
                pixels = augment(pixels, table[rows], a, self.fill, self.preprocess.size)
            yield pixels, self.targets[rows]
