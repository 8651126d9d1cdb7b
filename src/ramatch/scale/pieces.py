"""Units of work, decoded: pieces of resized images that travel from the processes that decode to those with a model."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..data.images import full_size, load_image
from ..data.prefetch import Loaded, chunks
from ..errors import RamatchError, require
from ..modeling.preprocess import Preprocess
from ..prediction import Unreadable
from .inputs import Remote, Unit, images_of

ATTEMPTS, PAUSE_S = 3, 0.5  # at an image in a store, which now and then does not answer
Many = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]  # `map`, or one with threads


@dataclass(frozen=True)
class Piece:
    """Part `number` of a unit, `last` if no other follows: images in order, each with its (width, height) or why it
    could not be read, and the pixels uint8 (n, 3, H, W) of those that could."""

    unit: str
    number: int
    last: bool
    names: tuple[Any, ...]
    found: tuple[tuple[int, int] | str, ...]
    pixels: np.ndarray

    def items(self) -> Iterator[Loaded | Unreadable]:
        rows = iter(torch.from_numpy(self.pixels))
        for name, found in zip(self.names, self.found, strict=True):
            yield Unreadable(name, found) if isinstance(found, str) else (next(rows), name, found)


def read_unit(
    unit: Unit, preprocess: Preprocess, part: int, done: Collection[int] = (), many: Many = map
) -> Iterator[Piece]:
    """The pieces of a unit but for those that are `done` already, whose images are passed over."""
    waiting: tuple[int, list[tuple[str, Any]]] | None = None
    for number, images in enumerate(chunks(images_of(unit), part)):
        if waiting is not None and waiting[0] not in done:
            yield _decoded(unit, *waiting, preprocess, many)
        waiting = number, images
    number, images = waiting or (0, [])  # a shard without images has one empty piece, which says so
    if number not in done:
        yield replace(_decoded(unit, number, images, preprocess, many), last=True)


def _decoded(unit: Unit, number: int, images: list[tuple[str, Any]], preprocess: Preprocess, many: Many) -> Piece:
    loaded = list(many(lambda image: _load(image[0], image[1], preprocess), images))
    names = tuple(name for name, _ in images)
    pixels = [found[0] for found in loaded if not isinstance(found, str)]
    found = tuple(found if isinstance(found, str) else found[1] for found in loaded)
    stacked = torch.stack(pixels).numpy() if pixels else np.zeros((0, 3, *preprocess.size), np.uint8)
    return Piece(unit.key, number, False, names, found, stacked)


def _load(name: str, source: Any, preprocess: Preprocess) -> tuple[torch.Tensor, tuple[int, int]] | str:
    """Pixels and full size, or why there are none."""
    try:
        if isinstance(source, Exception):
            raise source
        picture = load_image(_content(source) if isinstance(source, Remote) else source, shrink=True, name=name)
        return preprocess.resize(picture), full_size(picture)
    except RamatchError as error:
        return getattr(error, "reason", None) or str(error)


def _content(source: Remote) -> bytes:
    for attempt in range(ATTEMPTS):
        try:
            return source.read()
        except (OSError, ValueError) as error:
            if attempt + 1 == ATTEMPTS or isinstance(error, FileNotFoundError):
                raise RamatchError(f"cannot be read from its store: {error}") from error
            time.sleep(PAUSE_S * 2**attempt)
    raise AssertionError


def to_table(piece: Piece) -> Any:
    """One row of Arrow: the pixels are not copied."""
    arrow: Any = require("pyarrow", extra="scale")
    head = pickle.dumps((replace(piece, pixels=np.zeros(0, np.uint8)), piece.pixels.shape))
    data = arrow.py_buffer(np.ascontiguousarray(piece.pixels))
    offsets = arrow.py_buffer(np.array([0, data.size], np.int64))
    pixels = arrow.LargeBinaryArray.from_buffers(arrow.large_binary(), 1, [None, offsets, data])
    return arrow.table({"head": arrow.array([head]), "pixels": pixels})


def from_table(table: Any) -> list[Piece]:
    out = []
    for head, pixels in zip(table.column("head"), table.column("pixels"), strict=True):
        piece, shape = pickle.loads(head.as_py())  # written by `to_table`, in a process of the same run
        content = np.frombuffer(pixels.as_buffer(), np.uint8) if pixels.as_buffer() else np.zeros(0, np.uint8)
        out.append(replace(piece, pixels=content.copy().reshape(shape)))  # what lies in the store is read-only
    return out
