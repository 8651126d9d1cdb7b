"""Several worker processes: one killed is replaced, what is registered is known to all, none outlives its parent."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from soak.pictures import encode, noise
from soak.report import Soak
from soak.servers import Server

COUNT = 2


def run(soak: Soak, model: Path) -> None:
    _deaths(soak, model)
    _orphans(soak, model)


def workers(server: Server) -> list[int]:
    """Process ids of the server's workers: its children but for multiprocessing's own helper."""
    found = []
    for task in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in task.read_text().split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if b"spawn_main" in command:
                found.append(int(pid))
    return found


def until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def ready(server: Server) -> bool:
    """Whether all workers are, by the sum that any of them gives."""
    found = re.search(rb"^ramatch_ready (\S+)", server.send("GET", "/metrics")[1], re.MULTILINE)
    return found is not None and float(found[1]) >= COUNT and len(workers(server)) == COUNT


def _deaths(soak: Soak, model: Path) -> None:
    start, deaths, misses = time.monotonic(), soak.size(10, 1), []
    picture = encode(noise(), "PNG")
    with Server(model, soak.folder("log") / "workers.log", "--workers", str(COUNT)) as server:
        if not until(lambda: ready(server), 60):
            misses.append("the workers were not ready within 60 s")
        server.send("PUT", "/v1/vocabularies/kept", b'{"labels": ["cat", "dog"]}')
        for i in range(deaths):
            os.kill(workers(server)[i % COUNT], signal.SIGKILL)
            answers = [server.tag(picture, vocabulary="kept", timeout=30)[0] for _ in range(10)]
            if set(answers[1:]) - {200}:  # the first may have reached the one that died
                misses.append(f"death {i + 1}: the other answered {answers}")
            if not until(lambda: ready(server), 60):
                misses.append(f"death {i + 1}: not replaced within 60 s, workers {workers(server)}")
                break
        before = workers(server)
        if (code := server.terminate()) != 0:
            misses.append(f"exit code {code} after SIGTERM")
        misses += [f"worker {pid} outlived it" for pid in before if Path(f"/proc/{pid}").exists()]
        misses += [fault for fault in server.faults() if "ended by itself" not in fault]
    required = "the others answer, each is replaced, all end with SIGTERM"
    soak.check("worker death", required, misses, cases=deaths, since=start)


def _orphans(soak: Soak, model: Path) -> None:
    start = time.monotonic()
    with Server(model, soak.folder("log") / "orphans.log", "--workers", str(COUNT)) as server:
        until(lambda: ready(server), 60)
        before = workers(server)
        server.process.kill()
        server.process.wait()
        gone = until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), 10)
    left = "" if gone else "workers go on without their parent"
    soak.check("parent death", "its workers end within 10 s", left, cases=len(before), since=start)
