"""The web page, the offline API page and the bundled photographs: a fixed list of files, read once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ramatch import assets

PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".jpg": "image/jpeg",
}


def add_static(app: FastAPI) -> None:
    """Serve every file of page/ by its name, index.html at /, docs.html at /docs, photographs at /photos/NAME."""
    files = {f"/{path.name}": path for path in sorted(PAGE.iterdir()) if path.suffix in _TYPES}
    files["/"] = files.pop("/index.html")
    files["/docs"] = files.pop("/docs.html")
    files.update({f"/photos/{path.name}": path for path in assets.photo_paths()})
    for route, path in files.items():
        _add_file(app, route, path.read_bytes(), _TYPES[path.suffix])


def _add_file(app: FastAPI, route: str, content: bytes, media_type: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}  # ask each time, so that an upgrade shows at once

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    app.add_api_route(route, send, methods=["GET", "HEAD"], include_in_schema=False)
