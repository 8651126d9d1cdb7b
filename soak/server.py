"""A server under load, and in bad company."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time

from soak import hostile_http, workers
from soak.load import Answers, closed_loop, open_loop, tag_requests
from soak.process import MIB
from soak.report import Soak
from soak.servers import Server
from soak.worlds import tiny_model

QUEUE, BATCH = 16, 8  # short, so that it is full within seconds


class MemoryLog:
    """Resident memory of a server, twice a second."""

    def __init__(self, server: Server) -> None:
        self.server, self.seen, self._over = server, [server.rss], threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.seen.append(self.server.rss)

    def growth(self) -> int:
        """Median of the last quarter less that of the second: what comes after warming up."""
        self._over.set()
        self._thread.join()
        quarter = max(1, len(self.seen) // 4)
        early = self.seen[quarter : 2 * quarter] or self.seen[:1]
        return int(statistics.median(self.seen[-quarter:]) - statistics.median(early))


def run(soak: Soak) -> None:
    run_load(soak)
    model = tiny_model(soak.folder("model"))
    hostile_http.run(soak, model)
    workers.run(soak, model)


def run_load(soak: Soak) -> None:
    options = ("--queue", str(QUEUE), "--batch-size", str(BATCH))
    # the bundled model: with a tiny one the clients would be what is loaded
    with Server("ramatch-mini", soak.folder("log") / "load.log", *options) as server:
        _overload(soak, server)
        _terminate(soak, server)


def _overload(soak: Soak, server: Server) -> None:
    start, seconds = time.monotonic(), soak.size(240, 4)
    requests = tag_requests(server.port, vocabulary="coco80")
    asyncio.run(closed_loop(server.port, requests, 2, 1.0))  # warm
    alone = asyncio.run(closed_loop(server.port, requests, 1, soak.size(8, 1)))
    most = soak.size(8, 1)
    rate = len(asyncio.run(closed_loop(server.port, requests, 16, most)).seconds) / most
    asyncio.run(open_loop(server.port, requests, 2 * rate, most))  # what the largest batches take stays taken
    log = MemoryLog(server)
    begun = time.monotonic()
    loaded = asyncio.run(open_loop(server.port, requests, 2 * rate, seconds))
    carried = len(loaded.seconds) / (time.monotonic() - begun)
    growth, ready = log.growth(), server.ready_within(5)

    count, p50, p99 = sum(loaded.statuses.values()), alone.percentile(50), loaded.percentile(99)
    misses = [loaded.other_than(200, 429)] + [f"lost: {why}" for _, why in loaded.lost[:2]]
    if not loaded.statuses[429]:
        misses.append("nothing was refused: this was no overload")
    if loaded.unsent:
        misses.append(f"{loaded.unsent} could not be sent: too many were under way")
    soak.check("twice its load", f"only 200 and 429 ({2 * rate:.0f}/s offered)", misses, cases=count, since=start)
    bound = 3 * p50 + (QUEUE + BATCH) / max(carried, 1e-9)  # all that may be admitted, at the speed it then had
    slow = f"p99 {p99:.2f} s, p50 {loaded.percentile(50):.2f} s, alone {p50:.3f} s, {carried:.1f} images/s"
    slow = slow if p99 > bound else ""
    soak.check("latency", f"p99 of accepted below {bound:.2f} s", slow, cases=len(loaded.seconds), since=start)
    allowed = 64 * MIB if soak.short else 32 * MIB
    grown = f"grew by {growth / MIB:.0f} MiB" if growth > allowed else ""
    soak.check("memory", f"grows by less than {allowed // MIB} MiB under load", grown, cases=count, since=start)
    soak.check("ready afterwards", "/readyz 200 within 5 s", [ready, *server.faults()], cases=1, since=start)


def _terminate(soak: Soak, server: Server) -> None:
    """SIGTERM while eight clients wait: what was sent before is answered."""
    start = time.monotonic()
    requests = tag_requests(server.port, vocabulary="coco80")
    codes: list[int | None] = []
    when: list[float] = []

    def stop() -> None:
        time.sleep(1.5)
        when.append(time.monotonic())
        codes.append(server.terminate())

    thread = threading.Thread(target=stop)
    thread.start()
    answers: Answers = asyncio.run(closed_loop(server.port, requests, 8, 3))
    thread.join()
    misses = [answers.other_than(200, 429, 503, 0, -1)]
    lost = [why for sent, why in answers.lost if sent < when[0] - 0.2]
    misses += [f"{len(lost)} accepted before SIGTERM were not answered: {lost[0]}"] if lost else []
    if codes[0] != 0:
        misses.append(f"exit code {codes[0]}")
    count = sum(answers.statuses.values())
    required = "accepted requests are answered, exit code 0"
    soak.check("SIGTERM under load", required, misses, cases=count, since=start)
