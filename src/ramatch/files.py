"""Writing files so that a crash leaves either the old one or the new one, never half of one."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import RamatchError


def write_atomic(path: str | Path, write: Callable[[Path], None]) -> None:
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
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomic(path, write)


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def new_folder(path: str | Path) -> Path:
    """A folder to write to, which must not hold anything yet."""
    path = Path(path).expanduser()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RamatchError(f"{path} exists and is not an empty folder; choose a new one")
    return path
