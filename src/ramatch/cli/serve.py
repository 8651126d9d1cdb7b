"""ramatch serve: HTTP server and web page."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from ._shared import add_kinds, add_model, count, given, model_options, number
from .library import HOME


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "serve",
        help="web page and HTTP API",
        description="Serve a model: a page at /, POST /v1/tag, /openapi.json, /healthz, /readyz, /metrics. Bound to "
        "this machine unless --host says otherwise; set RAMATCH_API_KEY to ask clients for a key.",
    )
    add_model(parser)
    add_kinds(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=number(int, 0, 65535), default=8000, help="0: any free one (default: %(default)s)")
    queue = "requests that may wait; more are answered 429"
    add("--queue", dest="queue_size", type=count, metavar="N", help=queue)
    add("--window-ms", type=float, metavar="T", help="how long a batch waits for company")
    add("--batch-size", dest="max_batch", type=count, metavar="N", help="most images in one pass")
    host = "name the server is called by; may be repeated"
    add("--allow-host", dest="allowed_hosts", action="append", metavar="NAME", help=host)
    index = "a folder that `ramatch index` has looked at: it can be searched from the page and at /v1/search"
    add("--index", metavar="DIR", help=index)
    add("--workers", type=count, metavar="N", help="processes, each with the model; one that dies is replaced")
    add("--access-log", metavar="F", help="one line of JSON a request, rotated; - for stderr")
    origin = "allow pages of this origin; may be repeated"
    add("--cors", dest="cors_origins", action="append", metavar="ORIGIN", help=origin)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..serve import ServeSettings, serve

    wanted = given(arguments, "queue_size", "max_batch", "allowed_hosts", "workers", "access_log", "cors_origins")
    if arguments.window_ms is not None:
        wanted["window_s"] = arguments.window_ms / 1000
    if arguments.index is not None:
        home = Path(arguments.index, HOME)
        wanted["index"] = str(home if home.is_dir() else arguments.index)  # or where `--library` has put it
    if (key := os.environ.get("RAMATCH_API_KEY")) is not None:  # set but empty is a slip: refused, like any short one
        wanted["api_key"] = key
    options = model_options(arguments) | {"kinds": not arguments.no_kinds}
    settings = ServeSettings(**wanted)
    serve(arguments.model, host=arguments.host, port=arguments.port, settings=settings, **options)
    return 0
