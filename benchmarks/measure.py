"""Measuring: times, memory, the device's two ceilings, and rows that say what was measured beside what."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NoReturn

import torch

from ramatch.errors import RamatchError

GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """One measured number. `ratio` is how many times better than the baseline it is (above 1: better); `ok` is None
    where no target is set."""

    what: str
    value: float | None
    unit: str
    baseline: float | None = None
    baseline_what: str = ""
    ratio: float | None = None
    target: str = ""
    ok: bool | None = None
    note: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def row(
    what: str,
    value: float | None,
    unit: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    baseline: float | None = None,
    baseline_what: str = "",
    ratio_at_least: float | None = None,
    note: str = "",
    **more: Any,
) -> Row:
    """A row with its target checked. Rates (unit per s) are better when larger, anything else when smaller."""
    ratio = None
    if value and baseline:
        ratio = value / baseline if unit.endswith("/s") else baseline / value
    wanted, passed = [], []
    if at_least is not None:
        wanted.append(f"≥ {at_least:,g}")
        passed.append(value is not None and value >= at_least)
    if at_most is not None:
        wanted.append(f"≤ {at_most:,g}")
        passed.append(value is not None and value <= at_most)
    if ratio_at_least is not None:
        wanted.append(f"ratio ≥ {ratio_at_least:g}")
        passed.append(ratio is not None and ratio >= ratio_at_least)
    return Row(
        what,
        value,
        unit,
        baseline,
        baseline_what,
        ratio,
        ", ".join(wanted),
        all(passed) if wanted else None,
        note,
        more,
    )


def seconds_per_call(
    call: Callable[[], object], device: torch.device, *, budget: float = 1.0, repeats: int = 5, warmup: int = 3
) -> float:
    """Median over `repeats` of the mean time of back-to-back calls; about `budget` seconds in all, after warming up.

    On a GPU the calls of one repeat lie between two events and the host may run ahead, as it does in use.
    """
    for _ in range(warmup):
        call()
    synchronise(device)
    begun = time.perf_counter()
    call()
    synchronise(device)
    once = max(time.perf_counter() - begun, 1e-6)
    inner = max(1, min(200, round(budget / repeats / once)))
    found = []
    for _ in range(repeats):
        synchronise(device)
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1e3 / inner)
        else:
            begun = time.perf_counter()
            for _ in range(inner):
                call()
            found.append((time.perf_counter() - begun) / inner)
    return median(found)


def host_seconds(call: Callable[[], object], device: torch.device, *, repeats: int = 5) -> float:
    """Median time from calling to having the result, the device drained before and after; one call to warm up."""
    found = []
    for i in range(repeats + 1):
        synchronise(device)
        begun = time.perf_counter()
        call()
        synchronise(device)
        if i:
            found.append(time.perf_counter() - begun)
    return median(found)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Give back what earlier lines left behind."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> tuple[float, float]:
    """Most memory in tensors, and most taken from the device, since the last `free`, in 10⁹ bytes."""
    if device.type != "cuda":
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated(device) / 1e9, torch.cuda.max_memory_reserved(device) / 1e9


def ceilings(device: torch.device) -> list[Row]:
    """The device's copy bandwidth and its bf16 (float32 on a CPU) matrix rate: the two numbers that bound
    everything."""
    gpu = device.type == "cuda"
    size, dtype = (1 << 28, torch.bfloat16) if gpu else (1 << 23, torch.float32)
    source = torch.randn(size, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copy = seconds_per_call(lambda: target.copy_(source), device, budget=0.2)
    moved = 2 * source.numel() * source.element_size() / copy
    side = 8192 if gpu else 1024
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = seconds_per_call(lambda: a @ b, device, budget=0.2)
    return [
        row("ceiling: copy, bytes read and written", moved / 1e9, "GB/s"),
        row(f"ceiling: matrix product, {str(dtype).split('.')[-1]}", 2 * side**3 / product / 1e12, "TFLOP/s"),
    ]


class LineTimeout(BaseException):
    """A line took longer than it may. No `Exception`: code that goes on after failures must not go on after this
    one."""


@contextmanager
def time_cap(seconds: float | None) -> Iterator[None]:
    """Raise `LineTimeout` inside after so many seconds; only where signals work (main thread, not Windows)."""
    if not seconds or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: object) -> None:
        raise LineTimeout(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_line(
    name: str, line: Callable[[], Iterator[Row]], cap: float | None, report: Callable[[Row], None], device: torch.device
) -> list[Row]:
    """Rows of one line as they come; what goes wrong becomes a row, so that the other lines still run."""
    found: list[Row] = []
    begun = time.perf_counter()
    try:
        free(device)
        with time_cap(cap):
            for entry in line():
                found.append(entry)
                report(entry)
    except (Exception, LineTimeout) as error:
        where = traceback.format_exc(limit=-4)
        entry = Row(
            f"{name}: failed", None, "", ok=False, note=f"{type(error).__name__}: {error}", more={"trace": where}
        )
        found.append(entry)
        report(entry)
    report(Row(f"{name}: line took", time.perf_counter() - begun, "s"))
    return found


def errors_in_words(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark's `main` as the command line does: what is wrong is said in one line, with an exit code."""
    try:
        sys.exit(main())
    except (RamatchError, OSError) as error:
        sys.exit(f"error: {error}")
