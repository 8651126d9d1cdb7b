"""`ramatch train` without a recipe: a trained model learns the labels of its user's own images.

What is said of it rests on images that it did not learn from: each fold is kept aside once, and the model that never
saw it answers for it. The model that is written has learned from all of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import files
from ..data.annotations import Annotations
from ..data.decode import ImageCache
from ..data.splits import find_data, read_split, stable_order
from ..errors import RamatchError
from ..evaluation._tables import format_table
from ..evaluation.calibration import FEATURES, Calibrator
from ..evaluation.intervals import Change, paired_change
from ..evaluation.metrics import at_k, mean_ap
from ..evaluation.models import collect_scores, load_model, save_model
from ..evaluation.reliability import ece
from ..modeling.checkpoints.folder import LEARNED, model_folder
from ..modeling.checkpoints.hashes import write_hashes
from ..modeling.learned import Learned
from ..recognizer import Recognizer
from .config import OwnConfig, dump_config
from .directions import VIEWS, choose, learn, look
from .folder import RunFolder

FEW = 30  # images; what fewer say of a model is chance
MEMORY = 1 << 31  # bytes that what is kept of all images may take

README = """A model that learned the labels of your images (`ramatch train`).

config.yaml       what was asked for; `ramatch train --recipe config.yaml output=ELSEWHERE` repeats it
run.json          when, where, on what data, and how it ended
eval.json         before and after, on images that were kept aside, in percent
model/            the result, which stands alone

Use it:       ramatch tag photo.jpg --model {folder} --labels "dog, cat"
Evaluate it:  ramatch eval --model {folder} --data DATA
"""


METRICS = {"F1@3": lambda p, t: at_k(p, t, 3).f1, "ECE": ece}


@dataclass(frozen=True)
class Taught:
    """learned: from all images, with this prior (see `directions.PRIORS`). before, after (n, N): probabilities, the
    latter of each image by what was learned without it; targets (n, N); folds: rows that were kept aside together."""

    learned: Learned | None
    prior: float | None
    before: np.ndarray
    after: np.ndarray
    targets: np.ndarray
    folds: Sequence[Sequence[int]]

    def changes(self) -> dict[str, Change]:
        found = self.before, self.after, self.targets
        # who was kept aside with a rare label learned that it is rarer: across folds it would be ranked too low
        ranked = paired_change(*found, mean_ap, parts=self.folds)
        return {"mAP": ranked} | {name: paired_change(*found, metric) for name, metric in METRICS.items()}


@dataclass(frozen=True)
class OwnResult:
    """What became of it. changes: metrics (fractions) before and after on images kept aside, none where these are too
    few; better: whether an interval says so; kept: whether what was learned is in the model."""

    folder: Path
    images: int
    labels: int
    changes: dict[str, Change]
    better: bool
    kept: bool
    notes: tuple[str, ...]

    def to_table(self) -> str:
        rows = [
            [name, *(f"{100 * x:.1f}" for x in (c.before, c.after)), f"{100 * c.change:+.1f}"]
            + [f"{100 * c.low:+.1f} to {100 * c.high:+.1f}"]
            for name, c in self.changes.items()
        ]
        head = [f"{self.images:,} images, {self.labels:,} labels", "before", "after", "change", "95 % interval"]
        table = [format_table(head, rows), ""] if rows else []
        return "\n".join([*table, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        percent = {name: {k: round(100 * v, 2) for k, v in c._asdict().items()} for name, c in self.changes.items()}
        facts = {"images": self.images, "labels": self.labels, "better": self.better, "kept": self.kept}
        return facts | {"kept_aside": percent, "notes": list(self.notes)}


def train_own(config: OwnConfig, *, resume: str | bool = False, progress: bool = True) -> OwnResult:
    """Teach `config.model` the labels of `config.data`, in the folder `config.output`. resume: "auto" does anew what an
    earlier start left there; it takes too short for checkpoints."""
    folder = RunFolder(config.output)
    if resume not in (False, True, "auto"):
        raise RamatchError(f"no such checkpoint: {resume}; a run that learns labels has none, use --resume auto")
    everything = _read(config)
    with folder.locked():
        if not resume and (folder.path / "config.yaml").is_file():
            told = "already holds a run: do it again with --resume auto, or choose another output folder"
            raise RamatchError(f"{folder.path} {told}")
        start = config.model
        if (source := model_folder(start.backbone)) is not None and source.resolve() == folder.model.resolve():
            raise RamatchError(
                f"{start.backbone} would be replaced by what is made of it: choose another output folder"
            )
        recognizer = load_model(start.backbone, label_features=start.label_features, device=config.device)
        data, notes = _as_many(everything, recognizer.ram.backbone.dim)
        files.write_text(folder.path / "config.yaml", dump_config(config))
        files.write_text(folder.path / "README.txt", README.format(folder=folder.path))
        facts = {"data": data.summary.headline(), "images": len(data), "labels": len(data.classes)}
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        folder.note(status="running", started=started, model=start.backbone, **facts)
        result = _run(config, recognizer, data, notes, folder, progress)
        files.write_json(folder.evals, result.to_dict())
        folder.note(status="finished")
    return result


def _read(config: OwnConfig) -> Annotations:
    place, own = find_data(config.data.path), config.data
    data = read_split(place, own.split, classes=own.classes, images=own.images)
    if len(data) < 2 or not data.targets().any():
        raise RamatchError(f"{own.path}: {len(data)} image(s) with labels; there must be at least 2")
    return data


def _as_many(data: Annotations, dim: int) -> tuple[Annotations, list[str]]:
    """As many images as memory holds what is kept of, and a note if these are not all."""
    most = max(2, MEMORY // (2 * VIEWS * len(data.classes) * dim))
    if len(data) <= most:
        return data, []
    chosen = sorted(stable_order([r.key for r in data.records])[:most])
    note = f"{most:,} of {len(data):,} images were used: so much data is worth a training of adapters (a recipe)"
    return data.subset(chosen), [note]


def teach(
    recognizer: Recognizer,
    data: Annotations,
    *,
    folds: int = 5,
    images: ImageCache | None = None,
    progress: bool = False,
) -> Taught:
    """What a calibrated model learns of labelled images."""
    ram, calibrator, targets = recognizer.ram, recognizer.calibrator, data.targets()
    if calibrator is None:
        raise RamatchError(f"{recognizer.name} is not calibrated, so it cannot be taught: run ramatch calibrate first")
    images = images or ImageCache(0)
    pixels = images.stack(data.records, ram.preprocess, progress=progress)
    sight = look(ram, calibrator, pixels, data.classes, progress=progress)
    order, earlier = stable_order([r.key for r in data.records]), ram.learned
    parts = [sorted(order[i::folds]) for i in range(min(folds, len(order)))]
    found = choose(sight, targets, parts)
    truth = targets.numpy()
    before = calibrator(sight.features.numpy(), sight.words)
    after = np.zeros_like(before)
    try:
        for part, unit in zip(parts, found.directions, strict=True):
            ram.learned = _joined(earlier, data.classes, unit, np.delete(truth, part, axis=0))
            held = collect_scores(ram, data.subset(part), images=images, progress=False)
            after[part] = calibrator(held.features, held.words)
    finally:
        ram.learned = earlier
    learned = _joined(earlier, data.classes, learn(sight, targets, range(len(data)), found.prior), truth)
    return Taught(learned, found.prior, before, after, truth, parts)


def _run(
    config: OwnConfig, recognizer: Recognizer, data: Annotations, notes: list[str], folder: RunFolder, progress: bool
) -> OwnResult:
    images = ImageCache(config.data.workers)
    if recognizer.calibrator is None or recognizer.calibrator.own:
        raw = collect_scores(recognizer.ram, data, images=images, progress=progress)
        recognizer.calibrator = Calibrator.fit(raw.features, raw.targets, names=FEATURES)
        notes.append(f"{recognizer.name} was not calibrated: it now is, by these {len(data):,} images")
    taught = teach(recognizer, data, folds=config.folds, images=images, progress=progress)
    changes = taught.changes() if len(data) >= FEW and taught.prior is not None else {}
    better, kept, verdict = _verdict(taught, changes)
    if unseen := [data.classes[i] for i in np.flatnonzero(np.logical_not(taught.targets.any(0)))]:
        listed = ", ".join(unseen[:5]) + (" …" if len(unseen) > 5 else "")
        notes.append(f"{len(unseen)} label(s) that no image shows are as they were: {listed}")
    with files.whole_folder(_emptied(folder.model)) as target:
        save_model(recognizer, config.model.backbone, target)
        files.write_json(target / "calibration.json", recognizer.calibrator.to_dict())
        if kept and taught.learned is not None:
            taught.learned.save(target / LEARNED)
        write_hashes(target)
    return OwnResult(folder.path, len(data), len(data.classes), changes, better, kept, (verdict, *notes))


def _joined(earlier: Learned | None, names: Sequence[str], unit: Tensor, targets: np.ndarray) -> Learned | None:
    """What images with these targets taught of the labels that they show, and what the model had learned before of
    others."""
    shown = np.flatnonzero(targets.any(0)).tolist()
    taught = {names[i].lower(): unit[i] for i in shown}
    if earlier is not None:
        taught = {n.lower(): u for n, u in zip(earlier.names, earlier.unit, strict=True)} | taught
    return Learned(tuple(taught), torch.stack([*taught.values()])) if taught else None


def _verdict(taught: Taught, changes: dict[str, Change]) -> tuple[bool, bool, str]:
    """Whether it is better, whether to keep what was learned, and that in words."""
    images, about = f"{len(taught.targets):,} images", "on images that were kept aside"
    if taught.prior is None:
        return False, False, f"{images} do not show how to do better: the model is as it was; label more, 100 do well"
    if not changes:
        return False, True, f"{images} are too few to tell whether it is better than it was: label {FEW}, or better 100"
    found = changes["mAP"]
    if found.low > 0:
        return True, True, f"better {about}: the whole interval of mAP is above 0"
    if found.high < 0:
        return False, False, f"worse {about}: nothing was learned, the model is as it was"
    told = "probabilities are better, but whether it ranks better cannot be told: the interval of mAP holds 0"
    return False, True, f"{images}: {told}; label more"


def _emptied(path: Path) -> Path:
    """Of what an earlier start left."""
    shutil.rmtree(path, ignore_errors=True)
    return path
