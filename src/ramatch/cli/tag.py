"""ramatch tag: labels of images."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import RamatchError
from ._shared import MATCHERS, add_labels, add_model, count, labels_of, load_recognizer, share

if TYPE_CHECKING:
    from ..prediction import Prediction

FORMATS = ("table", "json", "csv", "jsonl")
TOP = 5  # labels per image, unless told
REPORT_TOP = 15  # labels listed per image on a page, where the threshold alone would choose


class Output(Protocol):
    """What a writer needs of a file."""

    def write(self, text: str, /) -> int: ...
    def flush(self) -> None: ...


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
        "--top", type=count, metavar="K", help=f"at most K labels per image (default: {TOP} without --threshold)"
    )
    group.add_argument("--threshold", type=share, metavar="P", help="only labels with at least this probability")
    group.add_argument("--format", choices=FORMATS, default="table")
    group.add_argument("--out", metavar="F", help="write to a file instead of standard output")
    group.add_argument("--maps", action="store_true", help="with json or jsonl: each label's region map")
    group.add_argument(
        "--report", metavar="F.html", help="also write one self-contained page with images, labels and maps"
    )
    group.add_argument("--matcher", choices=MATCHERS, help="instead of the model's own")
    group.add_argument("--batch-size", type=count, default=16, metavar="N")
    group.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..batching import predict_files

    if arguments.maps and arguments.format not in ("json", "jsonl"):
        raise RamatchError("--maps needs --format json or jsonl: a table has no room for maps")
    labels = labels_of(arguments)
    paths, failed = _find(arguments.images)
    total = len(paths) + len(failed)
    recognizer = load_recognizer(arguments, cache=0)  # every image is seen once
    if arguments.threshold is not None and not recognizer.calibrated:
        print(
            f"ramatch: note: '{arguments.model}' is not calibrated: its probabilities compare the labels with each other "
            "and sum to 1; see ramatch calibrate",
            file=sys.stderr,
        )
    recognizer.set_vocabulary(labels)
    answers = predict_files(
        recognizer, paths, maps=arguments.maps or bool(arguments.report), matcher=arguments.matcher,
        batch_size=arguments.batch_size, failed=failed, progress=not arguments.quiet and sys.stderr.isatty(),
    )  # fmt: skip
    if arguments.out:
        from ..files import write_atomic

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8", newline="") as file:
                _answer(answers, file, arguments)

        write_atomic(arguments.out, write)
    else:
        _answer(answers, sys.stdout, arguments)
    for path, reason in failed:
        print(f"ramatch: could not read {path}: {reason}", file=sys.stderr)
    if failed:
        print(f"ramatch: {len(failed)} of {total} images could not be read", file=sys.stderr)
    return 1 if failed else 0


def _find(images: list[str]) -> tuple[list[Path], list[tuple[str, str]]]:
    """Files to read, each once, and what was named but is not there; only nothing at all is an error."""
    from ..data.images import find_images

    found: dict[Path, None] = {}
    missing: list[tuple[str, str]] = []
    for name in images:
        try:
            found.update(dict.fromkeys(find_images(name)))
        except RamatchError as error:
            missing.append((name, "no such file or folder" if not Path(name).exists() else str(error)))
    if not found:
        find_images(images)  # says what was looked for
    return list(found), missing


def _answer(answers: Iterator[Prediction], file: Output, arguments: argparse.Namespace) -> None:
    """Write every answer as it comes, and the page beside it; no more than a batch is held."""
    if arguments.report:
        file = _WhileRead(file)
    top = arguments.top or (None if arguments.threshold is not None else TOP)
    chosen = {"top": top, "threshold": arguments.threshold}
    written = WRITERS[arguments.format](answers, file, maps=arguments.maps, **chosen)
    first = next(written, None) if arguments.report else None
    if first is not None:
        from ..viz.report import write_report

        shown, sources = _with_sources(chain([first], written))
        write_report(shown, sources, arguments.report, top=top or REPORT_TOP, threshold=arguments.threshold)
        print(f"ramatch: wrote {arguments.report}", file=sys.stderr)
    deque(written, maxlen=0)


class _WhileRead:
    """Standard output for as long as someone reads it: a page that was asked for is finished all the same."""

    def __init__(self, file: Output) -> None:
        self.file, self.gone = file, False

    def write(self, text: str) -> int:
        self._try(lambda: self.file.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.file.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if not self.gone:
            try:
                call()
            except BrokenPipeError:
                self.gone = True


def _with_sources(answers: Iterator[Prediction]) -> tuple[Iterator[Prediction], Iterator[str | None]]:
    """The answers, and beside each its file; for a reader that takes one of each in turn (`tee` would hold 57)."""
    latest: list[str | None] = []

    def passing() -> Iterator[Prediction]:
        for prediction in answers:
            latest[:] = [prediction.source]
            yield prediction
        latest.clear()

    def sources() -> Iterator[str | None]:
        while latest:
            yield latest[0]

    return passing(), sources()


# Writers pass on what they have written, so that a report can follow in the same pass.


def _json(answers: Iterator[Prediction], file: Output, *, maps: bool, **chosen: Any) -> Iterator[Prediction]:
    file.write("[")
    between = "\n"
    for prediction in answers:
        text = json.dumps(prediction.to_dict(maps=maps, **chosen), ensure_ascii=False, indent=None if maps else 1)
        file.write(between + text)
        between = ",\n"
        yield prediction
    file.write("\n]\n")


def _jsonl(answers: Iterator[Prediction], file: Output, *, maps: bool, **chosen: Any) -> Iterator[Prediction]:
    for prediction in answers:
        file.write(json.dumps(prediction.to_dict(maps=maps, **chosen), ensure_ascii=False) + "\n")
        file.flush()
        yield prediction


def _csv(answers: Iterator[Prediction], file: Output, *, maps: bool, **chosen: Any) -> Iterator[Prediction]:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["image", "label", "probability", "score"])
    for prediction in answers:
        for entry in prediction.to_dict(**chosen)["labels"]:
            writer.writerow([prediction.source, entry["label"], entry["probability"], entry["score"]])
        yield prediction


def _table(answers: Iterator[Prediction], file: Output, *, maps: bool, **chosen: Any) -> Iterator[Prediction]:
    for prediction in answers:
        entries = prediction.to_dict(**chosen)["labels"]
        file.write(f"{prediction.source}\n")
        width = max((len(e["label"]) for e in entries), default=0)
        for entry in entries:
            bar = "█" * round(20 * entry["probability"])
            file.write(f"  {entry['label']:<{width}}  {entry['probability']:5.2f}  {bar}".rstrip() + "\n")
        if not entries:
            file.write("  (no label reaches the threshold)\n")
        file.flush()
        yield prediction


WRITERS = {"table": _table, "json": _json, "csv": _csv, "jsonl": _jsonl}
