"""Annotations as a torch dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ramatch.data.annotations import Annotations
from ramatch.data.images import MAX_PIXELS
from ramatch.data.sampler import Draw, sample_seed


class ImageLabelDataset(Dataset[tuple[Any, Tensor, int]]):
    """(image, target, index): what `transform` makes of the picture, multi-hot (N,) float, position.

    Index with an int, or with a `Draw` from `ResumableSampler`: then the transform's randomness comes from
    (seed, epoch, index) alone, whatever the worker, and torch's own generator is left as it was.
    """

    def __init__(
        self,
        annotations: Annotations,
        transform: Callable[[Any], Any] | None = None,
        *,
        seed: int = 0,
        max_pixels: int | None = MAX_PIXELS,
    ) -> None:
        self.annotations = annotations
        self.transform = transform
        self.seed = seed
        self.max_pixels = max_pixels
        self._class_index = {name: i for i, name in enumerate(annotations.classes)}

    @property
    def classes(self) -> tuple[str, ...]:
        return self.annotations.classes

    def __len__(self) -> int:
        return len(self.annotations)

    def __getitem__(self, item: int | Draw) -> tuple[Any, Tensor, int]:
        index, epoch = item if isinstance(item, Draw) else (int(item), None)
        record = self.annotations.records[index]
        image: Any = record.load(self.max_pixels)
        if self.transform is not None:
            image = self._transform(image, index, epoch)
        target = torch.zeros(len(self._class_index))
        target[[self._class_index[label] for label in record.labels]] = 1.0
        return image, target, index

    def _transform(self, image: Any, index: int, epoch: int | None) -> Any:
        assert self.transform is not None
        if epoch is None:
            return self.transform(image)
        # the CPU generator only: torch.manual_seed would reseed the GPU of a run without workers as well
        generator = torch.default_generator
        state = generator.get_state()
        try:
            generator.manual_seed(sample_seed(self.seed, epoch, index))
            return self.transform(image)
        finally:
            generator.set_state(state)
