"""Checkpoints: whole or not there at all, all that a run needs to continue bit for bit, nothing of the backbone."""

from __future__ import annotations

import errno
import io
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import RamatchError
from ..files import write_atomic

FORMAT = 1
FULL = (errno.ENOSPC, errno.EDQUOT)  # no space, or none left to this user
_NAME = re.compile(r"step-(\d+)\.pt")


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write atomically: to a temporary file, to the disk, then rename. If that fails the earlier ones are untouched."""
    # torch's own writer turns a full disk into a RuntimeError without a reason, so the bytes are written here
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    try:
        write_atomic(path, lambda temporary: temporary.write_bytes(buffer.getbuffer()))
    except OSError as error:
        raise RamatchError(describe(error, path.parent, len(buffer.getbuffer()))) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read on the CPU; only plain data and tensors are accepted."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file shows itself in many ways
        raise RamatchError(f"{path}: not a checkpoint that can be read safely ({type(error).__name__})") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise RamatchError(f"{path}: not a checkpoint of this version of ramatch")
    return state


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. Temporary files of a save that was cut short are not among them."""
    found = [(int(m[1]), p) for p in folder.glob("step-*.pt") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def latest_good(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read, with its content; None if there is none."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return path, load_checkpoint(path)
        except RamatchError:  # damaged: use the one before
            continue
    return None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints, and temporary files left by a crash."""
    for path in list_checkpoints(folder)[: -keep or None]:
        path.unlink(missing_ok=True)
    clean_temporary(folder)


def clean_temporary(folder: Path) -> None:
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def describe(error: OSError, folder: Path, size: int | None = None) -> str:
    """What a failed write means to a person."""
    last = list_checkpoints(folder)
    safe = f"the last good checkpoint is {last[-1]}" if last else "there is no earlier checkpoint"
    if error.errno in FULL:
        need = f" ({size / 2**20:.0f} MiB were to be written)" if size else ""
        return f"the disk is full{need}: {safe}; free some space and run again with --resume auto"
    return f"cannot write to {folder} ({error.strerror or error}): {safe}"


# ------------------------------------------------------------------------------------------------ random states


def rng_state(device: torch.device) -> dict[str, Any]:
    """States of Python's, numpy's and torch's generators, as plain data and tensors."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
