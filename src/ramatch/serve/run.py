"""Start the server: bind first (so that a taken port is a clear error), load, announce, drain on SIGTERM or Ctrl-C."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ramatch.errors import RamatchError, require
from ramatch.serve.settings import LOOPBACK_HOSTS, ServeSettings

if TYPE_CHECKING:
    from ramatch.recognizer import Recognizer


def serve(
    model: str = "ramatch-mini",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: ServeSettings | None = None,
    recognizer: Any = None,
    drain_s: float = 30.0,
    announce: Callable[[str], None] | None = None,
    **load: Any,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C, then finish the requests at hand (for at most `drain_s`).

    `port=0` takes a free port; `announce` gets the lines about where to find the server (default: stderr).
    `load`: device, dtype, label_features, backbone as of `Recognizer.from_pretrained`; `recognizer` takes the place of
    `model` when one is loaded already.
    """
    for module in ("uvicorn", "fastapi", "python_multipart", "prometheus_client"):
        require(module, extra="serve")
    from ramatch.serve.app import create_app

    say = announce or (lambda line: print(line, file=sys.stderr, flush=True))
    settings = _for_host(settings or ServeSettings(), host)
    listener = _listen(host, port)
    try:
        recognizer = recognizer or _load(model, **load)
        server = _server(create_app(recognizer, settings), drain_s)
        shown = f"[{host}]" if ":" in host else host
        say(f"ramatch: {recognizer.name} on {recognizer.device}, http://{shown}:{listener.getsockname()[1]}/")
        if host not in LOOPBACK_HOSTS and not settings.api_key:
            say("ramatch: anyone who can reach this machine can use this server; set an API key to change that")
        server.run(sockets=[listener])
    finally:
        listener.close()


def _load(model: str, **options: Any) -> Recognizer:
    from ramatch.recognizer import Recognizer

    recognizer = Recognizer.from_pretrained(model, **options)
    own = recognizer.ram.backbone
    if own.text is None and own.given_labels:  # it knows these labels and no others
        recognizer.set_vocabulary(list(own.given_labels))
    return recognizer


def _server(app: Any, drain_s: float) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            app.state.service.draining = True  # /readyz and new requests on open connections hear 503 from now on
            super().handle_exit(sig, frame)

    limits: dict[str, Any] = {
        "timeout_graceful_shutdown": max(1, round(drain_s)),
        "h11_max_incomplete_event_size": 64 * 1024,
    }
    return Server(uvicorn.Config(app, log_level="warning", server_header=False, backlog=2048, **limits))


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
