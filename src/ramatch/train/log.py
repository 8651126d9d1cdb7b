"""What a run says: a JSONL log that survives crashes, TensorBoard where installed."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMES = ("time", "seconds", "images_per_s")  # fields that differ between two runs of the same thing


class RunLog:
    """log.jsonl: one object per line. `position()` goes into each checkpoint; given back on resume, what came after
    it is cut, so that a resumed run's log reads like that of a run that never stopped."""

    def __init__(self, path: Path, *, position: int | None = None, step: int = 0, tensorboard: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if position is not None and path.is_file() and path.stat().st_size > position:
            os.truncate(path, position)
        # unbuffered bytes: each line is one write, so a crash leaves whole lines (or one cut line at the very end)
        self.file = open(path, "ab" if position is not None else "wb", buffering=0)  # noqa: SIM115
        self.board: Any = None
        with suppress(ImportError):  # TensorBoard is an extra
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(path.parent / "tensorboard"), purge_step=step)

    def write(self, kind: str, *, step: int, **values: Any) -> None:
        entry = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        # JSON has no NaN: such a number becomes null
        entry = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        self.file.write((json.dumps(entry, ensure_ascii=False) + "\n").encode())
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "epoch":
                    self.board.add_scalar(f"{kind}/{name}", value, step)

    def position(self) -> int:
        """Bytes safely on disk."""
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Entries of a log; a last line cut by a crash is left out."""
    entries = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries
