"""Start the server: bind first (so that a taken port is a clear error), load, announce, drain on SIGTERM or Ctrl-C."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any

from ramatch.errors import RamatchError, require
from ramatch.serve.settings import LOOPBACK_HOSTS, ServeSettings


def serve(
    model: str = "ramatch-mini",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: ServeSettings | None = None,
    device: str | None = None,
    dtype: Any = None,
    label_features: Any = None,
    backbone: str | None = None,
    recognizer: Any = None,
    drain_s: float = 30.0,
    log_level: str = "warning",
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C, then finish the requests at hand (for at most `drain_s`).

    `port=0` takes a free port; `announce` gets the lines about where to find the server (default: stderr).
    `recognizer` takes the place of `model` when one is loaded already.
    """
    uvicorn = require("uvicorn", extra="serve")
    for module in ("fastapi", "python_multipart", "prometheus_client"):
        require(module, extra="serve")
    from ramatch.serve.app import create_app

    say = announce or (lambda line: print(line, file=sys.stderr, flush=True))
    settings = _for_host(settings or ServeSettings(), host)
    listener = _listen(host, port)
    try:
        if recognizer is None:
            from ramatch.recognizer import Recognizer

            recognizer = Recognizer.from_pretrained(
                model, device=device, dtype=dtype, label_features=label_features, backbone=backbone
            )
            own = recognizer.ram.backbone
            if own.text is None and own.given_labels:  # it knows these labels and no others
                recognizer.set_vocabulary(list(own.given_labels))
        app = create_app(recognizer, settings)
        config = uvicorn.Config(
            app, log_level=log_level, timeout_graceful_shutdown=max(1, round(drain_s)), server_header=False,
            h11_max_incomplete_event_size=64 * 1024, backlog=2048,
        )  # fmt: skip
        service = app.state.service

        class Server(uvicorn.Server):  # type: ignore[name-defined, misc]
            def handle_exit(self, sig: int, frame: Any) -> None:
                service.draining = True  # /readyz and new requests on open connections hear 503 from now on
                super().handle_exit(sig, frame)

        address = listener.getsockname()
        shown = f"[{host}]" if ":" in host else host
        say(f"ramatch: {recognizer.name} on {recognizer.device}, http://{shown}:{address[1]}/")
        if host not in LOOPBACK_HOSTS and not settings.api_key:
            say("ramatch: anyone who can reach this machine can use this server; set an API key to change that")
        Server(config).run(sockets=[listener])
    finally:
        listener.close()


def _for_host(settings: ServeSettings, host: str) -> ServeSettings:
    """Bound to more than loopback, the server is called by names we can't know: answer to any, unless told which."""
    if host not in LOOPBACK_HOSTS and settings.allowed_hosts == LOOPBACK_HOSTS:
        return settings.replace(allowed_hosts=("*",))
    return settings


def _listen(host: str, port: int) -> socket.socket:
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
        listener.listen(2048)  # so that clients which come while the model loads wait instead of failing
        return listener
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RamatchError(
            f"cannot listen on {host}:{port} ({reason}); choose another with --port, or --port 0 for a free one"
        ) from None
