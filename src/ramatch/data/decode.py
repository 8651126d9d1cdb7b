"""From records on disk to uint8 batches: one loader for training, testing and decoding a whole set at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..progress import Progress
from .augment import AugmentConfig, crop_box, epoch_table
from .images import ImageError
from .sampler import Draw

if TYPE_CHECKING:
    from ..modeling.preprocess import Preprocess

FEW = 256  # images that are decoded sooner than worker processes start


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """(pixels uint8 (3, H, W), index) of records with a picture each, resized as `preprocess` says.

    Index with an int, or with a `Draw` from `ResumableSampler`: then, with `augment`, it is the part of the picture
    that (seed, epoch, index) choose, whatever the worker."""

    def __init__(
        self,
        records: Sequence[Any],
        preprocess: Preprocess,
        *,
        augment: AugmentConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.records, self.preprocess, self.augment, self.seed = records, preprocess, augment, seed

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, item: int | Draw) -> tuple[Tensor, int]:
        index, epoch = item if isinstance(item, Draw) else (int(item), None)
        picture, box = self.records[index].load(), None
        if epoch is not None and self.augment is not None:
            box = crop_box(epoch_table(len(self), self.seed, epoch)[index], self.augment)
        return self.preprocess.resize(picture, box), index

    def __getitems__(self, items: Sequence[int | Draw]) -> list[tuple[Tensor, int]] | ImageError:
        """What a loader asks for. An unreadable image travels as a value, so that the main process can name it without
        worker's traceback."""
        try:
            return [self[item] for item in items]
        except ImageError as error:
            return error


class ImageLoader:
    """Iterating gives (pixels uint8 (B, 3, H, W), indices (B,)). Options are those of torch's `DataLoader`."""

    def __init__(self, dataset: ImageDataset, *, workers: int = 0, **options: Any) -> None:
        generator = torch.Generator()  # its own: the run's must not depend on when a loader starts
        self.loader = DataLoader(dataset, num_workers=workers, collate_fn=_collate, generator=generator, **options)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.loader:
            if isinstance(batch, ImageError):
                told = f"{batch}; `ramatch data check` lists every unreadable image"
                raise ImageError(told, name=batch.name, reason=batch.reason)
            yield batch


def _collate(items: Any) -> Any:
    if isinstance(items, ImageError):
        return items
    return torch.stack([pixels for pixels, _ in items]), torch.tensor([index for _, index in items])


def decode_all(
    records: Sequence[Any], preprocess: Preprocess, *, workers: int | None = None, progress: bool = False
) -> Tensor:
    """All pictures of caption or label records: uint8 (n, 3, H, W). `workers`: processes; None: as many as help."""
    if len(records) <= FEW:
        workers = 0
    elif workers is None:
        workers = min(16, os.cpu_count() or 1)
    out = torch.empty(len(records), 3, *preprocess.size, dtype=torch.uint8)
    line = Progress(len(records), "decoding", enabled=progress)
    for pixels, rows in ImageLoader(ImageDataset(records, preprocess), workers=workers, batch_size=128):
        out[rows] = pixels
        line.update(int(rows[-1]) + 1)
    line.clear()
    return out


class ImageCache:
    """Decoded, resized images by source (150 kB each at 224 px): what several runs or tests share is decoded once."""

    def __init__(self, workers: int = 4) -> None:
        self.workers = workers
        self._kept: dict[tuple[str, Preprocess], Tensor] = {}

    def stack(self, records: Sequence[Any], preprocess: Preprocess, *, progress: bool = True) -> Tensor:
        """uint8 (n, 3, H, W) of these records, plainly resized."""
        names = [(str(record.image), preprocess) for record in records]
        new = [i for i, name in enumerate(names) if name not in self._kept]
        fresh = decode_all([records[i] for i in new], preprocess, workers=self.workers, progress=progress)
        self._kept.update(zip((names[i] for i in new), fresh, strict=True))
        return fresh if len(new) == len(names) else torch.stack([self._kept[name] for name in names])
