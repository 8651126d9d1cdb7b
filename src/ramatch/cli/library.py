"""ramatch index, ramatch search: a photo library on disk."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RamatchError, printable
from ._shared import add_engine, add_kinds, add_model, cell, count, load_recognizer, model_options, pick, share

if TYPE_CHECKING:
    from ..library import Hit, Library
    from ..library.update import Update

HOME = ".ramatch"  # in the folder of photos, unless told
FORMATS = ("table", "json", "jsonl", "csv", "paths")
TOP = 20


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "index",
        help="index a folder of photos, so that it can be searched",
        description="Bring the index of a folder up to date: only new and changed photos are looked at. It may be "
        "stopped at any moment and goes on from there. Unreadable files are named; the exit code is then 1.",
    )
    parser.add_argument("folder", metavar="DIR")
    _add_library(parser)
    add_model(parser)
    task = parser.add_mutually_exclusive_group().add_argument
    task("--status", action="store_true", help="only say what is in the index, as JSON")
    task("--verify", action="store_true", help="only read the whole index back; damaged entries are dropped")
    parser.add_argument("--remove-missing", action="store_true", help="afterwards forget photos that are gone for good")
    parser.add_argument("--batch-size", type=count, default=16, metavar="N")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_engine(parser, "ray: read and encode on a Ray cluster (extra 'scale'); this process writes")
    parser.set_defaults(run=run_index)
    parser = verbs.add_parser(
        "search",
        help="find photos in an indexed folder",
        description='Words that shall all be there: "dog beach". A minus before a word: it shall not. Several '
        "arguments, or commas between them, are labels of several words: hot dog, beach.",
    )
    add = parser.add_argument
    add("query", nargs="*", metavar="WORDS")
    add("--not", dest="without", action="append", default=[], metavar="LABEL", help="as a minus before it")
    add("--like", metavar="PHOTO", help="photos that resemble this one (together with words, if given)")
    add("--in", dest="folder", default=".", metavar="DIR", help="the indexed folder (default: this one)")
    _add_library(parser)
    add_model(parser)
    add_kinds(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--top", type=count, metavar="K", help=f"at most K (default: {TOP} without --threshold)")
    group.add_argument("--threshold", type=share, metavar="P", help="only photos with at least this probability")
    group.add_argument("--sort", choices=("probability", "name", "date", "size"), default="probability")
    group.add_argument("--format", choices=FORMATS, default="table")
    group.add_argument("-0", "--null", action="store_true", help="paths only, each ended by a zero byte (for xargs -0)")
    group.add_argument("--report", metavar="F.html", help="also write one self-contained page with small pictures")
    parser.set_defaults(run=run_search)


def _add_library(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--library", metavar="PATH", help=f"where the index lies (default: DIR/{HOME})")


def _open(arguments: argparse.Namespace, create: bool) -> Library:
    from ..library import Library

    if not Path(arguments.folder).is_dir():
        raise RamatchError(f"{arguments.folder} is not a folder")
    return Library.open(arguments.library or Path(arguments.folder) / HOME, create=create)


def run_index(arguments: argparse.Namespace) -> int:
    with _open(arguments, create=not (arguments.status or arguments.verify)) as library:
        if arguments.status:
            print(json.dumps(library.status(), indent=1))
            return 0
        if arguments.verify:
            problems = library.verify()
            print("\n".join(problems) or f"{library.path}: all in order")
            return 1 if problems else 0
        update = _update(library, arguments)
        counts = {name: value for name, value in dataclasses.asdict(update).items() if name != "failed"}
        if arguments.remove_missing:
            counts["removed"] = library.remove_missing()
        print(", ".join(f"{value} {name.replace('_', ' ')}" for name, value in counts.items()))
        for path, reason in update.failed:
            print(f"ramatch: could not read {path}: {reason}", file=sys.stderr)
        return 1 if update.failed else 0


def _update(library: Library, arguments: argparse.Namespace) -> Update:
    progress = not arguments.quiet and sys.stderr.isatty()
    if arguments.engine == "ray":
        from ..scale.index import update_on_ray
        from ..scale.tag import Job

        options = tuple((name, value) for name, value in model_options(arguments).items() if name != "device")
        job = Job(options=options, **pick(arguments, "model", "batch_size", "device"))
        return update_on_ray(library, arguments.folder, job, actors=arguments.actors, progress=progress)
    recognizer = load_recognizer(arguments, cache=0)
    return library.update(arguments.folder, recognizer, batch_size=arguments.batch_size, progress=progress)


def run_search(arguments: argparse.Namespace) -> int:
    from ..library.search import parse_query

    query = parse_query(arguments.query, arguments.without)
    with _open(arguments, create=False) as library:
        recognizer = load_recognizer(arguments, cache=0)
        top = arguments.top or (None if arguments.threshold is not None else TOP)
        hits = library.search(
            query, recognizer, like=arguments.like, top=top, threshold=arguments.threshold, sort=arguments.sort
        )
        _print(hits, "null" if arguments.null else arguments.format)
        if arguments.report:
            _report(library, hits, arguments.report, recognizer.calibrated)
        if not recognizer.calibrated:
            note = "the numbers are relative: how far a photo stands out from the others; see ramatch calibrate"
            print(f"ramatch: note: '{arguments.model}' is not calibrated: {note}", file=sys.stderr)
    return 0


def _print(hits: list[Hit], style: str) -> None:
    rows = [{**hit.to_dict(), "image": _shown(hit.path)} for hit in hits]
    if style in ("paths", "null"):
        end = "\0" if style == "null" else "\n"
        sys.stdout.flush()  # names as the disk has them, also those that are not text
        os.write(sys.stdout.fileno(), b"".join(os.fsencode(row["image"] + end) for row in rows))
    elif style == "json":
        print(json.dumps(rows, ensure_ascii=False, indent=1))
    elif style == "jsonl":
        print("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), end="")
    elif style == "csv":
        names = ["image", "probability", "relative", "similarity", "date", "size", "width", "height"]
        writer = csv.DictWriter(sys.stdout, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, "image": cell(row["image"])} for row in rows)
    else:
        for hit, row in zip(hits, rows, strict=True):
            labels = "  ".join(f"{label} {p:.2f}" for label, p in hit.labels.items())
            print(f"{hit.probability:5.2f}  {printable(row['image'])}  {printable(labels)}".rstrip())
        if not hits:
            print("no photo fits", file=sys.stderr)


def _shown(path: Path) -> str:
    """Short where the photo lies below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _report(library: Library, hits: list[Hit], path: str, calibrated: bool) -> None:
    import numpy as np

    from ..prediction import Prediction
    from ..viz.report import write_report

    def page(hit: Hit) -> Prediction:
        labels = hit.labels or {"similarity": max(hit.similarity or 0.0, 0.0)}
        values = np.array(list(labels.values()))
        return Prediction(tuple(labels), values, values, calibrated, (1, 1), source=str(hit.path))

    write_report(map(page, hits), (library.thumbnail(hit.photo) for hit in hits), path, maps=False)
    print(f"ramatch: wrote {path}", file=sys.stderr)
