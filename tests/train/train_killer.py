"""Run by test_train_resume.py in a process of its own: trains, is killed again and again, resumes, and compares.

Children are forked, so that torch is imported once. A hook in the child (nothing in the package) makes it stand still
at a chosen point of a save, so that SIGKILL hits exactly there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from train_tiny import TIMES, read_log

from ramatch import files
from ramatch.train import checkpoint
from ramatch.train.config import TrainConfig
from ramatch.train.run import train


def child(values: dict, hook: Callable[[], None] | None = None) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            if hook is not None:
                hook()
            train(TrainConfig.from_dict(values), resume="auto", progress=False)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return pid


def stand_still_in(stage: str, number: int, marker: Path) -> Callable[[], None]:
    """In the `number`-th checkpoint: half-way through writing, before the rename, or after it."""

    def hook() -> None:
        write, replace = Path.write_bytes, os.replace
        calls = {"write": 0, "replace": 0}

        def wait() -> None:
            marker.touch()
            time.sleep(60)

        def half(path: Path, content) -> int:
            calls["write"] += ".pt." in path.name
            if calls["write"] == number and stage == "write":
                write(path, content[: len(content) // 2])
                wait()
            return write(path, content)

        def rename(source, target) -> None:
            if str(target).endswith(".pt"):
                calls["replace"] += 1
                if calls["replace"] == number and stage == "rename":
                    wait()
            replace(source, target)
            if str(target).endswith(".pt") and calls["replace"] == number and stage == "after":
                wait()

        Path.write_bytes = half  # type: ignore[method-assign]
        files.os.replace = rename

    return hook


def kill(pid: int) -> bool:
    """SIGKILL; whether it was still running."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        assert os.waitstatus_to_exitcode(status) == 0, "a run failed by itself"
        return False
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def wait_for(condition: Callable[[], bool], pid: int) -> None:
    end = time.monotonic() + 50
    while not condition() and time.monotonic() < end:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.001)


def lines(folder: Path) -> int:
    log = folder / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.is_file() else 0


def main(values: dict, seed: int) -> None:
    rng = random.Random(seed)
    whole, broken = Path(values["output"]) / "whole", Path(values["output"]) / "broken"
    assert os.waitstatus_to_exitcode(os.waitpid(child({**values, "output": str(whole)}), 0)[1]) == 0
    total = lines(whole)
    values = {**values, "output": str(broken)}
    kills = []
    plan = ["write", "moment", "rename", "moment", "after", "moment", "write"]
    for i, stage in enumerate(plan):
        marker = broken.parent / f"marker{i}"
        if stage == "moment":
            pid, goal = child(values), rng.randint(lines(broken), max(total - 3, lines(broken)))
            delay = rng.random() * 0.05
            wait_for(lambda goal=goal: lines(broken) > goal, pid)
            time.sleep(delay)
        else:
            pid = child(values, stand_still_in(stage, rng.randint(1, 3), marker))
            wait_for(marker.exists, pid)
        if kill(pid):
            last = checkpoint.list_checkpoints(broken / "checkpoints")
            kills.append([stage, last[-1].name if last else None, len(list((broken / "checkpoints").glob(".*.tmp")))])
    assert os.waitstatus_to_exitcode(os.waitpid(child(values), 0)[1]) == 0

    def log(folder: Path) -> list[dict]:
        return [{k: v for k, v in entry.items() if k not in TIMES} for entry in read_log(folder / "log.jsonl")]

    same = {
        "adapters": (whole / "model/ram.safetensors").read_bytes() == (broken / "model/ram.safetensors").read_bytes(),
        "log": log(whole) == log(broken),
        "eval": json.loads((whole / "eval.json").read_text()) == json.loads((broken / "eval.json").read_text()),
    }
    last = [checkpoint.load_checkpoint(checkpoint.list_checkpoints(f / "checkpoints")[-1]) for f in (whole, broken)]
    for part in ("adapters", "ema"):
        same[f"last {part}"] = all(torch.equal(last[0][part][name], t) for name, t in last[1][part].items())
    left = [p.name for p in (broken / "checkpoints").iterdir() if p.name.endswith(".tmp")]
    print(json.dumps({"same": same, "kills": kills, "lines": total, "temporary files left": left}))


if __name__ == "__main__":
    torch.set_num_threads(1)  # before any work: forked children and two processes share the cores
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
