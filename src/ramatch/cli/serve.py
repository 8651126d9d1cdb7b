"""ramatch serve: HTTP server and web page."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ._shared import add_kinds, add_model, count, model_options, number


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "serve",
        help="web page and HTTP API",
        description="Serve a model: a page at /, POST /v1/tag, /openapi.json, /healthz, /readyz, /metrics. Bound to "
        "this machine unless --host says otherwise; set RAMATCH_API_KEY to ask clients for a key.",
    )
    add_model(parser)
    add_kinds(parser)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument(
        "--port", type=number(int, 0, 65535), default=8000, help="0: any free one (default: %(default)s)"
    )
    parser.add_argument("--queue", type=count, metavar="N", help="requests that may wait; more are answered 429")
    parser.add_argument("--window-ms", type=float, metavar="T", help="how long a batch waits for company")
    parser.add_argument("--batch-size", type=count, metavar="N", help="most images in one pass")
    add = parser.add_argument
    add("--allow-host", action="append", metavar="NAME", help="name the server is called by; may be repeated")
    add("--workers", type=count, metavar="N", help="processes, each with the model; one that dies is replaced")
    add("--access-log", metavar="F", help="one line of JSON a request, rotated; - for stderr")
    parser.add_argument("--cors", action="append", metavar="ORIGIN", help="allow pages of this origin; may be repeated")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..serve import serve
    from ..serve.settings import ServeSettings

    wanted = {
        "queue_size": arguments.queue,
        "window_s": None if arguments.window_ms is None else arguments.window_ms / 1000,
        "max_batch": arguments.batch_size,
        "allowed_hosts": tuple(arguments.allow_host) if arguments.allow_host else None,
        "workers": arguments.workers,
        "access_log": arguments.access_log,
        "cors_origins": tuple(arguments.cors) if arguments.cors else None,
        "api_key": os.environ.get("RAMATCH_API_KEY"),  # set but empty is a slip: refused, like any short one
    }
    settings = ServeSettings(**{name: value for name, value in wanted.items() if value is not None})
    options = model_options(arguments) | {"kinds": not arguments.no_kinds}
    serve(arguments.model, host=arguments.host, port=arguments.port, settings=settings, **options)
    return 0
