"""Run as a process of its own by soak/files.py: case after case, one line of JSON for each, before and after."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

from soak.file_cases import FAMILIES, Call, World

SECONDS = 15  # for one case


class TooSlow(BaseException):
    """A case took longer than `SECONDS`."""


def ring(signal: int, frame: FrameType | None) -> NoReturn:
    raise TooSlow


def where(error: BaseException) -> str:
    """Type and innermost frame of our package (of anything, where there is none)."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/ramatch/" in f.filename] or frames
    return f"{type(error).__name__} in {Path(ours[-1].filename).name}:{ours[-1].name}" if ours else type(error).__name__


def verdict(call: Call) -> str:
    """Empty where the call went well or was refused as it should be, else what came instead."""
    from ramatch import RamatchError

    signal.alarm(SECONDS)
    try:
        code = call()
        return f"exit code {code}" if isinstance(code, int) and code not in (0, 1, 2) else ""
    except RamatchError:
        return ""
    except TooSlow:
        return f"longer than {SECONDS} s"
    except BaseException as error:
        return where(error)
    finally:
        signal.alarm(0)


def main(world: World, seed: int, first: int, count: int) -> None:
    opened: list[str] = []
    secret = os.fspath(world.secret)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        named = event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike))
        if named and os.path.realpath(path := os.fsdecode(arguments[0])).startswith(secret):  # type: ignore[arg-type]
            opened.append(path)

    sys.addaudithook(watch)
    signal.signal(signal.SIGALRM, ring)
    names = [name for name, (_, weight) in FAMILIES.items() for _ in range(weight)]
    for i in range(first, first + count):
        rng = random.Random(f"{seed} {i}")
        family = names[i % len(names)]
        folder = Path(tempfile.mkdtemp(dir=world.marker.parent, prefix=f"case{i}-"))
        what, call = FAMILIES[family][0](rng, folder, world)
        print(json.dumps({"case": i, "family": family, "what": what}), flush=True)
        opened.clear()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            fault = verdict(call)
        found = {"case": i, "fault": fault, "ran": world.marker.exists(), "opened": sorted(set(opened))[:2]}
        print(json.dumps(found), flush=True)
        world.marker.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    paths = World(**{name: Path(path) for name, path in values["world"].items()})
    main(paths, values["seed"], values["first"], values["count"])
