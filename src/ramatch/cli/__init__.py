"""The command line: verbs only. Each verb parses its arguments, calls one library function and prints."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import RamatchError

EXAMPLES = """examples:
  ramatch tag photo.jpg --labels "dog, umbrella, kite"
  ramatch tag photos/ --vocabulary everyday --threshold 0.5 --report photos.html
  ramatch explain photo.jpg --labels "dog, kite" --out why.png
  ramatch serve
"""


def build_parser() -> argparse.ArgumentParser:
    """All verbs; their arguments live beside their code in this package."""
    from . import bench, data, explain, models, serve, tag, train

    parser = argparse.ArgumentParser(
        prog="ramatch",
        description="Recover and Match: which of these labels are in this image, how sure, and where.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ramatch {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    for module in (tag, explain, serve, train, data, models, bench):
        module.add_verbs(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: done, but something could not be read (or data problems were found); 2: bad input."""
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except RamatchError as error:
        if arguments.debug:
            raise
        print(f"ramatch: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ramatch: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) went away: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if arguments.debug:
            raise
        print(f"ramatch: error: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 2
