"""Run as a process of its own by soak/training.py: forks trainings, so that torch is imported once, and kills them."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ramatch.cli import main as ramatch


def child(recipe: str, out: Path, log: Path) -> int:
    """A forked `ramatch train … --resume auto`; what it prints goes to `log`."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(target, 1)
        os.dup2(target, 2)
        code = ramatch(["train", "--recipe", recipe, "--out", str(out), "--resume", "auto"])
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(recipe: str, root: Path, kills: int, seed: int, limit: float) -> None:
    """Whole runs of which each was killed again and again, until so many kills have met a living training."""
    rng, begin = random.Random(seed), time.monotonic()
    start = time.monotonic()
    code = finish(child(recipe, root / "whole", root / "whole.log"))
    seconds = time.monotonic() - start
    print(json.dumps({"run": "whole", "code": code, "killed": 0}), flush=True)
    landed = number = 0
    while landed < kills and time.monotonic() - begin < limit:
        out, log = root / f"killed{number}", root / f"killed{number}.log"
        here = 0
        while True:
            pid = child(recipe, out, log)
            # late enough to get on, early enough to hit every phase; the last start of a run is left alone
            if here < 12 and landed < kills:
                time.sleep(rng.uniform(0.02, 1.1 * seconds) if rng.random() < 0.7 else rng.uniform(0.02, 0.3))
                done, status = os.waitpid(pid, os.WNOHANG)
                if not done:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    here, landed = here + 1, landed + 1
                    continue
                code = os.waitstatus_to_exitcode(status)
            else:
                code = finish(pid)
            break
        print(json.dumps({"run": out.name, "code": code, "killed": here}), flush=True)
        number += 1


if __name__ == "__main__":
    torch.set_num_threads(1)  # before any work: children are forked
    values = json.loads(sys.argv[1])
    main(values["recipe"], Path(values["root"]), values["kills"], values["seed"], values["limit"])
