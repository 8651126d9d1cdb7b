"""uvicorn with bounds: how many connections there are, and how long one may take to say what it wants."""

from __future__ import annotations

import functools
import signal
import time
from types import FrameType
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from ramatch.serve.settings import ServeSettings


class Connection(H11Protocol):
    """One client. Where there are too many, whoever has kept the server waiting longest makes room."""

    def __init__(self, *args: Any, most: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.most, self.since = most, time.monotonic()

    @property
    def silent(self) -> bool:
        """Between requests, or within the headers of one."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.most:
            late = [c for c in self.connections if isinstance(c, Connection) and (c.silent or c.cycle.more_body)]
            min(late, key=lambda c: c.since).transport.abort()  # perhaps this very one

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since = time.monotonic()


class BoundedServer(Server):
    """Stops with exit code 0 on SIGTERM and Ctrl-C; hangs up on whoever sends headers too slowly."""

    def __init__(self, app: Any, settings: ServeSettings) -> None:
        self.app, self.header_s = app, settings.header_s
        http: Any = functools.partial(Connection, most=settings.max_connections)
        options: dict[str, Any] = {
            "timeout_graceful_shutdown": max(1, round(settings.drain_s)),
            "h11_max_incomplete_event_size": 64 * 1024,
        }
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
        super().__init__(Config(app, http=http, ws="none", backlog=2048, **quiet, **options))

    async def on_tick(self, counter: int) -> bool:
        late = time.monotonic() - self.header_s
        for connection in list(self.server_state.connections) if counter % 10 == 0 else ():
            if isinstance(connection, Connection) and connection.silent and connection.since < late:
                connection.transport.close()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.app.state.service.draining = True  # /readyz and new requests on open connections hear 503 from now on
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
