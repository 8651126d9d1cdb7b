"""Errors meant for people: what was wrong, where, and what to do."""

from __future__ import annotations

import importlib
from types import ModuleType


class RamatchError(Exception):
    """Bad input or a missing part. The command line prints its message without a traceback and exits with 2."""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RamatchError(
            f"this needs the package '{module.split('.')[0]}': pip install 'ramatch[{extra}]'"
        ) from error


def printable(text: object) -> str:
    """Text for a terminal or a log: control and escape characters of a stranger's file name, label or message shown as
    codes."""
    known = str(text).encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in known)
