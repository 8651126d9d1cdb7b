"""`ramatch train`: RAM, or a system it is compared with, on labelled images, in a folder that explains itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import files
from ..data.annotations import Annotations
from ..data.augment import augment, epoch_table
from ..data.decode import ImageCache, ImageDataset, ImageLoader
from ..data.sampler import ResumableSampler
from ..data.splits import find_data
from ..errors import RamatchError
from ..evaluation.models import Scores, collect_scores, read_test
from ..evaluation.protocol import Report
from ..methods import METHODS
from ..modeling.checkpoints.folder import load_adapters, save_ram
from ..modeling.ram import Trunk
from ..progress import Progress
from . import checkpoint
from .assemble import build_ram, read_data
from .config import TrainConfig
from .distributed import World, gather, world
from .folder import RunFolder, RunLog
from .interrupt import Interrupt, Interrupted
from .task import Batch, RAMTask
from .trainer import Place, Trainer, seed_all


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


class LabelledTask(RAMTask):
    """The images and labels of `config.data`.

    Parts are cut from the full pictures in worker processes; or (data.cache = device) all images are decoded once, kept
    as uint8 on the device, and parts are cut there: no worker, no copy, no wait. The augmentation is the same and
    depends on (seed, epoch, image) alone. `images`: decoded pictures kept between runs."""

    def __init__(
        self, config: TrainConfig, here: World, images: ImageCache | None = None, progress: bool = False
    ) -> None:
        self.config, self.device, self.progress = config, here.device, progress
        self.data = read_data(config.data, config.seed)
        dtype = config.dtype(here.device)
        ram = build_ram(config.model, here.device, dtype)
        if here.size > 1 and config.sync_batchnorm and here.device.type == "cuda":
            ram.region_set = nn.SyncBatchNorm.convert_sync_batchnorm(ram.region_set)
        super().__init__(ram, self.data.seen, config.loss, dtype, gather if here.size > 1 else None)
        data, batch, workers = self.data.train, config.batch_size, config.data.workers
        drop_last = len(data) >= batch * here.size
        self.sampler = ResumableSampler(len(data), config.seed, batch, here.rank, here.size, drop_last=drop_last)
        self.images, self.pixels, self.targets = images, None, data.targets()
        if config.data.cache == "device":
            self.images = images or ImageCache(workers)
            self.pixels = self.images.stack(data.records, ram.preprocess, progress=progress).to(here.device)
            self.targets = self.targets.to(here.device)  # as bytes: there may be a thousand labels
        else:
            self.targets = self.targets.float()
            cut = config.augment if config.augment.enabled else None
            dataset = ImageDataset(data.records, ram.preprocess, augment=cut, seed=config.seed)
            options = {"pin_memory": here.device.type == "cuda", "persistent_workers": workers > 0}
            self.loader = ImageLoader(dataset, workers=workers, batch_sampler=self.sampler, **options)
        with torch.no_grad(), self.autocast():  # fills the label set's store in the same order on every start
            ram.encode_labels(self.data.seen)

    def batches(self) -> Iterator[Batch]:
        """(pixels uint8 or float in [0, 255] (B, 3, H, W), targets (B, N)): those left in the sampler's epoch."""
        config, preprocess = self.config, self.ram.preprocess
        table = epoch_table(len(self.targets), config.seed, self.sampler.epoch).to(self.targets.device)
        size, fill = None if self.pixels is None else preprocess.size, [255 * m for m in preprocess.mean]
        if (kept := self.pixels) is None:
            source: Iterable[tuple[Tensor, Tensor]] = self.loader
        else:
            source = ((kept[rows], rows) for rows in self.sampler.rows(self.device))
        for decoded, rows in source:
            pixels = decoded.to(self.device, non_blocking=True)
            if config.augment.enabled:
                draws = table[rows].to(self.device, non_blocking=True)
                pixels = augment(pixels, draws, config.augment, fill, size)
            yield pixels, self.targets[rows].to(self.device, non_blocking=True)

    def trunks(self) -> Iterator[Trunk]:
        data, batch = self.data.train, self.config.eval.batch_size
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.config.seed))
        if (kept := self.pixels) is not None:
            source = (kept[rows.to(self.device)] for rows in order.split(batch))
        else:
            dataset, workers = ImageDataset(data.records, self.ram.preprocess), self.config.data.workers
            loader = ImageLoader(dataset, workers=workers, batch_size=batch, sampler=order.tolist())
            source = (pixels for pixels, _ in loader)
        line, done = Progress(len(data), "looking at the images", enabled=self.progress), 0
        try:
            for pixels in source:
                with self.autocast():  # not of what the system does with them
                    found = self.ram.trunk(pixels.to(self.device))
                yield found
                line.update(done := done + len(pixels))
        finally:  # also for one who has seen enough
            line.clear()

    def identity(self) -> dict[str, str]:
        return {"backbone": self.ram.backbone.fingerprint(), "data": self.data.digest()}

    def evaluate(self) -> Report | None:
        if self.data.validation is None:
            return None
        unseen = self.data.unseen
        scores = self.scores(self.data.validation, "validation")
        return scores.report(seen=self.data.seen if unseen else None, unseen=unseen or None)

    def scores(self, data: Annotations, what: str) -> Scores:
        options: dict[str, Any] = {"batch_size": self.config.eval.batch_size, "workers": self.config.data.workers}
        options |= {"images": self.images, "progress": self.progress}
        return collect_scores(self.ram, data, what=what, **options)


def train(
    config: TrainConfig, *, resume: str | bool = False, images: ImageCache | None = None, progress: bool = True
) -> RunResult:
    """Train RAM (or `config.model.method`) as `config` says, in the folder `config.output`. A system without anything
    that learns only looks at the images.

    resume: False (the folder must be new), "auto" (from the newest good checkpoint; from the start if there is none),
    or a checkpoint file. images: decoded pictures kept between runs, used with data.cache = device. Under torchrun
    every process calls this; the first one writes and gets the reports."""
    _check_method(config.model.method)
    folder = RunFolder(config.output)
    with world(config.device) as here, Interrupt() as interrupt, folder.locked() if here.leader else nullcontext():
        begun = time.monotonic()
        try:
            state = folder.open(config, resume)
            seed_all(config)
            task = LabelledTask(config, here, images, progress and here.leader)
            if state is None:  # else what it saw is in the state
                task.prepare()
            if not task.learns:
                return _prepared(task, here, folder, begun)
            trainer = Trainer(task, config, here, folder=folder, interrupt=interrupt, progress=task.progress)
            _begin(trainer, task, folder, state)
            trainer.fit()
            return _finish(trainer, task, folder, begun)
        except KeyboardInterrupt:
            last = checkpoint.list_checkpoints(folder.checkpoints)
            where = f"continue from {last[-1].name} with --resume auto" if last else "there is no checkpoint yet"
            raise Interrupted(f"stopped; {where} (run folder {folder.path})") from None
        except OSError as error:
            if error.errno not in checkpoint.FULL:
                raise
            raise RamatchError(checkpoint.describe(error, folder.checkpoints)) from error


def _check_method(name: str) -> None:
    kind = METHODS.get(name)
    if kind is not None and not (kind.learns or kind.needs_images):
        use = f"`ramatch eval --method {name} --model BACKBONE --data D`"
        raise RamatchError(f"method '{name}' has nothing to train: it is used on a backbone as it is, {use}")


def _prepared(task: LabelledTask, here: World, folder: RunFolder, begun: float) -> RunResult:
    """A system that has seen the images and does not learn, as a model folder, and its evaluation."""
    reports = {}
    if here.leader:
        _describe(task, here, folder, steps=0, trainable_parameters=0)
        RunLog(folder.log, tensorboard=False).close()  # the folder holds a run from here on
        reports = _evaluate_best(task, folder, Place())
        folder.note(status="finished", best=None, seconds=round(time.monotonic() - begun, 1))
    here.wait()
    metric = task.config.eval.metric
    return RunResult(folder.path, 0, metric, None, 0, "plain", reports, 0.0, time.monotonic() - begun)


def _describe(task: LabelledTask, here: World, folder: RunFolder, **more: Any) -> None:
    """Write what is known before the first step."""
    data = task.data
    facts = {"labels": len(data.seen), "images": len(data.train), "data": data.train.summary.headline()}
    facts |= {"processes": here.size, "device": str(here.device), **more}
    facts["backbone"] = {"name": task.ram.backbone.name, "fingerprint": task.ram.backbone.fingerprint()}
    folder.begin(task.config, facts)
    if data.validation is not None:
        files.write_json(folder.path / "validation.json", [r.key for r in data.validation.records])


def _begin(trainer: Trainer, task: LabelledTask, folder: RunFolder, state: dict[str, Any] | None) -> None:
    """Go to where an earlier session stopped, and begin the folder and the log."""
    if state is not None:
        try:
            trainer.restore(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            told = f"the checkpoint is damaged ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            raise RamatchError(f"{told}: remove it, and --resume auto takes the one before") from None
    here, place = trainer.here, trainer.place
    if here.leader:
        count = sum(p.numel() for p in trainer.step.parameters)
        _describe(task, here, folder, steps=trainer.total, trainable_parameters=count)
        position, board = None if state is None else state["log"], task.config.tensorboard
        trainer.log = RunLog(folder.log, position=position, step=place.step, tensorboard=board)
    told = f"{task.data.train.summary.headline()}\nrun folder {folder.path}, {trainer.total:,} steps on {here.device}"
    trainer.line.message(told + (f", continuing at step {place.step:,}" if place.step else ""))


def _finish(trainer: Trainer, task: LabelledTask, folder: RunFolder, begun: float) -> RunResult:
    """The best weights (the last, without validation) as a model folder, and its evaluation."""
    place, here, rate, reports = trainer.place, trainer.here, trainer.line.rate(), {}
    if here.leader:
        reports = _evaluate_best(task, folder, place)
        seconds = round(time.monotonic() - begun, 1)
        folder.note(status="finished", best=place.best or None, images_per_s=round(rate, 1), seconds=seconds)
        assert trainer.log is not None
        trainer.log.close()
    here.wait()  # so that nobody leaves while the first still works
    best = place.best or {"value": None, "step": place.step, "weights": "plain"}
    told = (best["value"], best["step"], best["weights"], reports, rate, time.monotonic() - begun)
    return RunResult(folder.path, place.step, task.config.eval.metric, *told)


def _evaluate_best(task: LabelledTask, folder: RunFolder, place: Place) -> dict[str, Report]:
    if place.best:
        load_adapters(task.ram, checkpoint.load_checkpoint(folder.best)["adapters"], str(folder.best))
    task.ram.eval()
    save_ram(task.ram, folder.model)
    reports: dict[str, Report] = {}
    if (report := task.evaluate()) is not None:
        reports["validation"] = report
    path = find_data(task.config.data.path)
    if task.config.eval.test and (path / "test_gzsl.json").is_file():
        for protocol in ("zsl", "gzsl"):
            test = read_test(path, protocol, images_root=task.config.data.images)
            scores = task.scores(test.annotations, protocol)
            reports[protocol] = scores.report(protocol=protocol, seen=test.seen, unseen=test.unseen)
    files.write_json(folder.evals, {name: report.to_dict() for name, report in reports.items()})
    return reports
