"""ramatch tag: labels of images."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..errors import RamatchError
from ._shared import add_labels, add_model, labels_of, load_recognizer

FORMATS = ("table", "json", "csv", "jsonl")


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "tag",
        help="say which labels are in images",
        description="Say which labels are in images, how sure, and (with --report or --maps) where. Unreadable images are "
        "reported and counted at the end; the exit code is then 1.",
    )
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="files, folders or globs")
    add_labels(parser)
    add_model(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--top", type=_positive, metavar="K", help="at most K labels per image (default: 5 without --threshold)"
    )
    group.add_argument("--threshold", type=_share, metavar="P", help="only labels with at least this probability")
    group.add_argument("--format", choices=FORMATS, default="table")
    group.add_argument("--out", metavar="F", help="write to a file instead of standard output")
    group.add_argument("--maps", action="store_true", help="with json or jsonl: each label's region map")
    group.add_argument(
        "--report", metavar="F.html", help="also write one self-contained page with images, labels and maps"
    )
    group.add_argument(
        "--matcher", choices=("kcot", "ot", "bipartite", "average", "reweight"), help="instead of the model's own"
    )
    group.add_argument("--batch-size", type=_positive, default=16, metavar="N")
    group.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..data.images import find_images
    from ..recognizer import predict_files

    labels = labels_of(arguments)
    paths = find_images(arguments.images)
    if arguments.maps and arguments.format not in ("json", "jsonl"):
        raise RamatchError("--maps needs --format json or jsonl: a table has no room for maps")
    recognizer = load_recognizer(arguments)
    if arguments.threshold is not None and not recognizer.calibrated:
        print(
            f"ramatch: note: '{arguments.model}' is not calibrated, so its probabilities are rough; see ramatch calibrate",
            file=sys.stderr,
        )
    recognizer.set_vocabulary(labels)
    top = arguments.top or (None if arguments.threshold is not None else 5)
    failed: list[tuple[str, str]] = []
    kept: list[Any] = []

    def answers() -> Iterator[Any]:
        found = predict_files(
            recognizer, paths, maps=arguments.maps or bool(arguments.report), matcher=arguments.matcher,
            batch_size=arguments.batch_size, failed=failed, progress=not arguments.quiet and sys.stderr.isatty(),
        )  # fmt: skip
        for prediction in found:
            if arguments.report:
                kept.append(prediction)
            yield prediction

    chosen = {"top": top, "threshold": arguments.threshold}
    if arguments.out:
        from ..files import write_atomic

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8", newline="") as file:
                WRITERS[arguments.format](answers(), file, maps=arguments.maps, **chosen)

        write_atomic(arguments.out, write)
    else:
        WRITERS[arguments.format](answers(), sys.stdout, maps=arguments.maps, **chosen)
    if arguments.report and kept:
        from ..report import write_report

        write_report(kept, [p.source for p in kept], arguments.report, top=top, threshold=arguments.threshold)
        print(f"ramatch: wrote {arguments.report}", file=sys.stderr)
    for path, reason in failed:
        print(f"ramatch: could not read {path}: {reason}", file=sys.stderr)
    if failed:
        print(f"ramatch: {len(failed)} of {len(paths)} images could not be read", file=sys.stderr)
    return 1 if failed else 0


def _json(answers: Iterator[Any], file: TextIO, *, maps: bool, **chosen: Any) -> None:
    json.dump([p.to_dict(maps=maps, **chosen) for p in answers], file, ensure_ascii=False, indent=1)
    file.write("\n")


def _jsonl(answers: Iterator[Any], file: TextIO, *, maps: bool, **chosen: Any) -> None:
    for prediction in answers:
        file.write(json.dumps(prediction.to_dict(maps=maps, **chosen), ensure_ascii=False) + "\n")
        file.flush()


def _csv(answers: Iterator[Any], file: TextIO, *, maps: bool, **chosen: Any) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["image", "label", "probability", "score"])
    for prediction in answers:
        for entry in prediction.to_dict(**chosen)["labels"]:
            writer.writerow([prediction.source, entry["label"], entry["probability"], entry["score"]])


def _table(answers: Iterator[Any], file: TextIO, *, maps: bool, **chosen: Any) -> None:
    for prediction in answers:
        entries = prediction.to_dict(**chosen)["labels"]
        file.write(f"{prediction.source}\n")
        width = max((len(e["label"]) for e in entries), default=0)
        for entry in entries:
            bar = "█" * round(20 * entry["probability"])
            file.write(f"  {entry['label']:<{width}}  {entry['probability']:5.2f}  {bar}\n".rstrip() + "\n")
        if not entries:
            file.write("  (no label reaches the threshold)\n")
        file.flush()


WRITERS = {"table": _table, "json": _json, "csv": _csv, "jsonl": _jsonl}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, got {text}")
    return value
