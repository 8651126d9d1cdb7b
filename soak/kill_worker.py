"""Run as a process of its own by the parts: forks runs of a verb, so that torch is imported once, and kills them."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ramatch.cli import main as ramatch
from soak import run_folder

MOST = 12  # kills of one run, then it may end


def child(argv: list[str], log: Path) -> int:
    """A forked `ramatch ARGV`; what it prints goes to `log`."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 1)
        os.dup2(target, 2)
        code = ramatch(argv)
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wrong_rows(whole: Path, killed: Path) -> list[str]:
    """Whole lines that an uninterrupted run did not write, or that are there twice."""
    if not killed.exists():
        return []
    right = set(whole.read_bytes().splitlines(keepends=True))
    lines = [line for line in killed.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    found = [f"another row: {line[:80]!r}" for line in lines if line not in right]
    return found + [f"{len(lines) - len(set(lines))} rows twice"] * (len(lines) > len(set(lines)))


def half_folder(whole: Path, killed: Path) -> list[str]:
    """A folder, if there is one, without a file that it should have, or with a broken one."""
    if not killed.exists() or not any(killed.iterdir()):
        return []
    names = [{p.relative_to(f).as_posix() for p in f.rglob("*")} for f in (whole, killed)]
    return [f"files differ: {sorted(names[0] ^ names[1])}"] * (names[0] != names[1]) + run_folder.broken(killed)


CHECKS: dict[str, Callable[[Path, Path], list[str]]] = {"rows": wrong_rows, "folder": half_folder}


def main(argv: list[str], root: Path, kills: int, seed: int, limit: float, suffix: str = "", check: str = "") -> None:
    """Whole runs of which each was killed again and again, until so many kills have met a living one. In `argv`, {out}
    is what is written; `check` looks at it after every kill. One that is whole already, and so refused, is left."""
    rng, begin = random.Random(seed), time.monotonic()
    whole, look = root / f"whole{suffix}", CHECKS.get(check, lambda one, other: [])

    def start(out: Path) -> int:
        return child([word.replace("{out}", str(out)) for word in argv], root / f"{out.stem}.log")

    code, seconds = finish(start(whole)), time.monotonic() - begin
    print(json.dumps({"run": whole.name, "code": code, "killed": 0, "faults": []}), flush=True)
    landed = number = 0
    while landed < kills and time.monotonic() - begin < limit:
        out, here, faults = root / f"killed{number}{suffix}", 0, list[str]()
        while True:
            pid = start(out)
            # late enough to get on, early enough to hit every phase; the last start of a run is left alone
            if here < MOST and landed < kills:
                late = rng.random() < 0.7
                time.sleep(rng.uniform(0.02, 1.1 * seconds) if late else rng.uniform(0.02, min(0.3, seconds)))
                done, status = os.waitpid(pid, os.WNOHANG)
                if not done:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    here, landed = here + 1, landed + 1
                    faults += [f"kill {here}: {what}" for what in look(whole, out)]
                    if check == "folder" and out.exists() and any(out.iterdir()):
                        code = 0  # killed after it was whole
                        break
                    continue
                code = os.waitstatus_to_exitcode(status)
            else:
                code = finish(pid)
            break
        print(json.dumps({"run": out.name, "code": code, "killed": here, "faults": faults}), flush=True)
        number += 1


if __name__ == "__main__":
    torch.set_num_threads(1)  # before any work: children are forked
    values: dict[str, Any] = json.loads(sys.argv[1])
    main(**(values | {"root": Path(values["root"])}))
