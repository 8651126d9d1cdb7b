"""A run's folder, which explains itself to whoever finds it, and its log, which survives crashes."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from .. import files
from ..errors import RamatchError
from . import checkpoint
from .config import TrainConfig, differences, dump_config

README = """A training run of ramatch.

config.yaml       every setting; `ramatch train --recipe config.yaml output=ELSEWHERE` repeats the run
run.json          when, where, on what data, with which versions, and how it ended
log.jsonl         one line per {log_every} steps (kind "step") and per evaluation (kind "eval")
validation.json   the held-out images that chose the weights; training never saw them
checkpoints/      step-*.pt: everything needed to continue (`--resume auto`); best.pt: the best weights so far
model/            the result: adapters in safetensors, without the backbone they belong to
eval.json         metrics of model/ on validation and test, in percent
tensorboard/      the log for TensorBoard, where that is installed

Use it:       ramatch tag photo.jpg --model {folder}/model --labels "dog, cat"
Evaluate it:  ramatch eval --model {folder}/model --data DATA --protocol gzsl
"""


def unfinished(folder: str | None) -> Path | None:
    """The settings of this run; or of the last one in `runs/` here that did not come to its end."""
    if folder is not None:
        file = Path(folder).expanduser() / "config.yaml"
        return file if file.is_file() else None
    states = {file: files.read_json(file).get("status") for file in Path("runs").glob("*/run.json")}
    left = [f.with_name("config.yaml") for f, state in states.items() if state != "finished"]
    if not left:
        raise RamatchError(f"no run to go on with: {len(states)} in runs/ here, all finished; name another with --out")
    return max(left, key=lambda file: file.stat().st_mtime)


class RunFolder:
    """Paths of a run, and the rules for starting or continuing in it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.checkpoints = self.path / "checkpoints"
        self.log, self.model, self.evals = self.path / "log.jsonl", self.path / "model", self.path / "eval.json"
        self.best = self.checkpoints / "best.pt"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other training in this folder meanwhile. The lock is the system's, on the folder itself: it leaves no file
        and ends with its process."""
        if sys.platform == "win32":
            yield
            return
        import fcntl

        new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                told = f"another training runs in {self.path}: wait for it, or choose another folder"
                raise RamatchError(told) from None
            yield
        finally:
            os.close(handle)
            if new:
                with suppress(OSError):
                    self.path.rmdir()  # if it is still empty: nothing began

    def open(self, config: TrainConfig, resume: str | bool) -> dict[str, Any] | None:
        """State to continue from, or None for a new run. `resume`: False, "auto", or a checkpoint file."""
        if resume in (False, "never", None):
            if checkpoint.list_checkpoints(self.checkpoints) or self.log.is_file():
                raise RamatchError(
                    f"{self.path} already holds a run: continue it with --resume auto, or choose another output folder"
                )
            return None
        if resume in (True, "auto"):
            checkpoint.clean_temporary(self.checkpoints)
            found = checkpoint.latest_good(self.checkpoints)
            if found is None and (damaged := checkpoint.list_checkpoints(self.checkpoints)):
                raise RamatchError(
                    f"none of the {len(damaged)} checkpoints in {self.checkpoints} can be read (the newest is "
                    f"{damaged[-1].name}): restore one, or choose another output folder to start anew"
                )
        else:
            file = Path(str(resume)).expanduser()
            if not file.is_file():
                raise RamatchError(f"no such checkpoint: {file}")
            found = file, checkpoint.load_checkpoint(file)
        if found is None:
            return None
        began = TrainConfig.from_dict(found[1].get("config"))  # with the defaults of settings that came later
        if changed := differences(began.to_dict(), config.to_dict()):
            raise RamatchError(
                f"cannot continue {found[0]}: these settings differ from the run's own: {'; '.join(changed)}. "
                "Set them back, or start a new run in another output folder"
            )
        return found[1]

    def begin(self, config: TrainConfig, facts: dict[str, Any]) -> None:
        """Write what is known before the first step."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        files.write_text(self.path / "config.yaml", dump_config(config))
        files.write_text(self.path / "README.txt", README.format(folder=self.path, log_every=config.log_every))
        facts |= {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()}
        facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self.note(status="running", started=time.strftime("%Y-%m-%dT%H:%M:%S%z"), **facts)

    def note(self, **facts: Any) -> None:
        """Add to run.json."""
        file = self.path / "run.json"
        known = files.read_json(file) if file.is_file() else {}
        files.write_json(file, {**known, **facts})


class RunLog:
    """log.jsonl: one object per line. `position()` goes into each checkpoint; given back on resume, what came after
    it is cut, so that a resumed run's log reads like that of a run that never stopped."""

    def __init__(self, path: Path, *, position: int | None = None, step: int = 0, tensorboard: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if position is not None and path.is_file() and path.stat().st_size > position:
            os.truncate(path, position)
        # unbuffered bytes: each line is one write, so a crash leaves whole lines (or one cut line at the very end)
        self.file = open(path, "ab" if position is not None else "wb", buffering=0)  # noqa: SIM115
        self.board: Any = None
        with suppress(ImportError):  # TensorBoard is an extra
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(path.parent / "tensorboard"), purge_step=step)

    def write(self, kind: str, *, step: int, **values: Any) -> None:
        entry = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        # JSON has no NaN: such a number becomes null
        entry = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        self.file.write((json.dumps(entry, ensure_ascii=False) + "\n").encode())
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "epoch":
                    self.board.add_scalar(f"{kind}/{name}", value, step)

    def position(self) -> int:
        """Bytes safely on disk."""
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()
