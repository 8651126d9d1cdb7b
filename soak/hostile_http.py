"""Bad company for a server: slow, rude, huge and odd requests, with a good client beside them who must be served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from soak.http_cases import BodyCase, huge_bodies, odd_bodies
from soak.load import Answers, http, tag_requests, timed
from soak.pictures import many_scans
from soak.process import MIB
from soak.report import Soak
from soak.servers import FORM, Server, error_code, form

MOST = 1024 * MIB


def run(soak: Soak, model: Path) -> None:
    checks = (_slow_headers, _slow_bodies, _disconnects, _short_connections, _odd, _scans)  # the last may hold decoders
    with Server(model, soak.folder("log") / "hostile.log") as server:
        for each in checks:
            each(soak, server)
            if server.process.poll() is not None:
                raise RuntimeError("the server is gone")
        start = time.monotonic()
        size = (soak.folder("log") / "hostile.log").stat().st_size
        misses = [*server.faults(), f"{size:,} bytes of log" if size > 1 << 20 else ""]
        soak.check("log", "no traceback in the server's log, less than 1 MiB of it", misses, cases=1, since=start)
    _huge(soak, model)


def patience(soak: Soak) -> float:
    """Seconds within which a good client is served, whatever others do."""
    return 2.5 if soak.short else 5.0


async def good_client(port: int, over: asyncio.Event, most: float) -> list[str]:
    """Asks for health and for tags until `over`; what was not answered within `most` seconds."""
    misses: list[str] = []
    tag = tag_requests(port, 4, (64, 48), labels="cat,dog")
    health = http("GET", "/healthz", port=port)
    i = 0
    while not over.is_set() or i == 0:
        i += 1
        begin = time.monotonic()
        answers = Answers()
        await timed(port, health, answers, most)
        if not answers.statuses[200]:
            misses.append(f"/healthz: {answers.lost[0][1] if answers.lost else answers.other_than(200)}")
        answers = Answers()
        while not answers.statuses[200] and time.monotonic() < begin + most:
            await timed(port, tag[i % len(tag)], answers, most)
            await asyncio.sleep(0.1)
        if not answers.statuses[200]:
            misses.append(f"a good client waited {most:g} s: {set(answers.statuses) - {0} or 'no answer'}")
        await asyncio.sleep(0.1)
    return list(dict.fromkeys(misses))


def beside(soak: Soak, server: Server, bad: Callable[[], Awaitable[object]]) -> list[str]:
    """What a good client missed while the bad ones were at work, and just after."""

    async def both() -> list[str]:
        over = asyncio.Event()
        good = asyncio.create_task(good_client(server.port, over, patience(soak)))
        try:
            await bad()
        finally:
            over.set()
        return await good

    return [*asyncio.run(both()), server.ready_within(patience(soak))]


async def _drip(port: int, first: bytes, drop: bytes, seconds: float) -> None:
    """Send a beginning, then a little now and then."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(first)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await asyncio.sleep(0.5)
                writer.write(drop)
                await writer.drain()
        finally:
            writer.close()


def _slow(soak: Soak, server: Server, name: str, first: bytes, drop: bytes) -> None:
    start, count = time.monotonic(), soak.size(1_100, 600)  # more than a server takes at a time
    seconds = soak.size(10, 0) + patience(soak) + 0.5  # longer than a good client waits

    async def bad() -> None:
        await asyncio.gather(*(_drip(server.port, first, drop, seconds) for _ in range(count)))

    required = f"others are served within {patience(soak):g} s"
    soak.check(name, required, beside(soak, server, bad), cases=count, since=start)


def _slow_headers(soak: Soak, server: Server) -> None:
    _slow(soak, server, "slow headers", b"POST /v1/tag HTTP/1.1\r\nHost: 127.0.0.1\r\n", b"X-A: b\r\n")


def _slow_bodies(soak: Soak, server: Server) -> None:
    first = f"POST /v1/tag HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {FORM}\r\nContent-Length: 900000\r\n\r\n"
    _slow(soak, server, "slow bodies", first.encode(), b"--" * 8)


def _disconnects(soak: Soak, server: Server) -> None:
    """Hang up in the headers, in the body, and right after sending."""
    start, count = time.monotonic(), soak.size(1_000, 60)
    whole = tag_requests(server.port, 8, labels="cat,dog")

    async def rude(i: int) -> None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            request = whole[i % len(whole)]
            writer.write(request[: (len(request), len(request) // 2, 40)[i % 3]])
            await writer.drain()
            await asyncio.sleep(0.002 * (i % 7))
            writer.transport.abort()

    async def bad() -> None:
        for first in range(0, count, 20):
            await asyncio.gather(*(rude(i) for i in range(first, min(count, first + 20))))

    misses = beside(soak, server, bad)
    end = time.monotonic() + patience(soak)
    while (left := _at_work(server)) and time.monotonic() < end:
        time.sleep(0.1)
    if left:
        misses.append(f"{left:g} images of clients that left are still at work")
    soak.check("disconnects", "others are served, nothing stays queued", misses, cases=count, since=start)


def _at_work(server: Server) -> float:
    """Images that wait or are in the model, by the server's own account."""
    _, text = server.send("GET", "/metrics")
    return sum(float(value) for value in re.findall(rb"^ramatch_(?:queue|running)_images (\S+)", text, re.MULTILINE))


def _short_connections(soak: Soak, server: Server) -> None:
    start, count, answers = time.monotonic(), soak.size(10_000, 300), Answers()
    folder = f"/proc/{server.process.pid}/fd"
    before, memory = len(os.listdir(folder)), server.rss
    request = http("GET", "/healthz", port=server.port)

    async def bad() -> None:
        for first in range(0, count, 50):
            await asyncio.gather(
                *(timed(server.port, request, answers, 10) for _ in range(first, min(count, first + 50)))
            )

    misses = [*beside(soak, server, bad), answers.other_than(200)]
    time.sleep(0.5)
    if (after := len(os.listdir(folder))) > before + 20:
        misses.append(f"{after - before} more open files afterwards")
    if (grown := server.rss - memory) > 64 * MIB:
        misses.append(f"memory grew by {grown / MIB:.0f} MiB")
    soak.check("short connections", "all answered, no file or memory kept", misses, cases=count, since=start)


def _huge(soak: Soak, model: Path) -> None:
    """Each to a server of its own, so that the peak of memory is its own."""
    for i, case in enumerate(huge_bodies(soak.short)):
        start = time.monotonic()
        with Server(model, soak.folder("log") / f"huge{i}.log") as server:
            misses = _refused(soak, server, case) + server.faults()
            if server.peak > MOST:
                misses.append(f"peak memory {server.peak / MIB:.0f} MiB, allowed {MOST // MIB}")
        required = f"4xx within {patience(soak):g} s, others served, below {MOST // MIB} MiB"
        soak.check(case.name, required, misses, cases=1, since=start)


def _refused(soak: Soak, server: Server, case: BodyCase) -> list[str]:
    answers = Answers()

    async def bad() -> None:
        begin = time.monotonic()
        await timed(server.port, http("POST", case.path, case.body, port=server.port), answers)
        if (spent := time.monotonic() - begin) > patience(soak):
            answers.lost.append((begin, f"it took {spent:.1f} s"))

    misses = beside(soak, server, bad)
    return [*misses, *(why for _, why in answers.lost), answers.other_than(400, 413, 415, 422)]


def _scans(soak: Soak, server: Server) -> None:
    """Progressive JPEGs of 2 MB with thousands of scans, as many as there are decoders and more."""
    start, picture, answers = time.monotonic(), many_scans(soak.size(2_000_000, 300_000)), Answers()
    request = http(
        "POST", "/v1/tag", form(picture, labels="cat,dog", deadline_ms=str(soak.size(8000, 3000))), FORM, server.port
    )

    async def bad() -> None:
        await asyncio.gather(*(timed(server.port, request, answers) for _ in range(4)))

    misses = [*beside(soak, server, bad), answers.other_than(200, 400, 413, 422, 504)]
    misses += [f"lost: {why}" for _, why in answers.lost]
    required = f"answered or refused, others served within {patience(soak):g} s"
    soak.check("JPEG of many scans", required, misses, cases=4, since=start)


def _odd(soak: Soak, server: Server) -> None:
    start, misses = time.monotonic(), []
    cases = odd_bodies()
    for case in cases:
        status, body = server.send(case.method, case.path, case.body, case.kind, timeout=40)
        fine = status in (200, 201) or (status is not None and 400 <= status < 500)
        if not fine:
            misses.append(f"{case.name}: {status} {body[:80]!r}")
        elif status not in (200, 201) and not error_code(body):
            misses.append(f"{case.name}: {status} without a code in its body")
        elif status == 200:
            with contextlib.suppress(UnicodeDecodeError):
                json.loads(body)
    soak.check("odd fields", "200 or 4xx with a code", misses, cases=len(cases), since=start)
