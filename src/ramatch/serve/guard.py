"""What every request passes: an id, host and origin checks, API key, security headers, metrics, access log, a span for
OpenTelemetry. Plain ASGI, so that streaming and disconnects reach the handlers untouched."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import secrets
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ramatch.serve.errors import ApiError
from ramatch.serve.metrics import Metrics
from ramatch.serve.settings import ServeSettings

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
SWALLOW_S = 2.0  # how long a refused client is listened to before it hears the refusal
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
access = logging.getLogger("ramatch.access")
_HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
# Reachable without the key: probes, and the page itself, which asks for the key.
_PROTECTED = ("/v1/", "/metrics")


class Guard:
    """Wraps the app; see the module's docstring."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, start, status = Headers(scope=scope), time.monotonic(), 500
        given = headers.get("x-request-id", "")
        name = scope["request_id"] = given if _ID.fullmatch(given) else secrets.token_hex(8)
        unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers

        async def listen() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def swallow() -> None:
            while unread:
                await listen()

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if unread and "expect" not in headers:
                    # A client that is still sending would find the connection broken, and no answer on it.
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(swallow(), SWALLOW_S)
                sent = MutableHeaders(scope=message)
                for header, value in {**_HEADERS, "X-Request-ID": name}.items():
                    sent.setdefault(header, value)
            await send(message)

        with _span(scope, headers) as span:
            try:
                refusal = self.check(scope, headers)
                if refusal is None:
                    await self.app(scope, listen, answer)
                else:
                    await refusal.response()(scope, listen, answer)
            finally:
                # Only known routes become label values: strangers must not be able to invent series.
                route = getattr(scope.get("route"), "path", "other")
                method = scope["method"] if scope["method"] in METHODS else "other"
                seconds = time.monotonic() - start
                self.metrics.request(method, route, status, seconds)
                _note(scope, name, status, seconds)
                if span is not None:
                    span.update_name(f"{method} {route}")
                    span.set_attributes({"http.route": route, "http.response.status_code": status, "request.id": name})

    def check(self, scope: Scope, headers: Headers) -> ApiError | None:
        host = _host_name(headers.get("host", ""))
        if not {"*", host} & set(self.settings.allowed_hosts):
            return ApiError("unknown_host", f"this server does not answer for the host '{host[:80]}'")
        origin = headers.get("origin")
        if origin and scope["method"] not in ("GET", "HEAD", "OPTIONS") and not self._same(origin, headers):
            return ApiError("foreign_origin", f"pages of '{origin[:80]}' may not use this server")
        key = self.settings.api_key
        if key and scope["path"].startswith(_PROTECTED) and scope["method"] != "OPTIONS":
            given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                asks = {"WWW-Authenticate": "Bearer"}
                return ApiError("bad_api_key", "the API key is missing or wrong", headers=asks)
        return None

    def _same(self, origin: str, headers: Headers) -> bool:
        if origin in self.settings.cors_origins or "*" in self.settings.cors_origins:
            return True
        return urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


def _note(scope: Scope, name: str, status: int, seconds: float) -> None:
    """A line of the access log: JSON, in ASCII, so that nothing in it can act on a terminal."""
    if access.isEnabledFor(logging.INFO):
        told = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "id": name, "client": (scope.get("client") or "-")[0]}
        told |= {"method": scope["method"][:16], "path": scope["path"][:200], "status": status}
        access.info(json.dumps({**told, "ms": round(seconds * 1000, 1)}))


def _span(scope: Scope, headers: Headers) -> Any:
    """A span of OpenTelemetry below the caller's own. Without the extra `otel`, or without an SDK, it is nothing."""
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return contextlib.nullcontext()
    above = propagate.extract(dict(headers))
    facts = {"http.request.method": scope["method"][:16], "url.path": scope["path"][:200]}
    options: dict[str, Any] = {"context": above, "kind": trace.SpanKind.SERVER, "attributes": facts}
    return trace.get_tracer("ramatch").start_as_current_span(scope["method"][:16], **options)


def _host_name(host: str) -> str:
    """Host header without its port; IPv6 brackets removed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
