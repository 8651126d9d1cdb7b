"""Where a training step's pixels come from: worker processes that decode, or images kept on the device."""

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


class Batches:
    """(pixels uint8 or float in [0, 255] (B, 3, H, W), targets (B, N)) on the device: those left in the sampler's
    epoch.

    Without `images`, parts are cut from the full pictures in worker processes. With it (data.cache = device), all
    images are decoded once and kept as uint8 on the device, parts are cut there: no worker, no copy, no wait. The
    augmentation is the same and depends on (seed, epoch, image) alone."""

    def __init__(
        self,
        config: TrainConfig,
        data: Annotations,
        sampler: ResumableSampler,
        preprocess: Preprocess,
        device: torch.device,
        images: ImageCache | None = None,
        progress: bool = True,
    ) -> None:
        self.config, self.sampler, self.preprocess, self.device = config, sampler, preprocess, device
        self.fill, workers = [255 * m for m in preprocess.mean], config.data.workers
        self.targets, self.pixels, self.loader = data.targets().float(), None, None
        if images is not None:
            self.pixels = images.stack(data.records, preprocess, progress=progress).to(device)
            self.targets = data.targets().to(device)
        else:
            cut = config.augment if config.augment.enabled else None
            dataset = ImageDataset(data.records, preprocess, augment=cut, seed=config.seed)
            options = {"pin_memory": device.type == "cuda", "persistent_workers": workers > 0}
            self.loader = ImageLoader(dataset, workers=workers, batch_sampler=sampler, **options)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        table = epoch_table(len(self.targets), self.config.seed, self.sampler.epoch).to(self.targets.device)
        size = None if self.pixels is None else self.preprocess.size
        for pixels, rows in self._raw():
            if self.config.augment.enabled:
                draws = table[rows].to(self.device, non_blocking=True)
                pixels = augment(pixels, draws, self.config.augment, self.fill, size)
            yield pixels, self.targets[rows].to(self.device, non_blocking=True)

    def _raw(self) -> Iterable[tuple[Tensor, Tensor]]:
        if self.pixels is not None:
            return ((self.pixels[rows], rows) for rows in self.sampler.rows(self.device))
        assert self.loader is not None
        return ((pixels.to(self.device, non_blocking=True), rows) for pixels, rows in self.loader)
