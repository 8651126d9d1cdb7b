"""One line that says how far a long piece of work is."""

from __future__ import annotations

import math
import sys
import time
from typing import TextIO


class Progress:
    """One line: done of total, rate, time left, and what else is known. In place on a terminal, else a plain line now
    and then."""

    def __init__(self, total: int, what: str, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.total, self.what, self.enabled, self.stream = total, what, enabled, stream or sys.stderr
        self.tty = bool(getattr(self.stream, "isatty", lambda: False)())
        self.every = 0.2 if self.tty else 10.0
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
        text = f"{self.what} {done:,}/{self.total:,}  {rate:,.0f} img/s  {left} left"
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
