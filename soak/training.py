"""Trainings that are killed, run out of disk, may not write, or meet another in their folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from soak import run_folder
from soak.kills import killed
from soak.process import Done
from soak.process import run as run_process
from soak.process import start as start_process
from soak.report import Soak
from soak.worlds import tiny_training

REFUSAL = "a clear error, exit code 2, no broken or temporary file"


def run(soak: Soak) -> None:
    home = soak.folder("world")
    values = tiny_training(home, epochs=soak.size(5, 2), checkpoint__every=2)
    recipe = home / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    _kills(soak, recipe)
    _full_disk(soak, recipe)
    _read_only(soak, recipe)
    _two(soak, home, recipe)


def _train(recipe: Path, out: Path, *options: str, limit: float = 120) -> Done:
    return run_process(["-m", "ramatch", "train", "--recipe", str(recipe), "--out", str(out), *options], limit=limit)


def _refused(done: Done) -> list[str]:
    """What is wrong with a refusal."""
    faults = done.faults(codes=(2,))
    if not faults and b"error: " not in done.err:
        faults.append(f"no error in words: {done.err[-150:]!r}")
    return faults


def _kills(soak: Soak, recipe: Path) -> None:
    start, root, kills = time.monotonic(), soak.folder("kills"), soak.size(50, 2)
    argv = ["train", "--recipe", str(recipe), "--out", "{out}", "--resume", "auto"]
    runs, misses = killed(argv, root, kills, seed=soak.seed, limit=soak.size(300, 30))
    landed, left = sum(each["killed"] for each in runs), list[str]()
    for each in runs:
        if each["code"] != 0:
            continue
        misses += [f"{each['run']}: {what}" for what in run_folder.differences(root / "whole", root / each["run"])]
        left += [f"{each['run']}: {what}" for what in run_folder.broken(root / each["run"])]
    required = "after SIGKILLs, --resume auto ends with the bits of a whole run"
    soak.check("kills", required, misses, cases=landed, since=start)
    soak.check("kills, files", "no broken or temporary file is left", left, cases=len(runs), since=start)


@contextlib.contextmanager
def small_disk(where: Path, size: int) -> Iterator[bool]:
    """A file system of so many bytes at `where`; False where this user may not mount one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "soak", str(where)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(where)], capture_output=True)


def _full_disk(soak: Soak, recipe: Path) -> None:
    """Disks of several sizes below what a run needs, so that different files meet the end of them."""
    start, misses, whole = time.monotonic(), [], soak.folder("kills") / "whole"
    need = sum(-(-p.stat().st_size // 4096) * 4096 for p in whole.rglob("*") if p.is_file())
    shares = (0.5,) if soak.short else (0.02, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
    for share in shares:
        disk = soak.folder(f"disk{share}")
        with small_disk(disk, int(need * share)) as mounted:
            if not mounted:
                done = _limited(recipe, disk / "run", int(max(p.stat().st_size for p in whole.rglob("*")) * share))
            else:
                done = _train(recipe, disk / "run")
            faults = _refused(done) + (run_folder.broken(disk / "run") if (disk / "run").exists() else [])
            if mounted and not any(word in done.err for word in (b"full", b"space")):
                faults.append(f"the error does not say that the disk is full: {done.err[-150:]!r}")
            if mounted and not faults and not soak.short:
                subprocess.run(["mount", "-o", f"remount,size={4 * need}", str(disk)], capture_output=True)
                again = _train(recipe, disk / "run", "--resume", "auto")
                faults += again.faults(codes=(0,)) or run_folder.differences(whole, disk / "run")
            misses += [f"disk of {share:.0%} of the need: {fault}" for fault in faults]
    required = f"{REFUSAL}; with room, --resume auto ends with the same bits"
    soak.check("full disk", required, misses, cases=len(shares), since=start)


def _limited(recipe: Path, out: Path, size: int) -> Done:
    """The same by a limit on the size of a file, for users who may not mount."""
    code = f"import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, ({size}, {size})); from ramatch.cli import main; "
    return run_process(["-c", code + f"sys.exit(main(['train', '--recipe', {str(recipe)!r}, '--out', {str(out)!r}]))"])


def _read_only(soak: Soak, recipe: Path) -> None:
    start, folder = time.monotonic(), soak.folder("read-only")
    folder.chmod(0o555)
    targets = (folder,) if soak.short else (folder, folder / "run")
    misses = [fault for out in targets for fault in _refused(_train(recipe, out))]
    misses += [f"left {path.name}" for path in folder.iterdir()]
    folder.chmod(0o755)
    soak.check("read-only folder", REFUSAL, misses, cases=len(targets), since=start)


def _two(soak: Soak, home: Path, recipe: Path) -> None:
    """A second training in the folder of one that runs, with and without --resume auto."""
    start, misses = time.monotonic(), []
    long = home / "long.yaml"
    long.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "epochs": 2000}), encoding="utf-8")
    options: tuple[tuple[str, ...], ...] = (("--resume", "auto"),) if soak.short else ((), ("--resume", "auto"))
    for more in options:
        out = soak.folder("two") / f"run{len(more)}"
        command = ["-m", "ramatch", "train", "--recipe", str(long), "--out", str(out)]
        first = start_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 60
            while not list(out.glob("checkpoints/step-*.pt")) and time.monotonic() < end and first.poll() is None:
                time.sleep(0.05)
            second = _train(long, out, *more, limit=soak.size(20, 12))
            asked = " ".join(more) or "no --resume"
            misses += [f"second with {asked}: {fault}" for fault in _refused(second)]
            if b"steps on" in second.err:  # what a training says when it begins
                said = second.err.decode("utf-8", "replace").strip().splitlines()[-1]
                misses.append(f"second with {asked}: it began to train, and ended with: {said}")
            if first.poll() is not None:
                misses.append(f"with {asked} the first one ended with code {first.returncode}")
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
    required = "the second is refused with an error, the first goes on"
    soak.check("two in one folder", required, misses, cases=len(options), since=start)
