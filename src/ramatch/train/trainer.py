"""The loop of every training: schedule, step, average, log, validation, checkpoints, interrupts."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from ..errors import RamatchError
from ..progress import Progress
from . import checkpoint
from .config import LoopConfig, TrainConfig
from .distributed import World
from .folder import RunFolder, RunLog
from .interrupt import Interrupt
from .optim import EMA, rates, reference_schedule, schedule, set_rates
from .step import TrainStep
from .task import Batch, Task, diverged


@dataclass
class Place:
    """Where a run is: everything about its progress that is not a tensor of the model."""

    step: int = 0
    images: int = 0
    losses: int = 0  # summed in `loss_sum` since the last line of the log
    best: dict[str, Any] = field(default_factory=dict)  # value, step, weights, report


def seed_all(config: LoopConfig) -> None:
    """Before anything random is made."""
    random.seed(config.seed)
    np.random.seed(config.seed)
    torch.manual_seed(config.seed)
    if config.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


class Trainer:
    """Trains a task. With a `folder` (and a `TrainConfig`) it keeps a log, validates, and can be resumed."""

    def __init__(
        self,
        task: Task,
        config: LoopConfig,
        here: World,
        *,
        folder: RunFolder | None = None,
        interrupt: Interrupt | None = None,
        progress: bool = False,
    ) -> None:
        self.task, self.config, self.here, self.folder = task, config, here, folder
        self.run = config if isinstance(config, TrainConfig) else None
        self.interrupt = interrupt or Interrupt()
        optim = config.optim
        graph = False if config.deterministic else None
        self.step = TrainStep(task, optim, here, fp16=config.precision == "fp16", graph=graph)
        self.ema = EMA(task.state()) if optim.ema_decay or optim.average else None
        per_epoch = math.ceil(task.sampler.batches_per_epoch / optim.accumulate)
        self.total = min(config.epochs * per_epoch, config.max_steps or 2**62)
        self.place, self.loss_sum = Place(), torch.zeros((), device=here.device)
        self.history: list[dict[str, Any]] = []  # lines of the log
        self.log: RunLog | None = None  # the leader's
        images = self.total * task.sampler.global_batch * optim.accumulate
        self.line = Progress(images, "training", enabled=progress)

    # ------------------------------------------------------------------------------------------------- the loop

    def fit(self) -> float:
        """All steps that are left, and the seconds they took. Without a folder that keeps the best weights, they end as
        their average if there is one."""
        begun = time.perf_counter()
        if self.place.step == 0 and self.run is not None and self.run.eval.at_start:
            self._validate()
        self.line.start(self.place.images)
        self.task.train()
        self.interrupt.patient = True
        while self.place.step < self.total:
            self._epoch()
        self.interrupt.patient = False
        self.line.clear()
        if self.run is None and self.ema is not None:
            self.ema.apply()
        return time.perf_counter() - begun

    def _epoch(self) -> None:
        sampler, optim = self.task.sampler, self.config.optim
        epoch = sampler.epoch
        if self.ema is not None and optim.ema_restart and sampler.position == 0:
            self.ema.restart()
        for batches in _groups(self.task.batches(), optim.accumulate):
            by_step = schedule(self.place.step, self.total, optim.warmup, optim.final_lr)
            set_rates(self.step.optimizers, reference_schedule(epoch) if optim.schedule == "reference" else by_step)
            self.loss_sum += self.step(batches)
            self.place.images += sum(len(batch[0]) for batch in batches) * self.here.size
            sampler.advance(len(batches))
            self.place.step += 1
            self.place.losses += 1
            if self.ema is not None:
                self.ema.update(optim.decay(self.place.step, self.total))
            ended = sampler.position == 0 or self.place.step == self.total
            if ended:
                self.task.end_epoch(self.place.step)
            self._after_step(epoch, ended)
            if self.place.step == self.total:
                break

    def _after_step(self, epoch: int, ended: bool) -> None:
        """Log, validate, save, stop, each when it is time."""
        step, run = self.place.step, self.run
        stop = self.interrupt.pressed and self.here.size == 1
        if step % self.config.log_every == 0 or step == self.total:  # the only place that waits for the GPU
            pressed = torch.tensor(float(self.interrupt.pressed), device=self.here.device)
            stop = float(self.here.mean(pressed)) > 0
            self._write_log(epoch)
        if run is not None:
            paused = time.monotonic()
            if judge := step == self.total or (step % run.eval.every == 0 if run.eval.every else ended):
                self._validate()
            if judge or ended or stop or (run.checkpoint.every and step % run.checkpoint.every == 0):
                self._save()
            self.line.pause(time.monotonic() - paused)
        if stop and step < self.total:
            raise KeyboardInterrupt

    def _write_log(self, epoch: int) -> None:
        value = float(self.here.mean(self.loss_sum)) / self.place.losses
        self.loss_sum.zero_()
        self.place.losses = 0
        step = self.place.step
        if not math.isfinite(value):
            raise diverged(f"{value} at step {step}")
        note = f"epoch {epoch + 1}/{self.config.epochs}  loss {value:.4f}"
        self.line.update(self.place.images, note, force=step == self.total)
        entry = {"epoch": epoch, "loss": value, "images": self.place.images, **self.task.notes()}
        entry |= {f"lr_{role}": lr for role, lr in rates(self.step.optimizers).items()}
        entry["images_per_s"] = round(self.line.rate(), 1)
        self.history.append({"step": step, **entry})
        if self.log is not None:
            self.log.write("step", step=step, **entry)

    # --------------------------------------------------------------------------- validation, checkpoints, resume

    def _validate(self) -> None:
        """Evaluate plain and averaged weights on validation, note the better, keep it if it is the best so far."""
        if self.log is None or self.folder is None or self.run is None:
            return
        step, metric, found = self.place.step, self.run.eval.metric, {}
        ways = {"plain": nullcontext()} | ({"ema": self.ema.applied()} if self.ema is not None and step else {})
        patient, self.interrupt.patient = self.interrupt.patient, False
        for weights, way in ways.items():
            with way:
                report = self.task.evaluate()
            if report is not None:
                found[weights] = report
        self.interrupt.patient = patient
        if not found:
            return
        for weights, report in found.items():
            self.log.write("eval", step=step, weights=weights, **report.values)
        if metric not in found["plain"].values:
            raise RamatchError(f"eval.metric '{metric}' is not measured; known: {', '.join(found['plain'].values)}")
        weights = max(found, key=lambda name: found[name][metric])
        shown = "  ".join(f"{name} {report[metric]:.2f}" for name, report in found.items())
        self.line.message(f"step {step:,}: validation {metric} {shown}")
        value, best = found[weights][metric], self.place.best
        if step and (not best or value > best["value"]):  # the start is shown, not chosen
            self.place.best = {"value": value, "step": step, "weights": weights, "report": found[weights].to_dict()}
            adapters = self.ema.state_dict() if weights == "ema" and self.ema is not None else self.task.state()
            checkpoint.save_checkpoint(self.folder.best, {"adapters": adapters, "best": self.place.best})

    def _save(self) -> None:
        if self.log is None or self.folder is None or self.run is None or not self.run.checkpoint.keep:
            return
        state = {
            "config": self.config.to_dict(),
            "identity": self.task.identity(),
            "adapters": self.task.state(),
            "place": vars(self.place),
            "loss_sum": self.loss_sum,
            "optimizers": [o.state_dict() for o in self.step.optimizers],
            "ema": self.ema.state_dict() if self.ema else None,
            "scaler": self.step.scaler.state_dict(),
            "sampler": self.task.sampler.state_dict(),
            "rng": checkpoint.rng_state(self.here.device),
            "log": self.log.position(),
        }
        checkpoint.save_checkpoint(checkpoint.checkpoint_path(self.folder.checkpoints, self.place.step), state)
        checkpoint.prune(self.folder.checkpoints, self.run.checkpoint.keep)

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Put everything back as the checkpoint has it."""
        now = self.task.identity()
        for what, value in state["identity"].items():
            if value != now[what]:
                raise RamatchError(
                    f"cannot continue: the {what} is not what the run began with (fingerprint {now[what]}, was {value})"
                )
        for name, tensor in self.task.state().items():
            tensor.copy_(state["adapters"][name])
        for optimizer, saved in zip(self.step.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.step.scaler.load_state_dict(state["scaler"])
        self.task.sampler.load_state_dict(state["sampler"])
        vars(self.place).update(state["place"])
        self.loss_sum.copy_(state["loss_sum"])
        checkpoint.set_rng_state(state["rng"], self.here.device)


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Lists of `size` batches; the last of an epoch may be shorter."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group
