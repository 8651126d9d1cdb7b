"""HTTP server: FastAPI app, micro-batcher and web page. Needs the extra `serve`."""

from __future__ import annotations

from ramatch.serve.run import serve
from ramatch.serve.settings import ServeSettings

__all__ = ["ServeSettings", "serve"]
