"""Start the server: bind first (so that a taken port is a clear error), load, announce, drain on SIGTERM or Ctrl-C; in
one process, or in several on one listening socket, each with the model."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from ramatch.errors import RamatchError, require
from ramatch.serve.settings import LOOPBACK_HOSTS, ServeSettings

if TYPE_CHECKING:
    from ramatch.recognizer import Recognizer

QUICK_S, MOST_WAIT_S = 10.0, 30.0  # a worker that ends sooner than this is replaced more and more slowly


def serve(
    model: str = "ramatch-mini",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: ServeSettings | None = None,
    recognizer: Any = None,
    announce: Callable[[str], None] | None = None,
    **load: Any,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C, then finish the requests at hand.

    `port=0` takes a free port; `announce` gets the lines about where to find the server (default: stderr).
    `load`: device, dtype, label_features, backbone as of `Recognizer.from_pretrained`; `recognizer` takes the place of
    `model` when one is loaded already, which needs `settings.workers` = 1.
    """
    for module in ("uvicorn", "fastapi", "python_multipart", "prometheus_client"):
        require(module, extra="serve")

    say = announce or (lambda line: print(line, file=sys.stderr, flush=True))
    settings = _for_host(settings or ServeSettings(), host)
    if settings.workers > 1 and recognizer is not None:
        raise RamatchError("several workers load the model themselves: name it instead of giving a recognizer")
    if settings.index is not None:  # an error here, not in each worker
        from ramatch.library import Library

        with Library.open(settings.index):
            pass
    listener = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    where = f"http://{shown}:{listener.getsockname()[1]}/"
    try:
        if host not in LOOPBACK_HOSTS and not settings.api_key:
            say(f"ramatch: WARNING: no API key is set: whoever can reach {where} can use this server and its time")
            say("ramatch: WARNING: set RAMATCH_API_KEY to ask clients for a key, or bind to 127.0.0.1 behind a proxy")
        if settings.workers > 1:
            say(f"ramatch: {model} in {settings.workers} processes, {where}")
            _supervise(settings.workers, (model, load, settings, listener), say)
        else:
            _work(model, load, settings, listener, recognizer, lambda line: say(f"ramatch: {line}, {where}"))
    finally:
        listener.close()


def _work(
    model: str,
    load: dict[str, Any],
    settings: ServeSettings,
    listener: socket.socket,
    recognizer: Any = None,
    ready: Callable[[str], None] = lambda line: None,
) -> None:
    """One process: load, listen, answer until told to stop."""
    from ramatch.serve.app import create_app
    from ramatch.serve.connections import BoundedServer
    from ramatch.serve.logs import set_up

    set_up(settings.access_log)
    recognizer = recognizer or _load(model, **load)
    server = BoundedServer(create_app(recognizer, settings), settings)
    ready(f"{recognizer.name} on {recognizer.device}")
    server.run(sockets=[listener])


def _supervise(count: int, arguments: tuple[Any, ...], say: Callable[[str], None]) -> None:
    """Run `_work(*arguments)` in `count` processes until SIGTERM or Ctrl-C, which they get too."""
    from prometheus_client.multiprocess import mark_process_dead

    context, stop, pause, due = multiprocessing.get_context("spawn"), threading.Event(), 1.0, 0.0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    running: dict[Any, float] = {}
    with tempfile.TemporaryDirectory(prefix="ramatch-serve-") as shared:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared  # children write their counters and vocabularies there
        while not stop.is_set():
            while len(running) < count and time.monotonic() >= due:
                process = context.Process(target=_worker, args=arguments)
                process.start()
                running[process] = time.monotonic()
            wait([process.sentinel for process in running], 0.2)
            for process in [each for each in running if not each.is_alive()]:
                quick = time.monotonic() - running.pop(process) < QUICK_S
                pause = min(MOST_WAIT_S, 2 * pause) if quick else 1.0
                due = time.monotonic() + (pause if quick else 0.0)
                mark_process_dead(process.pid, shared)  # its gauges are no longer part of the sum
                say(f"ramatch: a worker ended with code {process.exitcode}; it is replaced")
        for process in running:
            process.terminate()
        for process in running:
            process.join()


def _worker(*arguments: Any) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:  # whoever kills the parent must not leave its children listening
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    _work(*arguments)


def _load(model: str, **options: Any) -> Recognizer:
    from ramatch.recognizer import Recognizer

    recognizer = Recognizer.from_pretrained(model, **options)
    own = recognizer.ram.backbone
    if own.text is None and own.given_labels:  # it knows these labels and no others
        recognizer.set_vocabulary(list(own.given_labels))
    return recognizer


def _for_host(settings: ServeSettings, host: str) -> ServeSettings:
    """Bound to more than loopback, the server is called by names we can't know: answer to any, unless told which."""
    if host not in LOOPBACK_HOSTS and settings.allowed_hosts == LOOPBACK_HOSTS:
        return settings.replace(allowed_hosts=("*",))
    return settings


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:  # some systems would take it modulo 65536
        raise RamatchError(f"there is no port {port}: choose one from 1 to 65535, or 0 for a free one")
    try:
        # Named as TCP, because asyncio sets TCP_NODELAY only on connections that say so; without it a client that keeps
        # its connection waits 40 ms for the end of every answer.
        found = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE)
        family, kind, proto, _, address = found[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)  # so that clients which come while the model loads wait instead of failing
        return listener
    except OSError as error:
        reason = error.strerror or str(error)
        raise RamatchError(
            f"cannot listen on {host}:{port} ({reason}); choose another with --port, or --port 0 for a free one"
        ) from None
