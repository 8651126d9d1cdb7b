"""How fast the server is: `bench_serve` starts one in a second process and loads it over loopback.

The yardstick is the same model in the same process called with one image at a time, decoding included, before the
server starts. Latencies are seen from the client. No image is sent twice in a row of `DISTINCT`, and the model keeps no
features of images, so nothing is answered from a cache.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import math
import multiprocessing
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.measure import errors_in_words
from ramatch import assets
from ramatch.data.images import load_image
from ramatch.errors import RamatchError
from ramatch.files import write_json
from ramatch.serve.settings import ServeSettings

DISTINCT = 96
FEW = 20  # a row with fewer answers than this says little
_BOUNDARY = "ramatch-bench"


@dataclass
class Load:
    """What one run of requests came to; latencies in seconds, of answers with status 200."""

    latencies: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    unsent: int = 0  # due while all connections were busy

    def row(self, what: str, **more: Any) -> dict[str, Any]:
        done = sorted(self.latencies)
        percentiles = {f"p{p}_ms": round(1000 * _percentile(done, p), 1) if done else None for p in (50, 95, 99)}
        other = sum(n for status, n in self.statuses.items() if status not in (200, 429))
        return {
            "what": what,
            "images_per_s": round(len(done) / max(self.seconds, 1e-9), 1),
            **percentiles,
            "answered": len(done),
            "refused_429": self.statuses.get(429, 0),
            "other": other,
            **more,
        }


def bench_serve(
    load: Callable[[], Any],
    *,
    vocabulary: str = "coco80",
    concurrency: Sequence[int] = (1, 4, 16, 64),
    seconds: float = 5.0,
    max_requests: int = 20_000,
    overload: float = 2.0,
    settings: ServeSettings | None = None,
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure and print img/s and p50/p95/p99 at each concurrency and at `overload` times the best throughput.

    `load` (picklable) makes the recognizer, in the server's process. Every run ends after `seconds` (at overload: after
    at most six times as long, for the queue to fill) or `max_requests`, whichever is first. Returns {"rows": [...],
    ...} for JSON.
    """
    if not concurrency or min(concurrency) < 1 or seconds <= 0 or max_requests < 1 or overload <= 0:
        raise RamatchError("bench serve: concurrency, seconds, requests and overload must all be greater than 0")
    # A shorter queue than the default: overload shows within seconds, and waiting stays short.
    settings = settings or ServeSettings(queue_size=max(64, *concurrency), max_images=1)
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_serve, args=(there, load, settings, vocabulary, min(seconds, 10.0)), daemon=True)
    child.start()
    there.close()
    try:
        info = _receive(here, child)
        rows = [info.pop("row")]
        _print_head(echo, info, vocabulary)
        _print_row(echo, rows[0])
        port = int(re.findall(r":(\d+)/", _receive(here, child))[-1])
        connections, show = Connections(port, vocabulary), partial(_print_row, echo)
        work = _measure(connections, concurrency, seconds, max_requests, overload, settings.queue_size, show)
        rows += asyncio.run(work)
    finally:
        child.terminate()  # SIGTERM: the server drains
        child.join(20)
        if child.is_alive():
            child.kill()
    best = max(row["images_per_s"] for row in rows[1:-1])
    gain = best / max(rows[0]["images_per_s"], 1e-9)
    echo(f"best throughput is {gain:.2f} times that of one call at a time")
    if any(row["answered"] < FEW for row in rows):
        echo(f"some rows have fewer than {FEW} answers: measure for longer before you rely on them")
    if not rows[-1]["refused_429"]:
        echo("the queue never filled at overload: measure for longer, or with a shorter queue")
    return {"bench": "serve", **info, "vocabulary": vocabulary, "gain": round(gain, 3), "rows": rows}


# the server's process


def _load(model: str, device: str | None) -> Any:
    from ramatch.recognizer import Recognizer

    return Recognizer.from_pretrained(model, device=device, cache=0)


def _serve(pipe: Connection, load: Callable[[], Any], settings: ServeSettings, vocabulary: str, seconds: float) -> None:
    from ramatch.serve import serve

    try:
        recognizer = load()
        info = {"model": str(recognizer.name), "device": str(recognizer.device)}
        pipe.send({**info, "row": _one_at_a_time(recognizer, vocabulary, seconds)})
        serve(recognizer=recognizer, port=0, settings=settings, announce=pipe.send)
    except RamatchError as error:
        pipe.send(error)


def _one_at_a_time(recognizer: Any, vocabulary: str, seconds: float) -> dict[str, Any]:
    encoded = recognizer.encode_vocabulary(assets.vocabulary(vocabulary))
    pictures = itertools.cycle(_pictures())
    for _ in range(3):
        recognizer.predict([load_image(next(pictures))], vocabulary=encoded)
    load, start = Load(), time.monotonic()
    while (spent := time.monotonic() - start) < seconds or (len(load.latencies) < FEW and spent < 4 * seconds):
        begin = time.monotonic()
        recognizer.predict([load_image(next(pictures))], vocabulary=encoded)
        load.latencies.append(time.monotonic() - begin)
    load.seconds = time.monotonic() - start
    return load.row("model, one call at a time", concurrency=1)


def _receive(pipe: Connection, child: Any) -> Any:
    end = time.monotonic() + 300
    while not pipe.poll(0.2):
        if not child.is_alive():
            raise RamatchError(
                "bench serve: the server's process ended before it was ready; start `ramatch serve` to see why"
            )
        if time.monotonic() > end:
            raise RamatchError("bench serve: the server was not ready within 300 s")
    message = pipe.recv()
    if isinstance(message, RamatchError):
        raise message
    return message


# the client


class Connections:
    """Keep-alive connections to one server on loopback; prepared requests, answers read and dropped."""

    def __init__(self, port: int, vocabulary: str) -> None:
        self.port = port
        self.requests = itertools.cycle([_request(port, picture, vocabulary) for picture in _pictures()])
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def tag(self) -> int:
        """Send the next image; the status of the answer."""
        return (await self.send(next(self.requests)))[0]

    async def send(self, request: bytes) -> tuple[int, bytes]:
        for fresh in (False, True):  # an idle connection may have been closed by the server: then try a new one
            reader, writer = (
                self._idle.pop() if self._idle and not fresh else await asyncio.open_connection("127.0.0.1", self.port)
            )
            try:
                writer.write(request)
                await writer.drain()
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length.group(1)) if length else 0)
            except (OSError, asyncio.IncompleteReadError):
                writer.close()
                if fresh:
                    raise
                continue
            if b"connection: close" in head.lower():
                writer.close()
            else:
                self._idle.append((reader, writer))
            return int(head.split(b" ", 2)[1]), body
        raise AssertionError("unreachable")

    async def batch_counters(self) -> tuple[float, float]:
        """Images and batches that the model has done so far."""
        _, body = await self.send(f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n".encode())
        text = body.decode()
        values = [
            re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
            for name in ("ramatch_images_total", "ramatch_batch_images_count")
        ]
        return tuple(float(found.group(1)) if found else 0.0 for found in values)  # type: ignore[return-value]

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _measure(
    connections: Connections,
    concurrency: Sequence[int],
    seconds: float,
    max_requests: int,
    overload: float,
    queue: int,
    show: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    for _ in range(5):
        await connections.tag()
    rows = []
    for workers in concurrency:
        before = await connections.batch_counters()
        load = await _closed_loop(connections, workers, seconds, max_requests)
        row = load.row(
            f"server, {workers} at a time",
            concurrency=workers,
            images_per_batch=_mean_batch(before, await connections.batch_counters()),
        )
        rows.append(row)
        show(row)
    best = max(row["images_per_s"] for row in rows)
    if not best:
        raise RamatchError(f"bench serve: the server answered nothing within {seconds:g} s; measure for longer")
    rate = overload * best
    before = await connections.batch_counters()
    # Long enough for the queue to fill, but bounded.
    load = await _open_loop(connections, rate, min(max(seconds, 2 * queue / best), 6 * seconds), max_requests)
    row = load.row(
        f"server, {overload:g}x overload ({rate:.0f}/s sent)",
        offered_per_s=round(rate, 1),
        unsent=load.unsent,
        images_per_batch=_mean_batch(before, await connections.batch_counters()),
    )
    rows.append(row)
    show(row)
    connections.close()
    return rows


async def _closed_loop(connections: Connections, workers: int, seconds: float, max_requests: int) -> Load:
    """Each worker sends its next request when the last is answered."""
    load, start, left = Load(), time.monotonic(), max_requests

    async def work() -> None:
        nonlocal left
        while left > 0 and time.monotonic() - start < seconds:
            left -= 1
            await _timed(connections, load)

    await asyncio.gather(*(work() for _ in range(workers)))
    load.seconds = time.monotonic() - start
    return load


async def _open_loop(connections: Connections, rate: float, seconds: float, max_requests: int, most: int = 512) -> Load:
    """Requests leave at a fixed rate whatever comes back; at most `most` are under way."""
    load, start = Load(), time.monotonic()
    under_way: set[asyncio.Task] = set()
    for i in range(min(max_requests, max(1, math.ceil(rate * seconds)))):
        await asyncio.sleep(max(0.0, start + i / rate - time.monotonic()))
        if len(under_way) >= most:
            load.unsent += 1
            continue
        task = asyncio.create_task(_timed(connections, load))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)
    load.seconds = time.monotonic() - start
    return load


async def _timed(connections: Connections, load: Load) -> None:
    begin = time.monotonic()
    try:
        status = await connections.tag()
    except (OSError, asyncio.IncompleteReadError):
        status = 0
    load.statuses[status] = load.statuses.get(status, 0) + 1
    if status == 200:
        load.latencies.append(time.monotonic() - begin)
    elif status == 0:
        await asyncio.sleep(0.05)


# small things


def _pictures() -> list[bytes]:
    """Distinct JPEGs of about 400 pixels, cut from the bundled photographs."""
    photos = [load_image(path).resize((480, 360)) for path in assets.photo_paths()]
    made = []
    for i in range(DISTINCT):
        photo, shift = photos[i % len(photos)], i // len(photos)
        buffer = io.BytesIO()
        photo.crop((4 * shift, 2 * shift, 400 + 4 * shift, 320 + 2 * shift)).save(buffer, "JPEG", quality=88)
        made.append(buffer.getvalue())
    return made


def _request(port: int, picture: bytes, vocabulary: str) -> bytes:
    body = (
        (
            f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="vocabulary"\r\n\r\n{vocabulary}\r\n'
            f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="p.jpg"\r\n\r\n'
        ).encode()
        + picture
        + f"\r\n--{_BOUNDARY}--\r\n".encode()
    )
    head = (
        f"POST /v1/tag HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\n\r\n"
    )
    return head.encode() + body


def _percentile(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(percent / 100 * len(ordered)) - 1)]


def _mean_batch(before: tuple[float, float], after: tuple[float, float]) -> float:
    return round((after[0] - before[0]) / max(after[1] - before[1], 1.0), 2)


def _print_head(echo: Callable[[str], None], info: dict[str, Any], vocabulary: str) -> None:
    echo(f"bench serve: {info['model']} on {info['device']}, vocabulary {vocabulary}")
    echo(f"{'':<38}{'img/s':>8}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}{'batch':>7}{'429':>7}")


def _print_row(echo: Callable[[str], None], row: dict[str, Any]) -> None:
    times = "".join(f"{'-' if row[f'p{p}_ms'] is None else row[f'p{p}_ms']:>9}" for p in (50, 95, 99))
    batch = row.get("images_per_batch", 1)
    echo(f"{row['what']:<38}{row['images_per_s']:>8}{times}{batch:>7}{row['refused_429']:>7}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="ramatch-mini")
    parser.add_argument("--device", default=None)
    parser.add_argument("--seconds", type=float, default=5.0, help="per line")
    parser.add_argument("--json", default=None, metavar="F", help="also write the rows to this file")
    args = parser.parse_args(argv)
    rows = bench_serve(partial(_load, args.model, args.device), seconds=args.seconds)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    errors_in_words(main)
