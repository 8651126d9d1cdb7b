"""Files that `ramatch tag` writes: whole at the end, or row by row, so that an interrupted run can go on."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Container
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO, TextIO
from zlib import crc32

from ..errors import RamatchError
from ..files import expect, parse_json, shown, write_atomic, write_text

ENDINGS = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".txt": "table"}
Write = Callable[[str, str | None], object]  # a text, and the image that it answers if it does
GROWING = ("jsonl", "csv")  # one image's answer is done when its lines are
ANEW = "--overwrite to begin anew"
LEFT_OUT = (
    "images",
    "list",
    "out",
    "run",
    "verb",
    "debug",
    "device",
    "batch_size",
    "quiet",
    "resume",
    "overwrite",
    "engine",
    "actors",
    "part_size",
)


def check_out(arguments: argparse.Namespace) -> None:
    """Settle the format, and refuse before anything is loaded what cannot be written."""
    out = Path(arguments.out or "")
    arguments.format = arguments.format or ENDINGS.get(out.suffix.lower(), "table")
    if arguments.resume and not arguments.out:
        raise RamatchError("--resume needs --out F: the file to go on with")
    if arguments.resume and arguments.format not in GROWING:
        raise RamatchError(
            f"--resume needs --format jsonl or csv: a file in format {arguments.format} is written whole"
        )
    if arguments.resume and arguments.report:
        raise RamatchError("--resume with --report: the page would lack the images that are answered already")
    if arguments.resume and out.exists() and not out.is_file():
        raise RamatchError(f"--resume {out}: not a file that could be gone on with")
    if out.is_file() and not (arguments.resume or arguments.overwrite):
        further = "--resume to go on, or " if arguments.format in GROWING and not arguments.report else ""
        raise RamatchError(f"{out} exists; {further}{ANEW}")


def settings_of(arguments: argparse.Namespace, labels: Any) -> dict[str, Any]:
    """All that answers depend on. Of a model folder its content counts, not where it lies."""
    from ..modeling.checkpoints.hashes import LIST, digest
    from ..modeling.checkpoints.loading import bundled_model

    found = {name: value for name, value in vars(arguments).items() if name not in LEFT_OUT}
    del found["labels_file"], found["vocabulary"], found["report"]
    folder = bundled_model(arguments.model) or Path(arguments.model).expanduser()
    lists = [place / LIST for place in (folder / "model", folder) if (place / LIST).is_file()]
    if lists:
        found["model"] = f"{folder.resolve().name} {digest(lists[0])[:16]}"
    return found | {"labels": labels}


class TagFile:
    """Rows of images as they come, in `path`, and beside it a journal: the settings, then a line for each image whose
    rows are complete, with their length and checksum. A row counts when its line in the journal is whole, so whatever
    is cut short, and whenever, is cut away here and done again."""

    def __init__(self, path: Path, head: str, settings: dict[str, Any], *, resume: bool) -> None:
        self.path = Path(os.path.realpath(path))
        self.journal = self.path.with_name(f".{self.path.name}.resume")
        self.done: set[str] = set()
        self._rows: BinaryIO
        self._lines: BinaryIO
        size, lines, start = 0, 0, head.encode()
        if resume and self.path.exists():
            size, lines = self._read(start, settings)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # before its journal: at no moment do they not belong together
            write_text(self.journal, line := json.dumps({"settings": settings}) + "\n")
            lines = len(line)
        with ExitStack() as files:
            self._rows = files.enter_context(self.path.open("ab"))
            self._lines = files.enter_context(self.journal.open("ab"))
            self._rows.truncate(size)
            self._lines.truncate(lines)
            if not size:
                self._rows.write(start)
                self._rows.flush()
            self._files = files.pop_all()

    def _read(self, head: bytes, settings: dict[str, Any]) -> tuple[int, int]:
        """How much of both files holds, in bytes; what is there is noted in `done`."""
        if not self.journal.is_file():
            raise RamatchError(
                f"{self.path} cannot be gone on with: {self.journal.name}, beside it, is missing; {ANEW}"
            )
        with self.journal.open("rb") as journal, self.path.open("rb") as rows:
            lines = journal.readline()
            found = parse_json(lines.decode("utf-8", "replace"), self.journal)
            self._compare(expect(expect(found, dict, self.journal).get("settings"), dict, self.journal), settings)
            size, place, end = 0, len(lines), os.fstat(rows.fileno()).st_size
            if (there := rows.read(len(head))) != head:
                if not head.startswith(there):
                    raise self._changed()
                return 0, place
            size = len(head)
            for line in journal:
                if not line.endswith(b"\n"):
                    break
                image, length, checksum = self._entry(line)
                if size + length > end:
                    break
                if crc32(rows.read(length)) != checksum:
                    raise self._changed()
                self.done.add(image)
                size, place = size + length, place + len(line)
        return size, place

    def _entry(self, line: bytes) -> tuple[str, int, int]:
        try:
            image, length, checksum = json.loads(line)
            if isinstance(image, str) and isinstance(length, int) and length >= 0:
                return image, length, checksum
        except (ValueError, TypeError, RecursionError):
            pass
        raise RamatchError(f"{self.journal} is damaged, so {self.path} cannot be gone on with; {ANEW}")

    def _changed(self) -> RamatchError:
        return RamatchError(f"{self.path} was changed since it was written, and cannot be gone on with; {ANEW}")

    def _compare(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
        if names:
            differ = "; ".join(_difference(name, before.get(name), now.get(name)) for name in names)
            raise RamatchError(f"{self.path} was made with other settings: {differ}. Use the same ones, or {ANEW}")

    def write(self, text: str, image: str | None) -> None:
        if image is None:  # the head, which is there already
            return
        content = text.encode("utf-8", "replace")  # a name that is not UTF-8 gets a stand-in, not a crash
        self._rows.write(content)
        self._rows.flush()
        self._lines.write(json.dumps([image, len(content), crc32(content)]).encode() + b"\n")
        self._lines.flush()

    def close(self) -> None:
        self._files.close()


def _difference(name: str, before: Any, now: Any) -> str:
    if isinstance(before, list) and isinstance(now, list):  # of many labels, those that differ
        gone, new = [x for x in before if x not in now], [x for x in now if x not in before]
        parts = [f"{shown(x)} {word}" for x, word in ((gone, "are gone"), (new, "are new")) if x]
        return f"{name}: {' and '.join(parts) or 'in another order'}"
    return f"{name} was {shown(before)}, is now {shown(now)}"


def write_answers(
    arguments: argparse.Namespace,
    head: str,
    settings: dict[str, Any],
    answer: Callable[[Write, Container[str]], object],
) -> None:
    """Call `answer` with the way to write, and with the images that are answered already."""
    if not arguments.out:
        answer(_writer(sys.stdout), ())
        return
    path = Path(arguments.out)
    if arguments.format in GROWING and (path.is_file() or not path.exists()):
        with closing(TagFile(path, head, settings, resume=arguments.resume)) as file:
            answer(file.write, file.done)
        return

    def whole(temporary: Path) -> None:
        # a name that is not UTF-8 gets a stand-in, not a crash
        with temporary.open("w", encoding="utf-8", errors="replace", newline="") as file:
            answer(_writer(file), ())

    write_atomic(path, whole)


def _writer(file: TextIO) -> Write:
    def write(text: str, image: str | None) -> None:
        if text:
            file.write(text)
            file.flush()

    return write
