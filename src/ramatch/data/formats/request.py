"""What a reader is asked to read, with the JSON content loaded at most once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ramatch.errors import RamatchError


@dataclass
class Request:
    """path: the file or folder; files: several files when a pattern was given; classes: if the caller knows."""

    path: Path
    split: str | None = None
    classes: Sequence[str] | None = None
    files: Sequence[Path] = ()

    @property
    def suffix(self) -> str:
        return self.path.suffix.lower() if self.path.is_file() else ""

    @cached_property
    def json(self) -> Any:
        """Content of a .json file; None for anything else."""
        return load_json(self.path) if self.suffix == ".json" else None


def load_json(path: Path) -> Any:
    try:
        with open(path, encoding="utf-8-sig") as stream:
            return json.load(stream)
    except json.JSONDecodeError as error:
        raise RamatchError(f"{path}: not valid JSON (line {error.lineno}: {error.msg})") from error
    except UnicodeDecodeError as error:
        raise RamatchError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RamatchError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
