"""Ray Data: units of work are decoded in processes of their own, and flow through a pool of actors, each with a model.

Ray does what a killed process had begun once more; whatever is written must bear that (see `parts`).
"""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RamatchError, require
from .pieces import Piece, from_table, to_table

BLOCKS = 10_000  # tasks that units are handed out in, at most: Ray's scheduler has work with each
DECODERS = 0.1  # of the processors, where the model needs them itself
ACTOR_CORES = 2  # of a model on the CPU


@dataclass(frozen=True)
class Pool:
    """What the cluster has room for. actors: processes with a model; gpus: of each; cpus: of each, and for decoding;
    threads: of torch in each."""

    actors: int
    gpus: float
    cpus: float
    decode_cpus: float
    threads: int


def start() -> Any:
    """Ray: the cluster that RAY_ADDRESS names or that this program is in already, else one of its own on this
    machine."""
    ray: Any = require("ray", extra="scale")
    require("ray.data", extra="scale")
    if not ray.is_initialized():
        options = {"include_dashboard": False} if not os.environ.get("RAY_ADDRESS") else {}
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    return ray


def pool(device: str | None, actors: int | None = None) -> Pool:
    """One actor on each GPU, if there are any and no CPU was asked for; else one for each two cores."""
    ray: Any = require("ray", extra="scale")
    found = ray.cluster_resources()
    cores, gpus = found.get("CPU", 1.0), int(found.get("GPU", 0))
    if device is not None and device.startswith("cuda") and not gpus:
        raise RamatchError("device 'cuda' was asked for, but Ray sees no GPU; use --device cpu")
    if gpus and (device is None or device.startswith("cuda")):
        return Pool(actors or gpus, gpus / max(actors or gpus, gpus), 0.0, 1.0, 0)
    actors = actors or max(1, round(cores / ACTOR_CORES))
    return Pool(actors, 0.0, (1 - DECODERS) * cores / actors, DECODERS, max(1, int(cores // actors)))


def flow(
    work: Sequence[Any],
    decode: Callable[[Any], Iterable[Piece]],
    actor: Callable[..., Callable[[Piece], dict[str, Any]]],
    arguments: tuple[Any, ...],
    pool: Pool,
) -> Iterator[dict[str, Any]]:
    """What `actor(*arguments)`, made once in each process of the pool, gives for each piece of all work, in any
    order."""
    ray: Any = start()
    data = ray.data.from_items(
        [{"work": pickle.dumps(one)} for one in work], override_num_blocks=min(len(work), BLOCKS)
    )
    given, logger = ray.put(arguments), logging.getLogger("ray.data")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what it tells of its plans, and warnings that a model is slow to load
    decoded = data.map_batches(
        _Decode(decode), batch_size=1, batch_format="pyarrow", num_cpus=pool.decode_cpus, zero_copy_batch=True
    )
    found = decoded.map_batches(
        _Actor,
        compute=ray.data.ActorPoolStrategy(size=pool.actors),
        batch_size=1,
        batch_format="pyarrow",
        num_gpus=pool.gpus or None,
        num_cpus=pool.cpus or None,
        fn_constructor_args=(actor, [given], pool.threads),
    )
    current = ray.data.DataContext.get_current()
    bars = current.enable_progress_bars
    for context in (current, data.context, decoded.context, found.context):  # versions of Ray differ in which they read
        context.enable_progress_bars = context.print_on_execution_start = False
    for context in (data.context, decoded.context, found.context):
        context.target_max_block_size = 1  # a piece is a block: none waits for others, none is done again with others
    try:
        for row in found.iter_rows():
            yield pickle.loads(row["found"])
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or ["?"]
        told = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit): ", line)]
        raise RamatchError(f"a process of the cluster failed: {told[-1] if told else lines[0]}") from error
    finally:
        current.enable_progress_bars = bars
        logger.setLevel(level)


class _Decode:
    """A row of pickled work → one row of Arrow for each piece."""

    def __init__(self, decode: Callable[[Any], Iterable[Piece]]) -> None:
        self.decode = decode

    def __call__(self, table: Any) -> Iterator[Any]:
        import torch

        torch.set_num_threads(1)  # there is a process for each core
        for work in table.column("work").to_pylist():
            yield from map(to_table, self.decode(pickle.loads(work)))


class _Actor:
    """Rows of pieces → what the actor gives for each."""

    def __init__(self, actor: Callable[..., Callable[[Piece], dict[str, Any]]], given: list[Any], threads: int) -> None:
        import torch

        if threads:
            torch.set_num_threads(threads)
        self.call = actor(*require("ray", extra="scale").get(given[0]))

    def __call__(self, table: Any) -> dict[str, list[bytes]]:
        return {"found": [pickle.dumps(self.call(piece)) for piece in from_table(table)]}
