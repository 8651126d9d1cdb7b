"""ramatch tag: labels of images."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import deque
from collections.abc import Container, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..assets import GENERAL
from ..config import GUESS
from ..errors import RamatchError, printable
from ._shared import (
    add_labels,
    add_matcher,
    add_method,
    add_model,
    cleaning_up,
    count,
    labels_of,
    load_recognizer,
    seconds,
    share,
)
from .answers import FORMATS
from .tagfile import Write, check_out, settings_of, write_answers
from .tagscale import add_scale, run_engine
from .tagwrite import Tagging, add_write, check_write, open_tagging, remove_tags

if TYPE_CHECKING:
    from ..data.find import Found
    from ..prediction import Prediction

TOP = 5  # labels per image, unless told
UNSURE = f"?: {GUESS}\n"
RELATIVE = "relative scores, which compare the labels: the model is not calibrated\n"
REPORT_TOP = 15  # labels listed per image on a page, where the threshold alone would choose
NAMED = 5  # of the files left out, of each kind
STDIN = "-"


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "tag",
        help="say which labels are in images",
        description="Say which labels are in images, how sure, and (with --report or --maps) where. Without labels, "
        "some 4,000 words for things, places and actions are looked for, and each thing is said once. Unreadable "
        "images are reported and counted at the end; the exit code is then 1.",
    )
    add = parser.add_argument
    add("images", nargs="*", metavar="IMAGES", help="files, folders or globs; - for an image on standard input")
    what = "a list of files and folders, one a line or ended by zero bytes; - for standard input"
    add("--from", dest="list", metavar="F", help=what)
    add("--every", type=seconds, metavar="T", help="of videos too, a frame every T (2s, 500ms, 1m)")
    add_labels(parser, "; by default a general vocabulary")
    add_model(parser)
    add_method(parser)
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
    add_write(parser)
    add_scale(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check_write(arguments)
    labels = None if arguments.remove else labels_of(arguments)
    if arguments.engine or arguments.actors or arguments.part_size:
        with cleaning_up():
            return run_engine(arguments, labels, _top(arguments))
    found = _find(arguments)
    _spare_pictures(arguments, found.paths)
    check_out(arguments)
    if arguments.maps and arguments.format not in ("json", "jsonl"):
        raise RamatchError("--maps needs --format json or jsonl: a table has no room for maps")
    total = len(found.paths) + len(found.missing)
    with cleaning_up():
        if arguments.remove:
            all_written = remove_tags(arguments, found.paths)
        else:
            all_written = _tag(arguments, found, labels)
    _say_skipped(found)
    for path, reason in found.missing:
        print(f"ramatch: could not read {printable(path)}: {printable(reason)}", file=sys.stderr)
    if found.missing:
        print(f"ramatch: {len(found.missing)} of {total} images could not be read", file=sys.stderr)
    return 1 if found.missing or not all_written else 0


def _tag(arguments: argparse.Namespace, found: Found, labels: list[str] | None) -> bool:
    """Tag what was found, and say whether all tags were written that were to be; what cannot be read is added to what
    is missing."""
    from ..data.images import name_of
    from ..recognizer import predict_files

    recognizer = load_recognizer(arguments, cache=0)  # every image is seen once
    own = recognizer.ram.backbone.given_labels  # of a model without a text tower
    recognizer.set_vocabulary(labels or list(own) or GENERAL)
    settings = settings_of(arguments, labels or list(own) or GENERAL)
    options = {"maps": arguments.maps or bool(arguments.report), "matcher": arguments.matcher, "failed": found.missing}
    progress = not arguments.quiet and sys.stderr.isatty()
    options |= {"batch_size": arguments.batch_size, "progress": progress}
    total = len(found.paths) + len(found.missing)
    with open_tagging(arguments, recognizer) as tagging:
        if arguments.threshold is not None and not recognizer.calibrated:
            note = "the threshold is of relative scores, which compare the labels and sum to 1; see ramatch calibrate"
            print(f"ramatch: note: '{arguments.model}' is not calibrated: {note}", file=sys.stderr)

        def answer(write: Write, done: Container[str]) -> None:
            left = [path for path in found.paths if name_of(path) not in done]
            if arguments.resume:
                print(
                    f"ramatch: {len(found.paths) - len(left)} of {total} images are answered already", file=sys.stderr
                )
            _answer(predict_files(recognizer, left, **options), write, arguments, tagging)

        write_answers(arguments, FORMATS[arguments.format].head, settings, answer)
    return tagging is None or not tagging.failed


def _find(arguments: argparse.Namespace) -> Found:
    """What to read, each once, and what was named but is not there; only nothing at all is an error."""
    from ..data.find import find, nothing_found

    if not (arguments.images or arguments.list):
        raise RamatchError("no images: name files, folders or globs, or give --from LIST")
    if STDIN in arguments.images and arguments.list == STDIN:
        raise RamatchError("standard input is either an image (-) or a list (--from -)")
    names = [name for name in arguments.images if name != STDIN]
    found = find(names, listed=_listed(arguments.list) if arguments.list else (), every=arguments.every)
    if STDIN in arguments.images:
        found.paths.append(_piped())
    if not found.paths:
        _say_skipped(found)
        if found.missing:
            raise RamatchError("; ".join(f"{reason}: {name}" for name, reason in found.missing[:NAMED]))
        raise nothing_found([*arguments.images, *([arguments.list] if arguments.list else [])])
    return found


def _listed(source: str) -> list[str]:
    """Names in a list, as the disk has them: ended by zero bytes if there is one, else by lines."""
    content = sys.stdin.buffer.read() if source == STDIN else Path(source).read_bytes()
    names = content.split(b"\0") if b"\0" in content else content.removeprefix(b"\xef\xbb\xbf").splitlines()
    return [os.fsdecode(name) for name in names if name.strip()]


def _piped() -> Any:
    """The image on standard input."""
    picture: BinaryIO = io.BytesIO(sys.stdin.buffer.read())
    picture.name = STDIN  # type: ignore[misc]
    return picture


def _say_skipped(found: Found) -> None:
    from ..data.find import VIDEOS

    for kind, paths in found.skipped.items():
        named = ", ".join(map(printable, paths[:NAMED])) + (f" and {len(paths) - NAMED} more" if paths[NAMED:] else "")
        what = kind if len(paths) > 1 else kind.removesuffix("s")
        hint = " (--every 2s takes frames)" if kind == VIDEOS else ""
        print(f"ramatch: note: left out {len(paths)} {what}{hint}: {named}", file=sys.stderr)


def _spare_pictures(arguments: argparse.Namespace, paths: list[Path]) -> None:
    """Refuse to write text over a photograph: `tag *.webp --out` forgets the file's name easily."""
    from ..data.images import is_image_name

    read = {path.resolve() for path in paths if isinstance(path, Path)} if arguments.out or arguments.report else ()
    for option, out in (("--out", arguments.out), ("--report", arguments.report)):
        if out and (is_image_name(out) or Path(out).resolve() in read):
            raise RamatchError(f"{option} {out} is the name of an image, which would be overwritten with text")


def _top(arguments: argparse.Namespace) -> int | None:
    return arguments.top or (None if arguments.threshold is not None else TOP)


def _answer(
    answers: Iterator[Prediction], write: Write, arguments: argparse.Namespace, tagging: Tagging | None
) -> None:
    """Write every answer as it comes, and the page beside it; no more than a batch is held."""
    top = _top(arguments)
    written = _written(answers, write, arguments, top, tagging)
    first = next(written, None) if arguments.report else None
    if first is not None:
        from ..viz.report import write_report

        shown = {"top": top or REPORT_TOP, "threshold": arguments.threshold}
        write_report(chain([first], written), None, arguments.report, **shown)
        print(f"ramatch: wrote {arguments.report}", file=sys.stderr)
    deque(written, maxlen=0)


def _written(
    answers: Iterator[Prediction],
    write: Write,
    arguments: argparse.Namespace,
    top: int | None,
    tagging: Tagging | None,
) -> Iterator[Prediction]:
    """Pass the answers on as they are written. A page that was asked for is finished even if no one reads these, and
    so are the tags at the images."""
    form, chosen = FORMATS[arguments.format], {"top": top, "threshold": arguments.threshold, "maps": arguments.maps}
    reader_left = False

    def put(text: str, image: str | None = None) -> None:
        nonlocal reader_left
        try:
            if not reader_left:
                write(text, image)
        except BrokenPipeError:
            if not (arguments.report or tagging):
                raise
            reader_left = True

    put(form.head)
    between, notes = "", dict[str, None]()
    for prediction in answers:
        answer = prediction.to_dict(**chosen)
        if tagging is not None:
            change = tagging.update(prediction)
            if change is None:  # could not be written, and is told at the end
                continue
            answer["tags"] = change
        put(between + form.one(answer), answer["image"])
        between = form.between
        if not all(entry["calibrated"] for entry in answer["labels"]):
            notes[UNSURE if answer["calibrated"] else RELATIVE] = None
        yield prediction
    put(form.tail)
    if form.notes:
        put("".join(notes))
