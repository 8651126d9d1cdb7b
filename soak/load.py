"""Many requests at once over loopback: at a rate, or each after the last."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from soak.pictures import encode, noise
from soak.servers import FORM, form


@dataclass
class Answers:
    """Statuses (0: no answer), seconds of the answers with status 200, and requests left without an answer."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    lost: list[tuple[float, str]] = field(default_factory=list)  # when it was sent, why
    unsent: int = 0

    def percentile(self, percent: float) -> float:
        ordered = sorted(self.seconds) or [math.inf]
        return ordered[min(len(ordered) - 1, math.ceil(percent / 100 * len(ordered)) - 1)]

    def other_than(self, *allowed: int) -> str:
        wrong = {status: n for status, n in self.statuses.items() if status not in allowed}
        return f"answers {wrong}" if wrong else ""


def http(method: str, path: str, body: bytes = b"", kind: str = "application/json", port: int = 80) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    if body:
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def tag_requests(port: int, count: int = 96, size: tuple[int, int] = (320, 240), **fields: str) -> list[bytes]:
    """Requests with different pictures, so that nothing is answered from a cache."""
    pictures = (encode(noise(size=size, seed=i), "JPEG") for i in range(count))
    return [http("POST", "/v1/tag", form(picture, **fields), FORM, port) for picture in pictures]


async def exchange(port: int, request: bytes, limit: float = 60) -> int:
    """Status of the answer, on a connection of its own."""

    async def ask() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.create_task(reader.readline())  # a refusal may come while it is sent
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(request)
                await writer.drain()
            first = await reading
            if not first:
                raise ConnectionResetError("closed without an answer")
            with contextlib.suppress(ConnectionError):
                await reader.read()
            return int(first.split(b" ", 2)[1])
        finally:
            reading.cancel()
            writer.close()

    return await asyncio.wait_for(ask(), limit)


async def timed(port: int, request: bytes, answers: Answers, limit: float = 60) -> None:
    begin = time.monotonic()
    try:
        status = await exchange(port, request, limit)
    except ConnectionRefusedError:
        status = -1  # nobody listens any more
    except (OSError, TimeoutError, asyncio.TimeoutError) as error:
        answers.lost.append((begin, repr(error)))
        status = 0
    answers.statuses[status] += 1
    if status == 200:
        answers.seconds.append(time.monotonic() - begin)


async def closed_loop(port: int, requests: Sequence[bytes], workers: int, seconds: float) -> Answers:
    """Each worker sends its next request when its last is answered."""
    answers, end, source = Answers(), time.monotonic() + seconds, itertools.cycle(requests)

    async def work() -> None:
        while time.monotonic() < end:
            before = answers.statuses[-1] + answers.statuses[0]
            await timed(port, next(source), answers)
            if answers.statuses[-1] + answers.statuses[0] > before:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(work() for _ in range(workers)))
    return answers


async def open_loop(port: int, requests: Sequence[bytes], rate: float, seconds: float, most: int = 400) -> Answers:
    """Requests leave at a rate whatever comes back; at most `most` are under way."""
    answers, start, source = Answers(), time.monotonic(), itertools.cycle(requests)
    under_way: set[asyncio.Task[None]] = set()
    for i in range(max(1, math.ceil(rate * seconds))):
        await asyncio.sleep(max(0.0, start + i / rate - time.monotonic()))
        if len(under_way) >= most:
            answers.unsent += 1
            continue
        task = asyncio.create_task(timed(port, next(source), answers))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    return answers
