"""ramatch tag: labels of images."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..assets import GENERAL
from ..config import GUESS
from ..errors import RamatchError, printable
from ._shared import add_labels, add_matcher, add_model, cell, cleaning_up, count, labels_of, load_recognizer, share
from .tagfile import Write, check_out, settings_of, write_answers

if TYPE_CHECKING:
    from ..prediction import Prediction

TOP = 5  # labels per image, unless told
UNSURE = f"?: {GUESS}\n"
RELATIVE = "relative scores, which compare the labels: the model is not calibrated\n"
REPORT_TOP = 15  # labels listed per image on a page, where the threshold alone would choose


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "tag",
        help="say which labels are in images",
        description="Say which labels are in images, how sure, and (with --report or --maps) where. Without labels, "
        "some 4,000 words for things, places and actions are looked for, and each thing is said once. Unreadable "
        "images are reported and counted at the end; the exit code is then 1.",
    )
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="files, folders or globs")
    add_labels(parser, "; by default a general vocabulary")
    add_model(parser)
    group = parser.add_argument_group("output")
    add = group.add_argument
    add("--top", type=count, metavar="K", help=f"at most K labels per image (default: {TOP} without --threshold)")
    add("--threshold", type=share, metavar="P", help="only labels with at least this probability")
    add("--format", choices=FORMATS, help="default: by the ending of F (.json, .jsonl, .csv, .txt), else table")
    add("--out", metavar="F", help="write to a new file instead of standard output; jsonl and csv row by row")
    existing = group.add_mutually_exclusive_group().add_argument
    existing(
        "--resume", action="store_true", help="go on with F where a run with jsonl or csv ended; failed images again"
    )
    existing("--overwrite", action="store_true", help="write F even if it exists")
    add("--maps", action="store_true", help="with json or jsonl: each label's region map")
    add("--report", metavar="F.html", help="also write one self-contained page with images, labels and maps")
    add_matcher(group)
    add("--batch-size", type=count, default=16, metavar="N")
    add("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..recognizer import predict_files

    labels = labels_of(arguments)
    paths, failed = _find(arguments.images)
    _spare_pictures(arguments, paths)
    check_out(arguments)
    if arguments.maps and arguments.format not in ("json", "jsonl"):
        raise RamatchError("--maps needs --format json or jsonl: a table has no room for maps")
    total = len(paths) + len(failed)
    recognizer = load_recognizer(arguments, cache=0)  # every image is seen once
    if arguments.threshold is not None and not recognizer.calibrated:
        note = "the threshold is of relative scores, which compare the labels and sum to 1; see ramatch calibrate"
        print(f"ramatch: note: '{arguments.model}' is not calibrated: {note}", file=sys.stderr)
    own = recognizer.ram.backbone.given_labels  # of a model without a text tower
    recognizer.set_vocabulary(labels or list(own) or GENERAL)
    settings = settings_of(arguments, labels or list(own) or GENERAL)
    options = {"maps": arguments.maps or bool(arguments.report), "matcher": arguments.matcher, "failed": failed}
    progress = not arguments.quiet and sys.stderr.isatty()
    options |= {"batch_size": arguments.batch_size, "progress": progress}

    def answer(write: Write, done: Container[str]) -> None:
        left = [path for path in paths if str(path) not in done]
        if arguments.resume:
            print(f"ramatch: {len(paths) - len(left)} of {total} images are answered already", file=sys.stderr)
        _answer(predict_files(recognizer, left, **options), write, arguments)

    with cleaning_up():
        write_answers(arguments, FORMATS[arguments.format].head, settings, answer)
    for path, reason in failed:
        print(f"ramatch: could not read {printable(path)}: {printable(reason)}", file=sys.stderr)
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


def _spare_pictures(arguments: argparse.Namespace, paths: list[Path]) -> None:
    """Refuse to write text over a photograph: `tag *.webp --out` forgets the file's name easily."""
    from ..data.images import is_image_name

    for option, out in (("--out", arguments.out), ("--report", arguments.report)):
        if out and (is_image_name(out) or Path(out).resolve() in {path.resolve() for path in paths}):
            raise RamatchError(f"{option} {out} is the name of an image, which would be overwritten with text")


def _answer(answers: Iterator[Prediction], write: Write, arguments: argparse.Namespace) -> None:
    """Write every answer as it comes, and the page beside it; no more than a batch is held."""
    top = arguments.top or (None if arguments.threshold is not None else TOP)
    written = _written(answers, write, arguments, top)
    first = next(written, None) if arguments.report else None
    if first is not None:
        from ..viz.report import write_report

        shown = {"top": top or REPORT_TOP, "threshold": arguments.threshold}
        write_report(chain([first], written), None, arguments.report, **shown)
        print(f"ramatch: wrote {arguments.report}", file=sys.stderr)
    deque(written, maxlen=0)


def _written(
    answers: Iterator[Prediction], write: Write, arguments: argparse.Namespace, top: int | None
) -> Iterator[Prediction]:
    """Pass the answers on as they are written. A page that was asked for is finished even if no one reads these."""
    form, chosen = FORMATS[arguments.format], {"top": top, "threshold": arguments.threshold, "maps": arguments.maps}
    reader_left = False

    def put(text: str, image: str | None = None) -> None:
        nonlocal reader_left
        try:
            if not reader_left:
                write(text, image)
        except BrokenPipeError:
            if not arguments.report:
                raise
            reader_left = True

    put(form.head)
    between, notes = "", dict[str, None]()
    for prediction in answers:
        answer = prediction.to_dict(**chosen)
        put(between + form.one(answer), answer["image"])
        between = form.between
        if not all(entry["calibrated"] for entry in answer["labels"]):
            notes[UNSURE if answer["calibrated"] else RELATIVE] = None
        yield prediction
    put(form.tail)
    if form.notes:
        put("".join(notes))


class Format(NamedTuple):
    """How answers are written: before all, each one, between two, after all; whether notes come last."""

    head: str
    one: Callable[[dict[str, Any]], str]
    between: str = ""
    tail: str = ""
    notes: bool = False


def _table(answer: dict[str, Any]) -> str:
    entries = [{**entry, "label": printable(entry["label"])} for entry in answer["labels"]]
    calibrated, width = answer["calibrated"], max((len(entry["label"]) for entry in entries), default=0)
    lines = [printable(answer["image"])]
    for entry in entries:
        value, mark = (
            entry["probability" if calibrated else "relative"],
            " " if entry["calibrated"] == calibrated else "?",
        )
        lines.append(f"  {entry['label']:<{width}}  {value:5.2f}{mark} {'█' * round(20 * value)}".rstrip())
    if not entries:
        lines.append("  (no label reaches the threshold)")
    return "\n".join(lines) + "\n"


def _json(answer: dict[str, Any]) -> str:
    return "\n" + json.dumps(answer, ensure_ascii=False, indent=None if "grid" in answer else 1)  # maps are long


def _jsonl(answer: dict[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False) + "\n"


def _csv(answer: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    image, rest = cell(answer["image"]), COLUMNS[1:]
    writer.writerows([image, cell(e["label"]), *(e.get(name) for name in rest)] for e in answer["labels"])
    return text.getvalue()


COLUMNS = ("label", "probability", "score", "relative", "calibrated", "familiarity")  # without calibration: relative
FORMATS = {
    "table": Format("", _table, notes=True),
    "json": Format("[", _json, ",", "\n]\n"),
    "csv": Format(",".join(["image", *COLUMNS]) + "\n", _csv),
    "jsonl": Format("", _jsonl),
}
