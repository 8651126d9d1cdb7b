"""Bad company: slow and odd clients, floods in the log, long vocabularies, several workers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serve_fakes import FakeRecognizer, picture

from ramatch.errors import RamatchError
from ramatch.serve import ServeSettings, guard, serve
from ramatch.serve.app import create_app
from ramatch.serve.batcher import MicroBatcher
from ramatch.serve.errors import ApiError
from ramatch.serve.logs import LINES, Plain, Thinned, set_up
from ramatch.serve.metrics import Metrics
from ramatch.serve.service import PART
from ramatch.serve.vocabularies import NamedVocabularies

SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from serve_fakes import FakeRecognizer
from ramatch.serve import ServeSettings, serve
serve(recognizer=FakeRecognizer(), port=0, settings=ServeSettings(header_s=1, body_s=1, max_body_bytes=100_000))
"""


@pytest.fixture
def port():  # type: ignore[no-untyped-def]
    code = SCRIPT.format(paths=[str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found = re.search(r"127\.0\.0\.1:(\d+)", process.stderr.readline())
    assert found
    yield int(found[1])
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=15)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


def test_slow_headers_and_bodies_are_hung_up_on(port: int) -> None:
    head = b"POST /v1/tag HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n"
    start = time.monotonic()
    with connect(port) as slow_head, connect(port) as slow_body:
        slow_head.sendall(head)
        slow_body.sendall(head + b"\r\n{")
        assert read_all(slow_head) == b""
        answer = read_all(slow_body)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"upload_too_slow" in answer
    assert time.monotonic() - start < 12


def test_a_refused_upload_hears_the_refusal(port: int) -> None:
    body = b"x" * 3_000_000
    head = f"POST /v1/tag HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    for _ in range(10):
        with connect(port) as connection:
            connection.sendall(head.encode() + body)
            answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 413"), answer[:80]
        assert b"body_too_large" in answer


def test_every_answer_has_an_id(client: TestClient) -> None:
    first, second = (client.get("/healthz").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert client.get("/nothing", headers={"X-Request-ID": "abc-1.2_3"}).headers["x-request-id"] == "abc-1.2_3"
    for odd in ("a b", "x" * 65, "\x1b[31m", ""):
        assert client.get("/healthz", headers={"X-Request-ID": odd}).headers["x-request-id"] != odd


def test_the_access_log_is_a_line_of_json_each(client: TestClient, tmp_path: Path) -> None:
    before = logging.root.handlers[:], logging.root.level
    try:
        set_up(str(tmp_path / "access.log"))
        client.get("/healthz", headers={"X-Request-ID": "one"})
        client.get("/%1b[31m%c2%9bred%0anew")
        client.post("/v1/tag", files={"image": picture()}, data={"labels": "cat"})
    finally:
        logging.root.handlers, logging.root.level = before[0], before[1]
        guard.access.handlers = []
        guard.access.setLevel(logging.NOTSET)
    text = (tmp_path / "access.log").read_text()
    assert all(character == "\n" or " " <= character <= "~" for character in text)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["method"], line["status"]) for line in lines] == [("GET", 200), ("GET", 404), ("POST", 200)]
    assert lines[0]["id"] == "one"
    assert lines[0]["path"] == "/healthz"
    assert all(line["ms"] >= 0 and line["client"] for line in lines)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("x", logging.WARNING, "f", 1, text, (), None)


def test_logs_are_printable_short_and_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Plain("%(message)s").format(record("a\x1b[31m\nb\x9b\x07" + "x" * 100_000))
    assert shown.startswith("a\\x1b[31m\nb\\x9b\\x07xxx")
    assert len(shown) < 10_000
    now, thinned = 1000.0, Thinned()
    monkeypatch.setattr("ramatch.serve.logs.time.monotonic", lambda: now)
    assert sum(thinned.filter(record("again")) for _ in range(5 * LINES)) == LINES
    now += 60
    late = record("late")
    assert thinned.filter(late)
    assert f"{4 * LINES} records left out" in late.getMessage()


def test_a_queue_that_would_take_too_long_refuses() -> None:
    async def scenario() -> None:
        batcher = MicroBatcher(lambda key, items: items, ServeSettings(queue_s=1.0), Metrics())
        batcher._seconds_per_image = 0.6
        tasks = [asyncio.create_task(batcher.submit_many("a", [i], time.monotonic() + 9)) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="queue is full") as refused:
            batcher.check_room()
        assert refused.value.headers["Retry-After"] == "2"
        batcher.start()
        assert await asyncio.gather(*tasks) == [[0], [1]]
        await batcher.drain()

    asyncio.run(scenario())


def test_images_that_are_being_decoded_count_and_are_not_turned_back() -> None:
    async def scenario() -> None:
        batcher = MicroBatcher(lambda key, items: items, ServeSettings(queue_s=1.0, queue_size=4), Metrics())
        batcher._seconds_per_image = 0.3
        with batcher.arrival(3):
            batcher.check_room()  # 0.9 s, and three of four places
            with pytest.raises(ApiError, match="queue is full"):
                batcher.check_room(2)
            with batcher.arrival(1):
                with pytest.raises(ApiError, match="queue is full") as refused:
                    batcher.check_room()
                assert refused.value.headers["Retry-After"] == "2"
            first = asyncio.create_task(batcher.submit_many("a", [0, 1], time.monotonic() + 9))
            await asyncio.sleep(0)
            batcher._seconds_per_image = 3.0  # whoever was let in stays, however slow it has become meanwhile
            second = asyncio.create_task(batcher.submit_many("a", [2], time.monotonic() + 9))
            await asyncio.sleep(0)
        with pytest.raises(ApiError, match="queue is full"):
            batcher.check_room()
        batcher.start()
        assert await asyncio.gather(first, second) == [[0, 1], [2]]
        batcher.check_room()
        await batcher.drain()

    asyncio.run(scenario())


def test_long_vocabularies_are_encoded_in_parts_and_not_for_who_has_left() -> None:
    recognizer = FakeRecognizer()
    recognizer.labels = ("own",)
    encode = recognizer.encode_vocabulary
    recognizer.encode_vocabulary = lambda labels: (time.sleep(0.05), encode(labels))[1]  # type: ignore[assignment]
    service = create_app(recognizer, ServeSettings(cached_vocabularies=2)).state.service
    labels = tuple(f"label {i}" for i in range(10 * PART))

    async def scenario() -> None:
        gone = asyncio.create_task(service._vocabulary(labels))
        await asyncio.sleep(0.12)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await asyncio.sleep(0.1)
        begun = len(recognizer.encoded)
        assert 1 <= begun < 6
        await asyncio.sleep(0.2)
        assert len(recognizer.encoded) == begun
        found = await asyncio.gather(*(service._vocabulary(labels[: PART + 1]) for _ in range(4)))
        assert all(each is found[0] for each in found)
        assert [len(part) for part in recognizer.encoded[begun:]] == [PART, PART + 1]

    asyncio.run(scenario())


def test_bound_to_the_world_without_a_key_it_warns_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("ramatch.serve.run._work", lambda *values: None)
    for host, key, loud in [("0.0.0.0", None, True), ("0.0.0.0", "long enough", False), ("127.0.0.1", None, False)]:
        said.clear()
        settings = ServeSettings(api_key=key)
        serve(recognizer=FakeRecognizer(), host=host, port=0, settings=settings, announce=said.append)
        assert bool([line for line in said if "WARNING" in line and "RAMATCH_API_KEY" in line]) == loud


def test_workers_load_the_model_themselves() -> None:
    with pytest.raises(RamatchError, match="name it"):
        serve(recognizer=FakeRecognizer(), port=0, settings=ServeSettings(workers=2))


def test_workers_share_registered_vocabularies(tmp_path: Path) -> None:
    one, other = (NamedVocabularies(2, tmp_path / "shared.sqlite") for _ in range(2))
    assert one.put("pets", ("cat", "red dog"))
    assert other.get("pets") == ("cat", "red dog")
    assert not other.put("pets", ("cat",))
    assert "pets" in one.names()
    other.delete("pets")
    for name in ("pets", "../pets", "/etc/hosts", "\ud800"):
        with pytest.raises(ApiError, match="no vocabulary"):
            one.get(name)
    one.put("a", ("x",))
    one.put("b", ("x",))
    with pytest.raises(ApiError, match="2 vocabularies"):
        other.put("c", ("x",))


def test_spans_for_opentelemetry(client_for: Callable[..., TestClient]) -> None:
    sdk: Any = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    above = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    client_for().get("/v1/vocabularies/coco80", headers={"traceparent": above, "X-Request-ID": "seven"})
    [span] = [each for each in spans.get_finished_spans() if each.instrumentation_scope.name == "ramatch"]
    assert span.name == "GET /v1/vocabularies/{name}"
    assert f"{span.context.trace_id:032x}" == above.split("-")[1]
    wanted = {"http.response.status_code": 200, "http.request.method": "GET", "request.id": "seven"}
    assert wanted.items() <= dict(span.attributes).items()
