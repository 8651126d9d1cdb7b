"""Training, from top to bottom."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import files
from ..data.sampler import ResumableSampler
from ..data.transforms import Normalize
from ..errors import RamatchError
from ..evaluation.protocol import Report
from ..modeling.checkpoints.folder import load_adapters, save_ram
from ..modeling.ram import RAM
from . import checkpoint
from .assemble import DTYPES, TrainData, build_ram, find_data, read_data
from .batches import Batch, ImageCache, make_batches
from .config import TrainConfig
from .distributed import World, gather, world
from .ema import EMA
from .evaluation import collect_scores, read_test
from .folder import RunFolder
from .graphed import GraphedStep
from .interrupt import Interrupt, Interrupted
from .log import Progress, RunLog
from .optim import Temperatures, build_optimizers, clip_together, rates, schedule, set_rates, trainable


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `best` is the validation metric of the saved weights ("plain" or "ema"), in percent; `reports`
    has "validation", and "zsl" and "gzsl" where the data has those tests."""

    folder: Path
    steps: int
    metric: str
    best: float | None
    best_step: int
    weights: str
    reports: dict[str, Report]
    images_per_s: float
    seconds: float


@dataclass
class Place:
    """Where a run is: everything about its progress that is not a tensor of the model."""

    step: int = 0
    images: int = 0
    losses: int = 0  # summed in `loss_sum` since the last line of the log
    best: dict[str, Any] = field(default_factory=dict)  # value, step, weights


class Step(nn.Module):
    """Pixels and targets → loss; thin, so that DistributedDataParallel can wrap it."""

    def __init__(self, ram: RAM, labels: tuple[str, ...], loss: str, gather: Callable | None) -> None:
        super().__init__()
        self.ram, self.labels, self.loss, self.gather = ram, labels, loss, gather

    def forward(self, pixels: Tensor, targets: Tensor) -> Tensor:
        """pixels (B, 3, H, W) normalised, targets (B, N) → ()"""
        try:
            output = self.ram(pixels, self.labels, targets)
        except RamatchError as error:  # the solver refuses NaN, whose cause lies in the weights
            if self._sound(pixels):
                raise
            raise _diverged("NaN") from error
        return self.ram.loss(output, targets, self.loss, self.gather)

    @torch.no_grad()
    def _sound(self, pixels: Tensor) -> bool:
        """Whether the weights still give numbers."""
        labels = self.ram.encode_labels(self.labels)
        regions = self.ram.region_set.regions(self.ram.backbone, self.ram.trunk(pixels), labels.tss)
        return bool(self.ram.similarity(regions, labels).isfinite().all())


def train(
    config: TrainConfig,
    *,
    resume: str | bool = False,
    images: ImageCache | None = None,
    progress: bool = True,
) -> RunResult:
    """Train RAM as `config` says, in the folder `config.output`.

    resume: False (the folder must be new), "auto" (from the newest good checkpoint; from the start if there is none), or
    a checkpoint file. images: decoded pictures kept between runs, used with data.cache = device. Under torchrun every
    process calls this; the first one writes and gets the reports.
    """
    with world(config.device) as here, Interrupt() as interrupt:
        folder = RunFolder(config.output)
        try:
            return _train(config, here, interrupt, folder, resume, images, progress and here.leader)
        except KeyboardInterrupt:
            last = checkpoint.list_checkpoints(folder.checkpoints)
            where = f"continue from {last[-1].name} with --resume auto" if last else "there is no checkpoint yet"
            raise Interrupted(f"stopped; {where} (run folder {folder.path})") from None
        except OSError as error:
            if error.errno not in checkpoint.FULL:
                raise
            raise RamatchError(checkpoint.describe(error, folder.checkpoints)) from error


def _train(
    config: TrainConfig, here: World, interrupt: Interrupt, folder: RunFolder, resume: str | bool,
    images: ImageCache | None, progress: bool,
) -> RunResult:  # fmt: skip
    begun = time.monotonic()
    state = folder.open(config, resume)
    _seed(config)

    # What learns, from what
    data = read_data(config.data, config.seed)
    ram = build_ram(config.model, here.device, config.precision)
    if here.size > 1 and config.sync_batchnorm and here.device.type == "cuda":
        ram.region_set = nn.SyncBatchNorm.convert_sync_batchnorm(ram.region_set)
    parameters = trainable(ram)
    optimizers = build_optimizers(parameters, config.optim)
    temperatures = Temperatures(parameters, config.optim.temperature_floor)
    ema = EMA(ram, config.optim.ema_decay) if config.optim.ema_decay else None
    scaler = torch.amp.GradScaler(here.device.type, enabled=config.precision == "fp16")
    step = Step(ram, data.seen, config.loss, gather if here.size > 1 else None)
    model = DistributedDataParallel(step) if here.size > 1 else step

    count = len(data.train)
    sampler = ResumableSampler(count, config.seed, config.batch_size, here.rank, here.size,
                               drop_last=count >= config.batch_size * here.size)  # fmt: skip
    if config.data.cache == "device" and images is None:
        images = ImageCache(config.data.workers)
    batches = make_batches(config, data.train, sampler, ram.preprocess, here.device, images, progress)
    per_epoch = math.ceil(sampler.batches_per_epoch / config.optim.accumulate)
    total = min(config.epochs * per_epoch, config.max_steps or 2**62)
    normalise = Normalize(ram.preprocess.mean, ram.preprocess.std).to(here.device)
    dtype = DTYPES[config.precision]
    autocast = torch.autocast(here.device.type, dtype=dtype, enabled=dtype != torch.float32)
    place, loss_sum = Place(), torch.zeros((), device=here.device)

    # Where an earlier session stopped
    identity = {"backbone": ram.backbone.fingerprint(), "data": data.digest()}
    parts = {"optimizers": optimizers, "ema": ema, "scaler": scaler, "sampler": sampler}
    if state is not None:
        _restore(state, identity, ram, parts, place, loss_sum, here.device)
    with torch.no_grad(), autocast:  # fills the label set's store of frozen features in the same order on every start
        ram.encode_labels(data.seen)
    log = None
    if here.leader:
        folder.begin(config, {"labels": len(data.seen), "images": count, "data": data.train.summary.headline(),
                              "processes": here.size, "device": str(here.device), "steps": total,
                              "trainable_parameters": sum(p.numel() for p in parameters.values()),
                              "backbone": {"name": ram.backbone.name, "fingerprint": identity["backbone"]}})  # fmt: skip
        if data.validation is not None:
            files.write_json(folder.path / "validation.json", [r.key for r in data.validation.records])
        log = RunLog(folder.log, position=None if state is None else state["log"], step=place.step,
                     tensorboard=config.tensorboard)  # fmt: skip
    line = Progress(total * config.batch_size * here.size * config.optim.accumulate, "training", enabled=progress)
    line.message(f"{data.train.summary.headline()}\nrun folder {folder.path}, {total:,} steps on {here.device}"
                 + (f", continuing at step {place.step:,}" if place.step else ""))  # fmt: skip

    def validate() -> None:
        """Evaluate plain and averaged weights on validation, note the better, keep it if it is the best so far."""
        if data.validation is None or log is None:
            return
        paused = time.monotonic()
        with interrupt.at_once():
            found = {"plain": _report(config, ram, data, images, progress)}
            if ema is not None and place.step:
                with ema.applied():
                    found["ema"] = _report(config, ram, data, images, progress)
        for weights, report in found.items():
            log.write("eval", step=place.step, weights=weights, **report.values)
        weights = max(found, key=lambda name: found[name][_metric(config, found[name])])
        value = found[weights][config.eval.metric]
        shown = "  ".join(f"{name} {report[config.eval.metric]:.2f}" for name, report in found.items())
        line.message(f"step {place.step:,}: validation {config.eval.metric} {shown}")
        if place.step and (not place.best or value > place.best["value"]):  # the start is shown, not chosen
            place.best = {"value": value, "step": place.step, "weights": weights, "report": found[weights].to_dict()}
            adapters = ema.state_dict() if weights == "ema" and ema is not None else ram.adapters()
            checkpoint.save_checkpoint(folder.best, {"adapters": adapters, "best": place.best})
        line.pause(time.monotonic() - paused)

    def save() -> None:
        if log is None or not config.checkpoint.keep:
            return
        paused = time.monotonic()
        checkpoint.save_checkpoint(checkpoint.checkpoint_path(folder.checkpoints, place.step), {
            "config": config.to_dict(), "identity": identity, "adapters": ram.adapters(), "place": vars(place),
            "loss_sum": loss_sum, "optimizers": [o.state_dict() for o in optimizers],
            "ema": ema.state_dict() if ema else None, "scaler": scaler.state_dict(), "sampler": sampler.state_dict(),
            "rng": checkpoint.rng_state(here.device), "log": log.position(),
        })  # fmt: skip
        checkpoint.prune(folder.checkpoints, config.checkpoint.keep)
        line.pause(time.monotonic() - paused)

    def forward(pixels: Tensor, targets: Tensor) -> Tensor:
        with autocast:
            return model(normalise(pixels).to(dtype), targets)

    # On one GPU a step is one CUDA graph; what needs the host in its middle (fp16's scaler, accumulation, DDP) is not
    graphed = None
    plain = config.optim.accumulate == 1 and not scaler.is_enabled() and not config.deterministic
    if here.device.type == "cuda" and here.size == 1 and plain:
        graphed = GraphedStep(
            forward, optimizers, parameters=parameters.values(), clip_norm=config.optim.clip_norm,
            after=[temperatures.clamp] + ([ema.update] if ema is not None else []),
            holds=lambda: (ram.label_set._padded, ram.label_set._teacher),
        )  # fmt: skip

    # The loop
    line.start(place.images)
    if place.step == 0 and config.eval.at_start:
        validate()
    ram.train()
    interrupt.patient = True
    while place.step < total:
        epoch = sampler.epoch
        if ema is not None and config.optim.ema_restart and sampler.position == 0:
            ema.restart()
        for group in _groups(batches, config.optim.accumulate):
            set_rates(optimizers, schedule(place.step, total, config.optim.warmup, config.optim.final_lr))
            for i, (pixels, targets) in enumerate(group if graphed is None else ()):
                waiting = here.size > 1 and i + 1 < len(group)  # gradients are averaged with the last batch only
                with model.no_sync() if waiting else nullcontext():  # type: ignore[operator]
                    loss = forward(pixels, targets)
                    scaler.scale(loss / len(group)).backward()
                loss_sum += loss.detach() / len(group)
                place.images += len(pixels) * here.size
            if graphed is not None:
                loss_sum += graphed(*group[0])
                place.images += len(group[0][0])
            else:
                clip_together(optimizers, parameters.values(), config.optim.clip_norm, scaler)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                    optimizer.zero_grad(set_to_none=True)
                scaler.update()
                temperatures.clamp()
                if ema is not None:
                    ema.update()
            sampler.advance(len(group))
            place.step += 1
            place.losses += 1

            stop = interrupt.pressed and here.size == 1
            if place.step % config.log_every == 0 or place.step == total:  # the only place that waits for the GPU
                value = float(here.mean(loss_sum)) / place.losses
                stop = float(here.mean(torch.tensor(float(interrupt.pressed), device=here.device))) > 0
                loss_sum.zero_()
                place.losses = 0
                if not math.isfinite(value):
                    raise _diverged(f"{value} at step {place.step}")
                line.update(place.images, f"epoch {epoch + 1}/{config.epochs}  loss {value:.4f}",
                            force=place.step == total)  # fmt: skip
                if log is not None:
                    log.write("step", step=place.step, epoch=epoch, loss=value, images=place.images,
                              tau_region=float(ram.tau_region.detach()), tau_global=float(ram.tau_global.detach()),
                              **{f"lr_{role}": lr for role, lr in rates(optimizers).items()},
                              images_per_s=round(line.rate(), 1))  # fmt: skip
            ended = sampler.position == 0 or place.step == total
            if place.step == total or (place.step % config.eval.every == 0 if config.eval.every else ended):
                validate()
                save()
            elif ended or stop or (config.checkpoint.every and place.step % config.checkpoint.every == 0):
                save()
            if stop and place.step < total:
                raise KeyboardInterrupt
            if place.step == total:
                break

    # The result
    interrupt.patient = False
    rate, reports = line.rate(), {}
    line.clear()
    if here.leader:
        reports = _finish(config, folder, ram, data, place, images, progress)
        seconds = time.monotonic() - begun
        folder.note(status="finished", best=place.best or None, images_per_s=round(rate, 1), seconds=round(seconds, 1))
        assert log is not None
        log.close()
    here.broadcast(None)  # the others wait, so that nobody leaves while the first still works
    best = place.best or {"value": None, "step": place.step, "weights": "plain"}
    return RunResult(folder.path, place.step, config.eval.metric, best["value"], best["step"], best["weights"], reports,
                     rate, time.monotonic() - begun)  # fmt: skip


def _diverged(what: str) -> RamatchError:
    return RamatchError(
        f"the loss is {what}: training diverged; use a smaller learning rate, or precision bf16 or fp32. Earlier checkpoints "
        "are untouched"
    )


def _seed(config: TrainConfig) -> None:
    random.seed(config.seed)
    np.random.seed(config.seed)
    torch.manual_seed(config.seed)
    if config.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


def _groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Lists of `size` batches; the last of an epoch may be shorter."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group


def _metric(config: TrainConfig, report: Report) -> str:
    if config.eval.metric not in report.values:
        raise RamatchError(f"eval.metric '{config.eval.metric}' is not measured; known: {', '.join(report.values)}")
    return config.eval.metric


def _report(config: TrainConfig, ram: RAM, data: TrainData, images: ImageCache | None, progress: bool) -> Report:
    assert data.validation is not None
    scores = collect_scores(ram, data.validation, batch_size=config.eval.batch_size, workers=config.data.workers,
                            images=images, progress=progress, what="validation")  # fmt: skip
    return scores.report(seen=data.seen if data.unseen else None, unseen=data.unseen or None)


def _restore(
    state: dict[str, Any], identity: dict[str, str], ram: RAM, parts: dict[str, Any], place: Place, loss_sum: Tensor,
    device: torch.device,
) -> None:  # fmt: skip
    """Put everything back as the checkpoint has it."""
    for what, value in state["identity"].items():
        if value != identity[what]:
            raise RamatchError(
                f"cannot continue: the {what} is not what the run began with (fingerprint {identity[what]}, was {value})"
            )
    load_adapters(ram, state["adapters"], "checkpoint")
    for optimizer, saved in zip(parts["optimizers"], state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    if parts["ema"] is not None:
        parts["ema"].load_state_dict(state["ema"])
    parts["scaler"].load_state_dict(state["scaler"])
    parts["sampler"].load_state_dict(state["sampler"])
    vars(place).update(state["place"])
    loss_sum.copy_(state["loss_sum"])
    checkpoint.set_rng_state(state["rng"], device)


def _finish(
    config: TrainConfig, folder: RunFolder, ram: RAM, data: TrainData, place: Place, images: ImageCache | None,
    progress: bool,
) -> dict[str, Report]:  # fmt: skip
    """The best weights (the last, without validation) as a model folder, and its evaluation."""
    if place.best:
        load_adapters(ram, checkpoint.load_checkpoint(folder.best)["adapters"], str(folder.best))
    ram.eval()
    save_ram(ram, folder.model)
    reports: dict[str, Report] = {}
    if data.validation is not None:
        reports["validation"] = _report(config, ram, data, images, progress)
    path = find_data(config.data.path)
    if config.eval.test and path.is_dir() and (path / "test_gzsl.json").is_file():
        for protocol in ("zsl", "gzsl"):
            test = read_test(path, protocol, images_root=config.data.images)
            scores = collect_scores(ram, test.annotations, batch_size=config.eval.batch_size,
                                    workers=config.data.workers, images=images, progress=progress, what=protocol)  # fmt: skip
            reports[protocol] = scores.report(protocol=protocol, seen=test.seen, unseen=test.unseen)
    files.write_json(folder.evals, {name: report.to_dict() for name, report in reports.items()})
    return reports
