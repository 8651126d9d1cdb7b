"""Trunks of images seen before, so that a new vocabulary does not run the image tower again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

import torch
from torch import Tensor

from .types import Trunk


class TrunkCache:
    """The last `size` images' trunks, by their pixels; the least recently used goes first. Threads may share one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._trunks: OrderedDict[str, Trunk] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._trunks)

    @property
    def tensors(self) -> list[Tensor]:
        """Everything that is kept."""
        return [tensor for trunk in self._trunks.values() for tensor in trunk.tensors]

    def get(self, images: Sequence[Tensor], make: Callable[[Tensor], Trunk]) -> Trunk:
        """Trunk of a batch of uint8 images (3, H, W); `make` gets the new ones, each once, as (B, 3, H, W)."""
        if not self.size:
            return make(torch.stack(list(images)))
        keys = [_key(image) for image in images]
        with self._lock:
            found = {key: self._trunks[key] for key in keys if key in self._trunks}
            for key in found:
                self._trunks.move_to_end(key)
        fresh = {key: image for key, image in zip(keys, images, strict=True) if key not in found}
        if not fresh:
            return Trunk.cat([found[key] for key in keys])
        made = make(torch.stack(list(fresh.values())))
        rows = {key: made[i : i + 1] for i, key in enumerate(fresh)}
        with self._lock:
            for key in list(fresh)[-self.size :]:
                self._trunks[key] = rows[key].clone()  # a slice would hold the whole batch in memory
            while len(self._trunks) > self.size:
                self._trunks.popitem(last=False)
        # the usual case is that all are new: nothing to put together
        return made if list(fresh) == keys else Trunk.cat([found[key] if key in found else rows[key] for key in keys])


def _key(image: Tensor) -> str:
    return hashlib.blake2b(image.cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
