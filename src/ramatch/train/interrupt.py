"""Ctrl-C and SIGTERM: finish the step, save, stop. A second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from ..errors import RamatchError


class Interrupted(RamatchError):
    """The run was stopped by its user; the message says how to continue."""


class Interrupt:
    """While `patient`, the first signal only sets `pressed`, and the loop stops when it can; at any other time (reading
    data, evaluating: work that can be repeated) it raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.pressed = self.patient = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python hears signals there only
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.pressed or not self.patient:
            raise KeyboardInterrupt
        self.pressed = True
        print("\nfinishing this step and saving; press again to stop at once", file=sys.stderr, flush=True)
