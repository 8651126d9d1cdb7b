"""What every request passes: host and origin checks, API key, security headers, request metrics. Plain ASGI, so that
streaming and disconnects reach the handlers untouched."""

from __future__ import annotations

import hmac
import time
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
_HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
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
        start, status = time.monotonic(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            refusal = self.check(scope)
            if refusal is None:
                await self.app(scope, receive, answer)
            else:
                await refusal.response()(scope, receive, answer)
        finally:
            # Only known routes become label values: strangers must not be able to invent series.
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "PUT", "DELETE") else "other"
            self.metrics.request(method, route, status, time.monotonic() - start)

    def check(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
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


def _host_name(host: str) -> str:
    """Host header without its port; IPv6 brackets removed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
