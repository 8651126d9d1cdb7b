"""Models measured on Ray: the numbers that `evaluation` wants, from many processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.annotations import Annotations
from ..data.images import ImageError
from ..errors import RamatchError
from ..evaluation.models import Scorer, Scores, TestSet, evaluate_all, scores_of
from ..evaluation.protocol import Report
from ..modeling.preprocess import Preprocess
from ..modeling.ram import RAM
from ..progress import Progress
from . import cluster
from .pieces import Piece

Window = tuple[int, Sequence[Any]]  # the first image's number, and records


def evaluate_on_ray(
    model: str | Path,
    data: str | os.PathLike | TestSet,
    protocol: str = "gzsl",
    *,
    device: str | None = None,
    actors: int | None = None,
    precision: str | None = None,
    **options: Any,
) -> dict[str, Report]:
    """As `evaluate_all`, whose other options it takes, on the processors or GPUs of a Ray cluster, by torch."""
    if (runtime := options.pop("runtime", "torch")) not in ("auto", "torch"):
        raise RamatchError(f"--engine ray evaluates by torch, not by {runtime}")
    cluster.start()
    pool = cluster.pool(device, actors)
    precision = precision or ("bf16" if pool.gpus else None)  # which a GPU gets without a cluster
    collect = partial(collect_on_ray, pool=pool)
    return evaluate_all(model, data, protocol, device="cpu", precision=precision, collect=collect, **options)


def collect_on_ray(
    ram: RAM,
    data: Annotations,
    *,
    pool: cluster.Pool,
    batch_size: int = 64,
    progress: bool = True,
    what: str = "evaluating",
    fast: bool | None = None,
) -> Scores:
    """As `collect_scores`: images are decoded in processes of their own and scored by the pool's actors."""
    records = data.records
    work: list[Window] = [(at, records[at : at + batch_size]) for at in range(0, len(records), batch_size)]
    found = np.full((len(records), len(data.classes), 4), np.nan, np.float32)
    given = (ram.eval(), tuple(data.classes), batch_size, "cuda" if pool.gpus else "cpu", fast)
    line, done = Progress(len(records), what, enabled=progress), 0
    for answer in cluster.flow(work, partial(_read, preprocess=ram.preprocess), _Scoring, given, pool):
        if answer["error"]:
            raise ImageError(f"{answer['error']}; `ramatch data check` lists every unreadable image")
        found[answer["rows"]] = answer["found"]
        line.update(done := done + len(answer["rows"]))
    line.clear()
    assert not np.isnan(found[:, :, 0]).any(), "an image was lost"
    with torch.no_grad():
        return scores_of(data, found, ram.encode_labels(data.classes))


def _read(window: Window, preprocess: Preprocess) -> Iterator[Piece]:
    at, records = window
    rows = tuple(range(at, at + len(records)))
    try:
        pixels = torch.stack([preprocess.resize(record.load()) for record in records]).numpy()
        yield Piece(str(at), 0, True, rows, (), pixels)
    except ImageError as error:
        yield Piece(str(at), 0, True, rows, (str(error),), np.zeros((0, 3, *preprocess.size), np.uint8))


class _Scoring:
    """Pieces → numbers of their images."""

    def __init__(self, ram: RAM, classes: tuple[str, ...], batch_size: int, device: str, fast: bool | None) -> None:
        self.scorer = Scorer(ram.to(device), classes, batch_size, fast)

    def __call__(self, piece: Piece) -> dict[str, Any]:
        error = piece.found[0] if piece.found else None
        found = None if error else self.scorer(torch.from_numpy(piece.pixels)).cpu().numpy()
        return {"rows": list(piece.names), "found": found, "error": error}
