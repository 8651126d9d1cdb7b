"""Files: read with errors for people, written so that a crash leaves the old one or the new one, never half of one."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from .errors import RamatchError

T = TypeVar("T")


def read_text(path: str | Path) -> str:
    """UTF-8 text, with or without a byte order mark."""
    try:
        return decode_text(Path(path).read_bytes(), path).replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise RamatchError(f"{path}: {error.strerror or error}") from error


def decode_text(content: bytes, where: object) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RamatchError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_lines(path: str | Path) -> list[str]:
    """Lines of a text file without surrounding space, empty ones left out."""
    return [line for line in map(str.strip, read_text(path).splitlines()) if line]


def read_json(path: str | Path) -> Any:
    return parse_json(read_text(path), path)


def parse_json(text: str, where: object) -> Any:
    """Parse JSON that a stranger may have written; `where` begins the error message."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # halves of a character, which no text file can hold, become question marks
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        return value
    except json.JSONDecodeError as error:
        raise RamatchError(f"{where}: not valid JSON (line {error.lineno}: {error.msg})") from error
    except (ValueError, RecursionError, MemoryError) as error:  # numbers of thousands of digits, thousands of brackets
        raise RamatchError(f"{where}: not usable JSON ({error or 'out of memory'})") from error


def expect(value: Any, kind: type[T], where: object) -> T:
    """`value`, which must be of that kind: what a stranger's file holds is checked with this, once."""
    if isinstance(value, kind):
        return value
    kinds: dict[Any, str] = {dict: "an object", list: "a list", str: "text"}
    raise RamatchError(f"{where} is {shown(value)}; expected {kinds[kind]}")


def expect_numbers(values: Iterable[Any], where: object) -> list[float]:
    """Finite numbers, given as such or as text."""
    values = list(values)
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise RamatchError(f"{where} is {shown(values)}; expected numbers")
    return numbers


def shown(value: Any) -> str:
    """A value for an error message, short."""
    try:
        return repr(value)[:80]
    except (RecursionError, ValueError):  # nested hundreds deep, or a number of thousands of digits
        return f"a strange {type(value).__name__}"


def write_atomic(path: str | Path, write: Callable[[Path], object]) -> None:
    """Call `write` on a temporary file beside `path`, flush it to disk, then rename it into place.

    A link is followed; a pipe or device (`/dev/stdout`) is written to as it is, because it must not be replaced.
    """
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        write(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
    try:
        # made here and not by `write`, so that the user's umask counts and a name in use is an error
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        write(temporary)
        os.chmod(temporary, mode)  # safetensors puts a file of its own there, for its owner only
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the rename itself must reach the disk too
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: str | Path, text: str) -> None:
    content = text.encode()
    write_atomic(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def new_folder(path: str | Path) -> Path:
    """A folder to write to, which must not hold anything yet."""
    path = Path(path).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RamatchError(f"{path} exists and is not an empty folder; choose a new one")
    return path


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill beside a new one, then renamed into its place: a crash leaves none, or the whole."""
    path = Path(os.path.realpath(new_folder(path)))
    if os.path.ismount(path):  # cannot be replaced
        yield path
        return
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of one that was killed
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
