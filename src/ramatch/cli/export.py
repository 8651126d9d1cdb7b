"""ramatch export: a model for programs without torch."""

from __future__ import annotations

import argparse
import sys
from typing import Any


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "export",
        help="write a model as ONNX",
        description="Write a model's image part, text part and matching as ONNX, with its tokenizer and settings, into "
        "a new folder; onnxruntime and others run them without torch.",
        epilog="example: ramatch export ramatch-mini mini-onnx --onnx",
    )
    parser.add_argument("model", metavar="MODEL", help="bundled model, model folder or run folder")
    parser.add_argument("out", metavar="OUT", help="new folder")
    parser.add_argument("--onnx", action="store_true", required=True, help="the only form there is")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..scale.export import export_onnx

    print(f"ramatch: wrote {export_onnx(arguments.model, arguments.out)}", file=sys.stderr)
    return 0
