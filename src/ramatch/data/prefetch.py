"""Images in batches: one or many, and files that are decoded in the background while others are recognized."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from ..errors import RamatchError
from .images import ImageError, name_of

Loaded = tuple[Tensor, "str | None", tuple[int, int]]  # uint8 pixels (3, H, W), source, original (width, height)

Item = TypeVar("Item")
Result = TypeVar("Result")


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


def ahead(call: Callable[[Item], Result], items: Iterable[Item], count: int) -> Iterator[Result]:
    """Results in order, while two threads work on the next `count` items; memory does not grow."""
    waiting, futures = iter(items), deque[Future[Result]]()
    with ThreadPoolExecutor(max_workers=2) as pool:
        try:
            futures.extend(pool.submit(call, item) for item in islice(waiting, count))
            while futures:
                result = futures.popleft().result()
                futures.extend(pool.submit(call, item) for item in islice(waiting, 1))
                yield result
        finally:
            for future in futures:
                future.cancel()


def prefetch(
    paths: Sequence[str | Path],
    load: Callable[[str | Path], Loaded],
    batch_size: int,
    failed: list[tuple[str, str]] | None = None,
    progress: bool = False,
) -> Iterator[list[Loaded]]:
    """Batches of files in order, the next ones decoded in the background meanwhile.

    A file that cannot be read is added to `failed` as (path, reason) and skipped; without that list it is an error.
    """
    from tqdm import tqdm  # comes with transformers

    def decode(path: str | Path) -> Loaded | ImageError:
        try:
            return load(path)
        except RamatchError as error:
            if failed is None:
                raise
            return ImageError(str(error), name=name_of(path), reason=getattr(error, "reason", None))

    def readable() -> Iterator[Loaded]:
        found = ahead(decode, paths, 2 * batch_size)
        for item in tqdm(found, total=len(paths), unit="img", disable=not progress, leave=False):
            if not isinstance(item, ImageError):
                yield item
            elif failed is not None:
                failed.append((str(item.name), item.reason))

    return chunks(readable(), batch_size)
