"""ramatch import-authors."""

from __future__ import annotations

import argparse
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
    from ..model.authors import import_authors

    import_authors(Path(arguments.checkpoint), Path(arguments.out))
    print(arguments.out)
    return 0
