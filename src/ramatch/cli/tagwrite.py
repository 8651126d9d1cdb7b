"""`ramatch tag --write`: tags to text files, sidecars or into images."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RamatchError, printable
from .answers import change_line

if TYPE_CHECKING:
    from ..library.keywords import Keyword
    from ..library.write import TagWriter
    from ..prediction import Prediction
    from ..recognizer import Recognizer

KINDS = ("txt", "xmp", "exif")


def add_write(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "tags at the images",
        "Tags that are sure (--threshold 0.7 unless told) are written where other programs find them; those of an "
        "earlier run are replaced, those made by hand stay.",
    )
    add = group.add_argument
    what = "text files beside the images, XMP sidecars, or into the images (XMP and IPTC, by exiftool)"
    add("--write", choices=KINDS, help=what)
    # None and not False: runs that are resumed compare what is not None
    add("--dry-run", action="store_const", const=True, help="only say what would be written")
    add("--remove", action="store_const", const=True, help="take away our tags instead, and nothing else")
    add("--under", metavar="WORD", help="put our tags below this word in the tree of keywords")


def check_write(arguments: argparse.Namespace) -> None:
    given = [name for name in ("dry_run", "remove", "under") if getattr(arguments, name)]
    if given and not arguments.write:
        raise RamatchError(f"--{given[0].replace('_', '-')} needs --write: {', '.join(KINDS)}")
    if arguments.write and arguments.every is not None:
        raise RamatchError("--write with --every: frames of a video are no files that could hold tags")
    if arguments.write == "exif":
        from ..library.exiftool import find_program

        find_program()  # before a model is loaded for nothing
    wrong = [name for name in ("out", "report", "format", "resume", "maps") if getattr(arguments, name)]
    if arguments.remove and wrong:
        raise RamatchError(f"--remove with --{wrong[0]}: images are not tagged when tags are taken away")


class Tagging:
    """Changes tags at images one by one, keeps count, and notes what could not be written."""

    def __init__(self, writer: TagWriter, arguments: argparse.Namespace) -> None:
        self.writer, self.counts = writer, Counter[str]()
        self.failed: list[tuple[str, str]] = []
        self.dry_run = bool(arguments.dry_run)
        self.chosen = {"top": arguments.top, "threshold": arguments.threshold, "under": arguments.under}

    def update(self, prediction: Prediction) -> dict[str, Any] | None:
        from ..library.keywords import keywords_of

        return self.change(prediction.source or "", keywords_of(prediction, **self.chosen))

    def change(self, image: str, found: list[Keyword] | None) -> dict[str, Any] | None:
        """What was done, None if it could not be."""
        try:
            path = Path(image)
            if not path.is_file():
                raise RamatchError("not a file that could hold tags")
            change = self.writer.update(path, found)
        except (RamatchError, OSError) as error:
            self.failed.append((image, getattr(error, "strerror", None) or str(error)))
            return None
        self.counts["written" if change.written else "as they were"] += 1
        lists = {name: list(getattr(change, name)) for name in ("added", "removed", "by_hand")}
        self.counts.update({name: len(words) for name, words in lists.items()})
        return {"file": str(change.target), **lists, "written": change.written and not self.dry_run}

    def say(self) -> None:
        counts, would = self.counts, "would be " if self.dry_run else ""
        said = f"{counts['added']} added, {counts['removed']} removed, {counts['by_hand']} made by hand and kept"
        images = f"tags of {counts['written']} images {would}written, of {counts['as they were']} as they were"
        print(f"ramatch: {images}: {said}", file=sys.stderr)
        for image, reason in self.failed:
            print(f"ramatch: the tags of {printable(image)} were not written: {printable(reason)}", file=sys.stderr)


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace, model: str) -> Iterator[Tagging]:
    from ..library.write import made_by, open_writer

    with open_writer(arguments.write, made_by(model), dry_run=bool(arguments.dry_run)) as writer:
        tagging = Tagging(writer, arguments)
        yield tagging
        tagging.say()


@contextlib.contextmanager
def open_tagging(arguments: argparse.Namespace, recognizer: Recognizer) -> Iterator[Tagging | None]:
    """What --write asks for, if it was given; settles which tags are sure."""
    if not arguments.write:
        yield None
        return
    from ..library.keywords import SURE

    if arguments.threshold is None and recognizer.calibrated:
        arguments.threshold = SURE
    if arguments.top is None and arguments.threshold is None:
        raise RamatchError(
            f"'{arguments.model}' is not calibrated, so no tag is sure: give --top K to write the K best of each "
            "image, or see ramatch calibrate"
        )
    with _opened(arguments, recognizer.name) as tagging:
        yield tagging


def remove_tags(arguments: argparse.Namespace, paths: list[Path]) -> bool:
    """Take our tags away from images, and say whether all went well; no model is needed, and the images need not be
    readable."""
    with _opened(arguments, "") as tagging:
        for path in paths:
            change = tagging.change(str(path), None)
            if change and change["removed"]:
                print(f"{printable(path)}\n  → {change_line(change)}")
    return not tagging.failed
