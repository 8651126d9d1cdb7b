"""The command line: verbs only. Each verb parses its arguments, calls one library function and prints."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..errors import RamatchError, printable
from ..memory import collect_rarely, use_growing_segments

EXAMPLES = """examples:
  ramatch tag photo.jpg --labels "dog, umbrella, kite"
  ramatch tag photos/ --vocabulary everyday --threshold 0.5 --report photos.html
  ramatch explain photo.jpg --labels "dog, kite" --out why.png
  ramatch serve
"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, instead of all options first; `--help` has them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> Parser:
    """All verbs; their arguments live beside their code in this package."""
    from . import data, explain, export, library, segment, serve, study, tag, train

    parser = Parser(
        prog="ramatch",
        description="Recover and Match: which of these labels are in this image, how sure, and where.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ramatch {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    for module in (tag, library, explain, segment, serve, train, study, export, data):
        module.add_verbs(verbs)
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of a verb. `name=value` may stand anywhere, also after options, which argparse alone would refuse."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    changes = [word for word in rest if "=" in word and not word.startswith("-")]
    if changes != rest or (rest and not hasattr(arguments, "overrides")):
        wrong = next((word for word in rest if word not in changes), rest[0])
        parser.error(f"'{arguments.verb}' does not know '{wrong}'")
    if changes:
        arguments.overrides += changes
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: done, but something could not be read (or data problems were found); 2: bad input."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character gets a stand-in, not a crash
            stream.reconfigure(errors="replace")
    warnings.filterwarnings("ignore", module=r"PIL\.")  # what is wrong with a picture is said in our own words
    use_growing_segments()
    collect_rarely()
    arguments = parse(argv)
    try:
        code = arguments.run(arguments) or 0
        sys.stdout.flush()  # here, where a reader that went away is understood
        return code
    except BrokenPipeError:  # the reader (head, less) went away: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("ramatch: stopped", file=sys.stderr)
        return 130
    except (RamatchError, OSError) as error:
        if arguments.debug:
            raise
        print(f"ramatch: error: {_message(error)}", file=sys.stderr)
        return 2


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error)
    return "\n".join(map(printable, text.split("\n")))
