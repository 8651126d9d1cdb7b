"""A photo library indexed on Ray: files are read and encoded by many processes; one of them, this one, writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.prefetch import chunks
from ..library import Library
from ..library.features import Encoder
from ..library.update import Entry, Here, Reader, Update
from . import cluster
from .pieces import Piece
from .tag import Job, Model


class OnRay(Here):
    """How files become features (see `Here`)."""

    def __init__(self, model: Model, batch_size: int, pool: cluster.Pool) -> None:
        self.model, self.batch_size, self.pool = model, batch_size, pool

    def entries(self, reader: Reader, paths: Sequence[str]) -> Iterator[Entry]:
        if not paths:
            return
        reader = replace(reader, known=frozenset(reader.known))  # as it is now: it travels
        work = list(chunks(paths, self.batch_size))
        for entries in cluster.flow(work, partial(_read, reader=reader), _Encoding, (self.model,), self.pool):
            yield from entries["entries"]

    def features(self, decoded: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([image for image, _ in decoded]), np.stack([regions for _, regions in decoded])


def update_on_ray(
    library: Library,
    folder: str | Path,
    job: Job,
    *,
    actors: int | None = None,
    progress: bool = False,
) -> Update:
    """As `Library.update` with the job's model, device and batch size."""
    cluster.start()
    pool = cluster.pool(job.device, actors)
    model = Model(job, "cuda" if pool.gpus else "cpu")
    recognizer, way = model.recognizer("cpu"), OnRay(model, job.batch_size, pool)
    return library.update(folder, recognizer, batch_size=job.batch_size, progress=progress, way=way)


def _read(paths: list[str], reader: Reader) -> Iterator[Piece]:
    entries = [reader(path) for path in paths]
    pixels = [entry.decoded[0] for entry in entries if entry.decoded]
    rest = tuple(e._replace(decoded=(None, *e.decoded[1:])) if e.decoded else e for e in entries)
    stacked = torch.stack(pixels).numpy() if pixels else np.zeros((0, 3, *reader.preprocess.size), np.uint8)
    yield Piece("", 0, True, rest, (), stacked)


class _Encoding:
    """Pieces → entries with features in the place of pixels."""

    def __init__(self, model: Model) -> None:
        self.encoder = Encoder(model.recognizer())

    def __call__(self, piece: Piece) -> dict[str, Any]:
        found = iter(zip(*self.encoder(torch.from_numpy(piece.pixels)), strict=True) if len(piece.pixels) else ())
        entries = [e._replace(decoded=(next(found), *e.decoded[1:])) if e.decoded else e for e in piece.names]
        return {"entries": entries}
