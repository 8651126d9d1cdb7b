"""The server as a process of its own: start, answer, drain on SIGTERM, clear errors."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serve_fakes import FakeRecognizer, picture

from ramatch.errors import RamatchError
from ramatch.serve import ServeSettings, serve
from ramatch.serve.run import _for_host, _listen

SCRIPT = """
import sys
from serve_fakes import FakeRecognizer
from ramatch.serve import ServeSettings, serve
serve(recognizer=FakeRecognizer(seconds=float(sys.argv[1])), port=0, settings=ServeSettings(max_batch=1, window_s=0.0))
"""


class Process:
    def __init__(self, seconds: float) -> None:
        paths = [str(Path(__file__).parent), *sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(seconds)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
        )
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + self.process.stderr.read()
        self.url = found.group()

    def tag(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/tag", files={"image": picture()}, data={"labels": "cat,dog"}, timeout=20)


@pytest.fixture
def start() -> Iterator:
    started: list[Process] = []

    def make(seconds: float) -> Process:
        started.append(Process(seconds))
        return started[-1]

    yield make
    for each in started:
        each.process.kill()
        each.process.wait()


def test_sigterm_finishes_what_was_admitted_and_takes_nothing_new(start) -> None:  # type: ignore[no-untyped-def]
    server = start(0.4)
    while httpx.get(f"{server.url}/readyz").status_code != 200:
        time.sleep(0.05)
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(server.tag())) for _ in range(4)]
    with httpx.Client() as kept_alive:
        kept_alive.get(f"{server.url}/healthz")
        for thread in threads:
            thread.start()
        while "ramatch_queue_images 3.0" not in httpx.get(f"{server.url}/metrics").text:
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(10)
    assert [answer.status_code for answer in answers] == [200] * 4  # one was running, three were queued
    assert server.process.wait(10) in (0, -signal.SIGTERM)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{server.url}/healthz")


def test_an_upload_under_way_at_the_signal_is_still_answered(start) -> None:  # type: ignore[no-untyped-def]
    server = start(0.0)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"image": base64.b64encode(picture()).decode(), "labels": ["cat"]}).encode()
    head = "POST /v1/tag HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + body[:100])
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        connection.sendall(body[100:])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert server.process.wait(10) in (0, -signal.SIGTERM)


def test_ctrl_c_stops_it(start) -> None:  # type: ignore[no-untyped-def]
    server = start(0.0)
    assert server.tag().status_code == 200
    server.process.send_signal(signal.SIGINT)
    server.process.wait(10)


def test_a_taken_port_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RamatchError, match="--port"):
            serve(recognizer=FakeRecognizer(), port=taken.getsockname()[1])
    with pytest.raises(RamatchError, match="cannot listen"):
        serve(recognizer=FakeRecognizer(), host="no.such.host.invalid")


@pytest.mark.parametrize("port", [99999, -1, 65536])
def test_a_port_that_cannot_be_is_refused(port: int) -> None:
    with pytest.raises(RamatchError, match=f"no port {port}"):
        serve(recognizer=FakeRecognizer(), port=port)


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """asyncio sets TCP_NODELAY on the connections of a listener that says it is TCP, and on no other."""

    async def main() -> int:
        accepted: asyncio.Queue = asyncio.Queue()
        server = await asyncio.start_server(lambda _, writer: accepted.put(writer), sock=_listen("127.0.0.1", 0))
        _, client = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer = await accepted.get()
        found = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for end in (client, writer, server):
            end.close()
        return found

    assert asyncio.run(main()) != 0


def test_bound_to_the_world_it_answers_to_any_name_unless_told() -> None:
    assert _for_host(ServeSettings(), "0.0.0.0").allowed_hosts == ("*",)
    assert _for_host(ServeSettings(), "127.0.0.1").allowed_hosts == ServeSettings().allowed_hosts
    assert _for_host(ServeSettings(allowed_hosts=("tags.example",)), "0.0.0.0").allowed_hosts == ("tags.example",)
