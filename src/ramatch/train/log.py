"""What a run says: a JSONL log that survives crashes, TensorBoard where installed, a progress line."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

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
        self.board = _tensorboard(path.parent / "tensorboard", step) if tensorboard else None

    def write(self, kind: str, *, step: int, **values: Any) -> None:
        entry = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        self.file.write((json.dumps(_finite(entry), ensure_ascii=False) + "\n").encode())
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
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue
    return entries


class Progress:
    """One line: done of total, rate, time left, and what else is known. In place on a terminal, else a plain line now
    and then."""

    def __init__(
        self, total: int, what: str, *, unit: str = "img", enabled: bool = True, stream: TextIO | None = None,
        every: float = 10.0,
    ) -> None:  # fmt: skip
        self.total, self.what, self.unit, self.stream = total, what, unit, stream or sys.stderr
        self.enabled, self.tty = enabled, bool(getattr(self.stream, "isatty", lambda: False)())
        self.every = 0.2 if self.tty else every
        self.started = self.shown = time.monotonic()
        self.first = self.done = self.width = 0

    def start(self, done: int = 0) -> None:
        """Begin counting the rate here (after a resume, or a pause)."""
        self.started, self.first, self.done = time.monotonic(), done, done

    def rate(self) -> float:
        return (self.done - self.first) / max(time.monotonic() - self.started, 1e-9)

    def pause(self, seconds: float) -> None:
        """Leave so much out of the rate (an evaluation, a save)."""
        self.started += seconds

    def update(self, done: int, note: str = "", *, force: bool = False) -> None:
        self.done = done
        now = time.monotonic()
        if not self.enabled or (not force and now - self.shown < self.every):
            return
        self.shown = now
        rate = self.rate()
        left = clock((self.total - done) / rate) if rate > 0 else "?"
        text = f"{self.what} {done:,}/{self.total:,}  {rate:,.0f} {self.unit}/s  {left} left"
        self._show(f"{text}  {note}" if note else text)

    def message(self, text: str) -> None:
        """A line that stays."""
        if self.enabled:
            self.clear()
            print(text, file=self.stream, flush=True)

    def clear(self) -> None:
        if self.enabled and self.tty and self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.stream.flush()
            self.width = 0

    def _show(self, text: str) -> None:
        if self.tty:
            self.stream.write("\r" + text.ljust(self.width))
            self.width = len(text)
        else:
            self.stream.write(text + "\n")
        self.stream.flush()


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    total = round(seconds) if math.isfinite(seconds) else 0
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02}:{total % 60:02}" if hours else f"{minutes}:{total % 60:02}"


def _finite(entry: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: such a number becomes null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step)
