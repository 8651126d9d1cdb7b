"""ramatch bench: speed, measured side by side with a baseline in the same run."""

from __future__ import annotations

import argparse
from typing import Any


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser("bench", help="measure speed beside a baseline in the same run")
    actions = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    ot = actions.add_parser("ot", help="the transport solver against POT")
    ot.add_argument("--device", metavar="D")
    ot.add_argument("--json", metavar="FILE")
    ot.set_defaults(run=run_ot)
    serve = actions.add_parser("serve", help="the server under load, against one request at a time")
    serve.add_argument("--model", default="ramatch-mini")
    serve.add_argument("--device", metavar="D")
    serve.add_argument("--seconds", type=float, default=5.0, help="per line")
    serve.add_argument("--json", metavar="FILE")
    serve.set_defaults(run=run_serve)


def run_ot(arguments: argparse.Namespace) -> int:
    import torch

    from ..bench.ot import bench_ot, format_rows
    from ..files import write_json

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows = bench_ot(device)
    print(format_rows(rows))
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def run_serve(arguments: argparse.Namespace) -> int:
    from ..bench.serve import bench_serve
    from ..files import write_json

    rows = bench_serve(arguments.model, device=arguments.device, seconds=arguments.seconds)
    if arguments.json:
        write_json(arguments.json, rows)
    return 0
