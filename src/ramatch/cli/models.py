"""ramatch import-authors, convert."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..config import WEIGHTS


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "import-authors",
        help="turn a checkpoint of the authors' program into a ramatch model",
        description="Read a checkpoint of the authors' program and write a model folder with the `reference` preset.",
    )
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("out", metavar="OUT", help="new model folder")
    parser.set_defaults(run=run_import)
    parser = verbs.add_parser(
        "convert",
        help="store a model's weights in fewer bits, or in more",
        description="Copy a model folder with its weights in another precision on disk; all else is copied as it is.",
        epilog="example: ramatch convert runs/coco/model models/coco-small --weights int8",
    )
    parser.add_argument("model", metavar="MODEL", help="bundled model, model folder or run folder")
    parser.add_argument("out", metavar="OUT", help="new model folder")
    parser.add_argument("--weights", required=True, choices=WEIGHTS, help="int8: one scale per output channel")
    parser.set_defaults(run=run_convert)


def run_import(arguments: argparse.Namespace) -> int:
    from ..files import new_folder
    from ..modeling.checkpoints.authors import import_authors

    out = new_folder(arguments.out)
    for note in import_authors(Path(arguments.checkpoint), out):
        print(f"ramatch: note: {note}", file=sys.stderr)
    print(out)
    return 0


def run_convert(arguments: argparse.Namespace) -> int:
    from ..modeling.checkpoints.folder import convert

    print(convert(arguments.model, arguments.out, arguments.weights))
    return 0
