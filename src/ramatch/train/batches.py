"""Where a training step's pixels come from: worker processes that decode and augment, or images kept on the device.

Both give (pixels uint8 or float in [0, 255] (B, 3, H, W), targets (B, N)) on the device, in the order of a
`ResumableSampler`, with augmentation that depends on (seed, epoch, image) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from ..data.annotations import Annotations, Record
from ..data.dataset import ImageLabelDataset
from ..data.images import ImageError
from ..data.sampler import ResumableSampler
from ..data.transforms import train_transform
from ..modeling.preprocess import Preprocess
from .augment import augment, epoch_table
from .config import TrainConfig
from .log import Progress

Batch = tuple[Tensor, Tensor]


class Batches(Protocol):
    """Iterating gives the batches left in the sampler's epoch."""

    def __iter__(self) -> Iterator[Batch]: ...


def make_batches(
    config: TrainConfig, data: Annotations, sampler: ResumableSampler, preprocess: Preprocess, device: torch.device,
    images: ImageCache | None = None, progress: bool = True,
) -> Batches:  # fmt: skip
    if config.data.cache == "device":
        return DeviceBatches(config, data, sampler, preprocess, device, images, progress)
    return LoaderBatches(config, data, sampler, preprocess, device)


class LoaderBatches:
    """Decoding and augmentation (torchvision) in workers; uint8 goes to the device."""

    def __init__(
        self, config: TrainConfig, data: Annotations, sampler: ResumableSampler, preprocess: Preprocess,
        device: torch.device,
    ) -> None:  # fmt: skip
        a = config.augment
        options: dict[str, Any] = {"crop": "none", "flip": 0.0, "blur": 0.0, "erasing": 0.0}
        if a.enabled:
            options = {f: getattr(a, f) for f in ("crop", "scale", "ratio", "margin", "flip", "blur", "blur_sigma",
                                                  "erasing", "erasing_scale", "erasing_ratio")}  # fmt: skip
        transform = train_transform(preprocess.size, preprocess.mean, preprocess.std, as_uint8=True, **options)
        self.device = device
        self.loader = loader(
            _Guarded(ImageLabelDataset(data, transform, seed=config.seed)), workers=config.data.workers,
            pin=device.type == "cuda", batch_sampler=sampler, persistent=True,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Batch]:
        for pixels, targets in unguarded(self.loader):
            yield pixels.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


class DeviceBatches:
    """All images decoded once and kept as uint8 on the device; batched augmentation there. No worker, no copy, no wait."""

    def __init__(
        self, config: TrainConfig, data: Annotations, sampler: ResumableSampler, preprocess: Preprocess,
        device: torch.device, images: ImageCache | None = None, progress: bool = True,
    ) -> None:  # fmt: skip
        self.config, self.sampler, self.preprocess = config, sampler, preprocess
        cache = images if images is not None else ImageCache(config.data.workers)
        self.pixels = cache.stack(data.records, preprocess, progress=progress).to(device)
        self.targets = data.targets().to(device)
        self.fill = [255 * m for m in preprocess.mean]

    def __iter__(self) -> Iterator[Batch]:
        device, a = self.pixels.device, self.config.augment
        batches = [[index for index, _ in batch] for batch in self.sampler]
        # the whole epoch's indices and random numbers go to the device at once: nothing to wait for in a step
        order = torch.tensor([i for batch in batches for i in batch], dtype=torch.long)
        table = epoch_table(len(self.pixels), self.config.seed, self.sampler.epoch)[order].to(device)
        sizes = [len(batch) for batch in batches]
        for rows, draws in zip(order.to(device).split(sizes), table.split(sizes), strict=True):
            pixels = self.pixels[rows]
            if a.enabled:
                pixels = augment(pixels, draws, a, self.preprocess.size, self.fill)
            yield pixels, self.targets[rows]


class ImageCache:
    """Decoded, resized images by source, kept in memory (150 kB each at 224 px). Give one to several runs and each image is
    decoded once."""

    def __init__(self, workers: int = 4) -> None:
        self.workers = max(workers, 1)
        self._kept: dict[tuple[str, tuple[int, int]], Tensor] = {}

    def stack(self, records: Sequence[Record], preprocess: Preprocess, *, progress: bool = True) -> Tensor:
        """uint8 (n, 3, H, W) of these records, plainly resized."""
        size = preprocess.size
        line = Progress(len(records), "decoding", enabled=progress)
        with ThreadPoolExecutor(self.workers) as pool:  # Pillow decodes and resizes without holding Python's lock
            for i, (record, image) in enumerate(zip(records, pool.map(lambda r: self._one(r, preprocess), records),
                                                    strict=True)):  # fmt: skip
                self._kept[str(record.image), size] = image
                line.update(i + 1)
        line.clear()
        out = torch.empty(len(records), 3, *size, dtype=torch.uint8)
        for row, record in zip(out, records, strict=True):
            row.copy_(self._kept[str(record.image), size])
        return out

    def _one(self, record: Record, preprocess: Preprocess) -> Tensor:
        found = self._kept.get((str(record.image), preprocess.size))
        return found if found is not None else preprocess.resize(record.load())


# ------------------------------------------------------------------------------------------------ data loaders


class _Guarded:
    """A dataset whose unreadable images travel as values, so that the main process can name them without a worker's
    traceback."""

    def __init__(self, inner: ImageLabelDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.inner[item][:2]
        except ImageError as error:
            return error


def loader(dataset: Any, *, workers: int, pin: bool = False, persistent: bool = False, **options: Any) -> DataLoader:
    return DataLoader(
        dataset, num_workers=workers, pin_memory=pin, persistent_workers=persistent and workers > 0, collate_fn=_collate,
        generator=torch.Generator(), **options,  # its own generator: the run's must not depend on when a loader starts
    )  # fmt: skip


def image_loader(
    data: Annotations, resize: Callable[[Image.Image], Tensor], *, batch_size: int, workers: int, pin: bool
) -> DataLoader:
    """Plainly resized images in order, for evaluation."""
    dataset = _Guarded(ImageLabelDataset(data, resize))
    return loader(dataset, workers=min(workers, -(-len(data) // batch_size)), pin=pin, batch_size=batch_size)


def unguarded(batches: DataLoader) -> Iterator[Batch]:
    for batch in batches:
        if isinstance(batch, ImageError):
            raise ImageError(
                f"{batch}; `ramatch data check` lists every unreadable image", name=batch.name, reason=batch.reason
            )
        yield batch


def _collate(items: list[Any]) -> Any:
    for item in items:
        if isinstance(item, ImageError):
            return item
    return torch.stack([pixels for pixels, _ in items]), torch.stack([target for _, target in items])
