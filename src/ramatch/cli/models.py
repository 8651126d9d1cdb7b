"""ramatch import-authors."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "import-authors",
        help="turn a checkpoint of the authors' program into a ramatch model",
        description="Read a checkpoint of the authors' program and write a model folder with the `reference` preset.",
    )
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("out", metavar="OUT", help="new model folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..files import new_folder
    from ..modeling.checkpoints.authors import import_authors

    out = new_folder(arguments.out)
    for note in import_authors(Path(arguments.checkpoint), out):
        print(f"ramatch: note: {note}", file=sys.stderr)
    print(out)
    return 0
