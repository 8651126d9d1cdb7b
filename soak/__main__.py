"""python -m soak [--parts images,files,…] [--short] [--json F]"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from soak.report import HEAD, Soak, write_json

PARTS = ("solver", "threads", "files", "images", "training", "saving", "server")


def run(soak: Soak, parts: Sequence[str]) -> None:
    """The parts, one after another; one that itself breaks is a miss, and the others follow."""
    for name in parts:
        soak.part, start = name, time.monotonic()
        part: Callable[[Soak], None] = import_module(f"soak.{name}").run
        try:
            part(soak)
        except Exception as error:
            soak.check("the part itself", "runs to its end", f"{type(error).__name__}: {error}", cases=1, since=start)
        finally:
            soak.clear()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m soak", description="Faults, load and hostile input, counted.")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--short", action="store_true", help="a few cases of everything")
    parser.add_argument("--seed", type=int, default=0, help="of every generator (default: %(default)s)")
    parser.add_argument("--json", metavar="F", help="also write the table here")
    arguments = parser.parse_args(argv)
    parts = [name for name in arguments.parts.split(",") if name]
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"no part '{unknown[0]}'; there are {', '.join(PARTS)}")
    start = time.monotonic()
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as work:
        soak = Soak(Path(work).resolve(), arguments.short, arguments.seed)
        run(soak, parts)
    if arguments.json:
        write_json(soak, Path(arguments.json))
    print(f"{len(soak.checks) - len(soak.missed)} of {len(soak.checks)} met, {time.monotonic() - start:.0f} s")
    return 1 if soak.missed else 0


if __name__ == "__main__":
    sys.exit(main())
