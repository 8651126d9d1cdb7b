"""Several processes on one listening socket, each with the model; one that dies is replaced."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

QUICK_S, MOST_WAIT_S = 10.0, 30.0  # a worker that ends sooner than this is replaced more and more slowly


def supervise(count: int, work: Callable[..., None], arguments: tuple[Any, ...], say: Callable[[str], None]) -> None:
    """Run `work(*arguments)` in `count` processes until SIGTERM or Ctrl-C, which they get too."""
    context, stop, pause, due = multiprocessing.get_context("spawn"), threading.Event(), 1.0, 0.0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    running: dict[Any, float] = {}
    with tempfile.TemporaryDirectory(prefix="ramatch-serve-") as shared:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared  # children write their counters and vocabularies there
        while not stop.is_set():
            while len(running) < count and time.monotonic() >= due:
                process = context.Process(target=_worker, args=(work, arguments))
                process.start()
                running[process] = time.monotonic()
            wait([process.sentinel for process in running], 0.2)
            for process in [each for each in running if not each.is_alive()]:
                quick = time.monotonic() - running.pop(process) < QUICK_S
                pause = min(MOST_WAIT_S, 2 * pause) if quick else 1.0
                due = time.monotonic() + (pause if quick else 0.0)
                _forget(process.pid, shared)
                say(f"ramatch: a worker ended with code {process.exitcode}; it is replaced")
        for process in running:
            process.terminate()
        for process in running:
            process.join()


def _worker(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:  # whoever kills the parent must not leave its children listening
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    work(*arguments)


def _forget(pid: int, shared: str) -> None:
    """Gauges of a process that has gone are no longer part of the sum."""
    from prometheus_client.multiprocess import mark_process_dead

    mark_process_dead(pid, shared)
