"""ramatch tag --engine: folders, tar shards, parquet files and stores, in parts that survive crashes."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..config import ENGINES
from ..errors import RamatchError, printable
from ._shared import add_engine, count, model_options, pick
from .tagfile import settings_of

REFUSED = {"list": "--from", "report": "--report", "write": "--write", "remove": "--remove", "maps": "--maps"}
NAMED = 5  # of the files left out


def add_scale(parser: Any) -> None:
    group = parser.add_argument_group("many images (extra 'scale'; docs/scale.md)")
    what = "ray: on all cores and GPUs of a Ray cluster; local: here. Takes tar shards, parquet files and addresses "
    add_engine(group, what + "(s3://…) too, and writes .parquet, .jsonl or a folder of parquet files")
    what = "images of one part of the output (default: 256)"
    group.add_argument("--part-size", type=count, metavar="N", help=what)


def run_engine(arguments: argparse.Namespace, labels: list[str] | None, top: int | None) -> int:
    from ..scale.inputs import PART, list_units, nothing
    from ..scale.tag import Job, tag_many

    _check(arguments)
    part = arguments.part_size or PART
    listing = list_units(arguments.images, part=part, every=arguments.every)
    if not listing.units:
        raise nothing(listing, arguments.images)
    options = {name: value for name, value in model_options(arguments).items() if name != "device"}
    options["kinds"] = not arguments.no_kinds
    chosen = pick(arguments, "model", "threshold", "matcher", "batch_size", "device")
    job = Job(labels=labels, top=top, options=tuple(options.items()), **chosen)
    mode = "resume" if arguments.resume else "overwrite" if arguments.overwrite else "new"
    how = pick(arguments, "engine", "actors") | {"progress": not arguments.quiet and sys.stderr.isatty()}
    done = tag_many(listing, arguments.out, job, settings=settings_of(arguments, labels), part=part, mode=mode, **how)
    told = f"{done.images:,} images in {arguments.out}, {done.before:,} of them from before"
    print(f"ramatch: {told}; {done.rate:,.1f} images/s", file=sys.stderr)
    if listing.skipped:
        named = ", ".join(map(printable, listing.skipped[:NAMED])) + (" …" if listing.skipped[NAMED:] else "")
        print(f"ramatch: note: left out {len(listing.skipped)} other files: {named}", file=sys.stderr)
    for name, reason in listing.missing:
        print(f"ramatch: could not read {printable(name)}: {printable(reason)}", file=sys.stderr)
    if done.failed:
        print(f"ramatch: {done.failed} of {done.images} images could not be read: rows with an error", file=sys.stderr)
    return 1 if done.failed or listing.missing else 0


def _check(arguments: argparse.Namespace) -> None:
    if not arguments.engine:
        raise RamatchError(f"--actors and --part-size need --engine: {', '.join(ENGINES)}")
    for name, option in REFUSED.items():
        if getattr(arguments, name, None):
            raise RamatchError(f"{option} does not go with --engine, which writes rows only")
    if not arguments.images or "-" in arguments.images:
        raise RamatchError("--engine needs files, folders, globs or addresses to read")
    if not arguments.out:
        raise RamatchError("--engine needs --out: a .parquet or .jsonl file, or a folder for parquet files")
    if arguments.format or arguments.out.lower().endswith((".json", ".csv", ".txt")):
        raise RamatchError("--engine writes .parquet, .jsonl or a folder of parquet files, by the name of --out")
