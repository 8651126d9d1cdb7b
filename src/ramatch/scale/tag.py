"""Tag any number of images, in this process or on a Ray cluster, into parts that survive crashes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..assets import GENERAL
from ..config import ENGINES
from ..data.prefetch import ahead, chunks
from ..errors import RamatchError
from ..modeling.preprocess import Preprocess
from ..prediction import Prediction, Unreadable
from ..progress import Progress
from ..recognizer import Recognizer, pick_device
from . import cluster
from .inputs import PART, Listing, Unit
from .parts import Parts, is_complete, to_row
from .pieces import Many, Piece, read_unit
from .stores import is_address

MERGED = (".parquet", ".jsonl")
Work = tuple[Unit, set[int]]  # and the numbers of its parts that are there


@dataclass(frozen=True)
class Job:
    """What is done with each image. labels: None for the general vocabulary."""

    model: str | Path = "ramatch-mini"
    labels: Sequence[str] | None = None
    top: int | None = None
    threshold: float | None = None
    matcher: str | None = None
    batch_size: int = 16
    device: str | None = None
    options: tuple[tuple[str, Any], ...] = ()  # of `Recognizer.from_pretrained`


@dataclass(frozen=True)
class Done:
    """images: in the output, failed: those of them that could not be read, before: that were there already; seconds: of
    the others, with the time that it took to begin."""

    images: int
    failed: int
    before: int
    parts: int
    seconds: float

    @property
    def rate(self) -> float:
        return (self.images - self.before) / max(self.seconds, 1e-9)


class Model:
    """A loaded model that can be sent to another process, and made into a recognizer there."""

    def __init__(self, job: Job, device: str) -> None:
        gpu = device.startswith("cuda")  # which this process may not have
        options: dict[str, Any] = dict(job.options) | ({"dtype": torch.bfloat16, "runtime": "torch"} if gpu else {})
        loaded = Recognizer.from_pretrained(job.model, device="cpu" if gpu else device, cache=0, **options)
        self.ram, self.device, self.preprocess = loaded.ram, device, loaded.ram.preprocess
        self.rest: dict[str, Any] = {
            "calibrator": loaded.calibrator,
            "name": loaded.name,
            "kinds": loaded.kinds,
            "cache": 0,
            "runtime": loaded.runtime,  # chosen here, the same for all
        }

    def recognizer(self, device: str | None = None) -> Recognizer:
        return Recognizer(self.ram.to(device or self.device), **self.rest)


class Tagger:
    """Pieces → parts of the output. Made once in each process, with the vocabulary encoded once."""

    def __init__(self, model: Model, job: Job, address: str) -> None:
        self.recognizer, self.job, self.parts = model.recognizer(), job, Parts(address)
        own = self.recognizer.ram.backbone.given_labels
        self.recognizer.set_vocabulary(list(job.labels) if job.labels else list(own) or GENERAL)

    def __call__(self, piece: Piece) -> dict[str, Any]:
        rows = self.rows(self.predict(piece))
        self.parts.write(piece.unit, piece.number, piece.last, rows)
        return {"rows": len(rows), "failed": sum("error" in row for row in rows)}

    def predict(self, piece: Piece) -> list[Prediction | Unreadable]:
        items, job = list(piece.items()), self.job
        read = [item for item in items if not isinstance(item, Unreadable)]
        answers = (
            answer
            for batch in chunks(read, job.batch_size)
            for answer in self.recognizer.predict_loaded(batch, matcher=job.matcher)
        )
        return [item if isinstance(item, Unreadable) else next(answers) for item in items]

    def rows(self, found: Sequence[Prediction | Unreadable]) -> list[dict[str, Any]]:
        return [to_row(each, top=self.job.top, threshold=self.job.threshold) for each in found]


def tag_many(
    listing: Listing,
    out: str,
    job: Job,
    *,
    settings: dict[str, Any] | None = None,
    part: int = PART,
    mode: str = "new",
    engine: str = "ray",
    **options: Any,
) -> Done:
    """Tag what is listed into a folder of parquet files, or into one .parquet or .jsonl file.

    settings: all that answers depend on, for a later run with mode "resume" to compare. mode: "new" (there must be none
    yet), "resume" or "overwrite". engine: one of ENGINES. options: `actors` (processes with a model, for ray) and
    `progress`. Rows are those of `Prediction.to_dict`, or have an `error`; in one file they are in the order of the
    input.
    """
    if engine not in ENGINES:
        raise RamatchError(f"unknown engine '{engine}'; known: {', '.join(ENGINES)}")
    single = out.lower().endswith(MERGED)
    if single and is_address(out):
        raise RamatchError(f"{out}: one file can be written to a disk only; name a folder of the store")
    if single and os.path.exists(out) and mode != "overwrite":
        raise RamatchError(f"{out} exists; --overwrite to begin anew")
    parts = Parts(f"{out}.parts" if single else out)
    if mode == "overwrite":
        parts.discard()
    begun = time.monotonic()
    found = parts.begin(listing, (settings or {}) | {"part": part}, resume=mode == "resume")
    todo = [(unit, set(found.get(unit.key, ()))) for unit in listing.units if not is_complete(found.get(unit.key, {}))]
    before = sum(about["rows"] for each in found.values() for about in each.values())
    if todo:
        _run(todo, parts.folder.address, job, part, engine, total=listing.known, done=before, **options)
    images, failed, count = parts.total(listing.units)
    seconds = time.monotonic() - begun
    if single:
        parts.merge(listing.units, out)
        parts.discard()
    return Done(images, failed, before, count, seconds)


def _run(
    todo: list[Work],
    address: str,
    job: Job,
    part: int,
    engine: str,
    *,
    actors: int | None = None,
    progress: bool = False,
    **counts: int,
) -> None:
    receipts: Iterator[dict[str, Any]]
    if engine == "ray":
        cluster.start()
        pool = cluster.pool(job.device, actors)
        model = Model(job, "cuda" if pool.gpus else "cpu")
        read = partial(_read, preprocess=model.preprocess, part=part)
        receipts = cluster.flow(todo, read, Tagger, (model, job, address), pool)
    else:
        model = Model(job, str(pick_device(job.device)))
        tagger = Tagger(model, job, address)
        many = partial(ahead, count=2 * job.batch_size)
        pieces = (piece for work in todo for piece in _read(work, model.preprocess, part, many))
        receipts = map(tagger, pieces)
    line, done = Progress(counts["total"], "tagging", enabled=progress), counts["done"]
    line.start(done)
    for receipt in receipts:
        done += receipt["rows"]
        line.total = max(line.total, done)  # what is in tar shards was not known
        line.update(done)
    line.clear()


def _read(work: Work, preprocess: Preprocess, part: int, many: Many = map) -> Iterator[Piece]:
    unit, done = work
    return read_unit(unit, preprocess, part, done, many)
