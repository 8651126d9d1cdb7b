"""Images in batches: one or many, and files that are decoded in the background while others are recognized."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import RamatchError
from .images import ImageError

Loaded = tuple[Tensor, "str | None", tuple[int, int]]  # uint8 pixels (3, H, W), source, original (width, height)


def is_single(images: Any) -> bool:
    """Whether this is one image rather than a collection of them."""
    if isinstance(images, (np.ndarray, Tensor)):
        return images.ndim != 4
    one = isinstance(images, (str, os.PathLike, bytes, bytearray, memoryview))
    return one or hasattr(images, "read") or hasattr(images, "convert")


def chunks(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items, the last one shorter."""
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def source_of(image: Any) -> str | None:
    """What to call this image: its path, or the name a file object or PIL image carries."""
    if isinstance(image, (str, os.PathLike)):
        return str(image)
    name = getattr(image, "filename", None) or getattr(image, "name", None)
    return name if isinstance(name, str) and name else None


def prefetch(
    paths: Sequence[str | Path],
    load: Callable[[str | Path], Loaded],
    batch_size: int,
    failed: list[tuple[str, str]] | None = None,
    progress: bool = False,
) -> Iterator[list[Loaded]]:
    """Batches of files in order, the next ones decoded in the background meanwhile; memory does not grow.

    A file that cannot be read is added to `failed` as (path, reason) and skipped; without that list it is an error.
    """
    from tqdm import tqdm  # comes with transformers

    def decode(path: str | Path) -> Loaded | ImageError:
        try:
            return load(path)
        except RamatchError as error:
            if failed is None:
                raise
            return ImageError(str(error), name=str(path), reason=getattr(error, "reason", None))

    ahead: deque[Future] = deque()
    waiting = iter(paths)
    bar = tqdm(total=len(paths), unit="img", disable=not progress, leave=False)
    with ThreadPoolExecutor(max_workers=2) as pool:
        try:
            ahead.extend(pool.submit(decode, path) for path in islice(waiting, 2 * batch_size))
            while ahead:
                batch: list[Loaded] = []
                while ahead and len(batch) < batch_size:
                    item = ahead.popleft().result()
                    ahead.extend(pool.submit(decode, path) for path in islice(waiting, 1))
                    bar.update()
                    if not isinstance(item, ImageError):
                        batch.append(item)
                    elif failed is not None:
                        failed.append((str(item.name), item.reason))
                if batch:
                    yield batch
        finally:
            for future in ahead:
                future.cancel()
            bar.close()
