"""Scores of a model on a labelled set, and their evaluation under ZSL and GZSL."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import TEST_SETTINGS, RAMConfig
from ..data.annotations import Annotations
from ..data.benchmarks import read_protocol
from ..data.decode import ImageCache, ImageDataset, ImageLoader
from ..data.records import read_annotations, read_classes
from ..data.splits import find_data
from ..errors import RamatchError
from ..modeling.checkpoints.folder import copy_model, model_folder
from ..modeling.fuse import fuse
from ..modeling.graph import GraphedRAM
from ..modeling.ram import RAM, Labels
from ..modeling.types import Runtime
from ..progress import Progress
from ..recognizer import PATIENCE, Recognizer
from .calibration import FEATURES, Evidence, Words
from .protocol import Report, evaluate_scores

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FLUSH = 1 << 26  # numbers kept on the device before they move to the CPU (256 MiB)
RANKINGS = {
    "model": "the model's own score, or its probability where it is calibrated",
    "image": "class token: s_G alone",
    "region": "matched regions: s_R alone",
    "best": "max over regions",
}


@dataclass(frozen=True)
class Scores:
    """Scores (n, N), features (n, N, 3) in the order of FEATURES, targets (n, N) bool, whose they are, and what the
    text says of the labels."""

    labels: tuple[str, ...]
    keys: tuple[str, ...]
    scores: np.ndarray
    features: np.ndarray
    targets: np.ndarray
    words: Words

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.features, self.targets, self.words)

    def ranking(self, name: str = "model") -> np.ndarray:
        """Scores (n, N) by one of RANKINGS."""
        if name not in RANKINGS:
            raise RamatchError(f"unknown score '{name}'; known: {', '.join(RANKINGS)}")
        return self.scores if name == "model" else self.features[..., FEATURES.index(name)]

    def report(self, ranking: str = "model", **options: Any) -> Report:
        """Options: those of `evaluate_scores`."""
        return evaluate_scores(self.ranking(ranking), self.targets, self.labels, **options)

    def rows(self, chosen: Sequence[int]) -> Scores:
        """Of some of the images."""
        rows = list(chosen)
        keys = tuple(self.keys[i] for i in rows)
        return Scores(self.labels, keys, self.scores[rows], self.features[rows], self.targets[rows], self.words)


class Scorer:
    """uint8 pixels (B, 3, H, W) → numbers (B, N, 4): the score, and FEATURES. `labels` are encoded once. They are left
    on the device, so that nothing waits for them. `fast`: with a fused copy of the weights (see `fuse`), by default on
    a GPU; or with another runtime."""

    def __init__(self, ram: RAM, classes: Sequence[str], batch_size: int, fast: bool | Runtime | None = None) -> None:
        self.device, self.dtype = ram.backbone.device, ram.backbone.dtype
        with torch.no_grad(), self._autocast():
            runtime = None if fast is None or isinstance(fast, bool) else fast
            model = fuse(ram) if fast is True or (fast is None and self.device.type == "cuda") else ram
            self.labels = ram.encode_labels(classes)
            self.engine = GraphedRAM(model, batch_size=batch_size, best=True, patience=PATIENCE, runtime=runtime)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        with self._autocast():
            output = self.engine(pixels, self.labels)
        assert output.scores is not None
        return torch.stack([output.scores, output.image, output.region, output.best], dim=-1).float()


@torch.no_grad()
def collect_scores(
    ram: RAM,
    data: Annotations,
    *,
    batch_size: int = 64,
    workers: int = 4,
    images: ImageCache | None = None,
    progress: bool = True,
    what: str = "evaluating",
    fast: bool | Runtime | None = None,
) -> Scores:
    """Run the model over a set of images with the set's own classes.

    `images`: a cache of decoded pictures, for sets that are looked at again and again. `fast`: see `Scorer`."""
    training, device = ram.training, ram.backbone.device
    kept, pending, done = [], [], 0  # (B, N, 4) on the CPU; those still on the device, moved in large pieces
    batches: Iterable[Tensor]
    if images is not None:
        batches = images.stack(data.records, ram.preprocess, progress=progress).split(batch_size)
    else:
        workers, pin = min(workers, -(-len(data) // batch_size)), device.type == "cuda"
        dataset = ImageDataset(data.records, ram.preprocess)
        loader = ImageLoader(dataset, workers=workers, batch_size=batch_size, pin_memory=pin)
        batches = (pixels for pixels, _ in loader)
    line = Progress(len(data), what, enabled=progress)
    ram.eval()
    try:
        scorer = Scorer(ram, data.classes, batch_size, fast)
        for pixels in batches:
            pending.append(scorer(pixels))
            done += len(pixels)
            if sum(map(torch.numel, pending)) > FLUSH:
                kept.append(torch.cat(pending).cpu())
                pending.clear()
            line.update(done)
    finally:
        ram.train(training)
        line.clear()
    found = torch.cat([torch.zeros(0, len(data.classes), 4), *kept, *(p.cpu() for p in pending)]).numpy()
    return scores_of(data, found, scorer.labels)


def scores_of(data: Annotations, found: np.ndarray, labels: Labels) -> Scores:
    """Of a set whose images have the numbers (n, N, 4) of a `Scorer`."""
    keys = tuple(r.key for r in data.records)
    said = Words.of(labels)
    words = said._replace(unit=said.unit.float().cpu())
    return Scores(data.classes, keys, found[..., 0], found[..., 1:], data.targets().numpy(), words)


@dataclass(frozen=True)
class TestSet:
    """Images and labels to test on, and which labels training knew."""

    __test__ = False  # not a pytest class

    annotations: Annotations
    seen: tuple[str, ...]
    unseen: tuple[str, ...]
    protocol: str
    note: str


def read_test(
    data: str | os.PathLike,
    protocol: str = "gzsl",
    *,
    split: str | None = None,
    images_root: str | None = None,
    classes: Sequence[str] | str | None = None,
    seen: Sequence[str] | str | None = None,
    unseen: Sequence[str] | str | None = None,
) -> TestSet:
    """A prepared benchmark folder (train.json, test_gzsl.json, ...), or any annotations with lists of seen and/or
    unseen labels (names, or a text file). ZSL ranks the unseen labels alone, on images that show at least one of
    them."""
    if protocol not in ("zsl", "gzsl"):
        raise RamatchError(f"protocol must be 'zsl' or 'gzsl', got '{protocol}'")
    path = find_data(data)
    known, new = (read_classes(x) if isinstance(x, (str, os.PathLike)) else x for x in (seen, unseen))
    if all(x is None for x in (split, classes, known, new)) and (path / "test_gzsl.json").is_file():
        test = read_protocol(path, protocol, images_root=images_root)
        note = f"{path}: test_{protocol}"
        return TestSet(test.annotations, tuple(test.seen), tuple(test.unseen), protocol, note)
    annotations = read_annotations(path, split=split, classes=classes, images_root=images_root)
    if known is None and new is not None:
        known = [c for c in annotations.classes if c not in set(new)]
    elif new is None and known is not None:
        new = [c for c in annotations.classes if c not in set(known)]
    if protocol == "zsl":
        if not new:
            raise RamatchError(f"{path}: protocol zsl needs to know the unseen labels; give them (or the seen ones)")
        annotations = annotations.restrict(new, drop_unlabelled=True)
        if not len(annotations):
            raise RamatchError(f"{path}: no image shows any of the {len(new)} unseen labels")
        known = []
    return TestSet(annotations, tuple(known or ()), tuple(new or ()), protocol, annotations.summary.headline())


def evaluate(
    model: str | Path | RAM,
    data: str | os.PathLike | TestSet,
    protocol: str = "gzsl",
    *,
    score: str = "model",
    **options: Any,
) -> Report:
    """Evaluate a model (bundled name, model or run folder, or a plain CLIP, zero-shot) on test data.

    `score` is one of RANKINGS; "image" of a plain CLIP is the paper's zero-shot baseline. Options: those of
    `evaluate_all`."""
    return evaluate_all(model, data, protocol, scores=(score,), **options)[score]


def evaluate_all(
    model: str | Path | RAM,
    data: str | os.PathLike | TestSet,
    protocol: str = "gzsl",
    *,
    scores: Sequence[str] = tuple(RANKINGS),
    matcher: str | None = None,
    settings: dict[str, Any] | None = None,
    collect: Callable[..., Scores] = collect_scores,
    **options: Any,
) -> dict[str, Report]:
    """Several ways of scoring (RANKINGS) from one pass over the images: name → report.

    "model" ranks by probability where the model is calibrated, by its own score otherwise. `settings`: fields of
    RAMConfig that only matter when a model is used (TEST_SETTINGS), to be changed for this test; it then ranks by its
    score in any case. `collect`: what runs the model over the images. Options: those of `read_test`, `load_model`,
    `collect` and `evaluate_scores`, by name, and `runtime`: what runs the image part on a CPU (RUNTIMES)."""
    if unknown := sorted(set(settings or ()) - set(TEST_SETTINGS)):
        raise RamatchError(f"{', '.join(unknown)}: a test can change {', '.join(TEST_SETTINGS)} only")
    runtime, takers = options.pop("runtime", "torch"), (read_test, load_model, collect, evaluate_scores)
    reading, loading, collecting, measuring = split_options(options, takers)
    test = data if isinstance(data, TestSet) else read_test(data, protocol, **reading)
    if isinstance(model, RAM):
        ram, calibrator = model, None
    else:
        recognizer = load_model(model, **loading)
        ram, calibrator = recognizer.ram, recognizer.calibrator
        recognizer.run_by(runtime)
        if recognizer.compiled is not None:
            collecting.setdefault("fast", recognizer.compiled)
    changes = dict(settings or {}) | ({} if matcher is None else {"matcher": matcher})
    if changes:
        ram = ram.with_config(ram.config.replace(**changes))
    found = collect(ram, test.annotations, what=test.protocol, **collecting)
    if calibrator is not None and not settings:  # what users of the model see, and are shown first, is its probability
        found = replace(found, scores=np.asarray(calibrator(found.features, found.words)))
    measuring |= {"protocol": test.protocol, "seen": test.seen, "unseen": test.unseen}
    return {name: found.report(name, **measuring) for name in scores}


def split_options(options: dict[str, Any], functions: Sequence[Callable]) -> list[dict[str, Any]]:
    """Each function's share of the options, by the names it takes."""
    out = []
    for function in functions:
        known = inspect.signature(function).parameters
        out.append({name: options.pop(name) for name in list(options) if name in known})
    if options:
        raise TypeError(f"unknown option(s) {', '.join(options)}")
    return out


def save_model(recognizer: Recognizer, model: str | Path, out: Path) -> None:
    """The model that was loaded by this name, as a folder of its own: copied to the bit where it is one."""
    if (folder := model_folder(model)) is not None:
        copy_model(folder, out)
        return
    place = Path(model).expanduser()
    if place.exists():  # the adapters record where their backbone is: it must be found from another folder too
        recognizer.ram.backbone.name = str(place.resolve())
    recognizer.save_pretrained(out)


def load_model(
    model: str | Path,
    *,
    label_features: str | Path | None = None,
    backbone: str | None = None,
    preset: str | RAMConfig = "ramatch",
    image_size: int | tuple[int, int] | None = None,
    method: str | None = None,
    device: str | None = None,
    precision: str | None = None,
) -> Recognizer:
    """A recognizer from a bundled name, a model folder, a run folder (its model/), or a plain CLIP, for which `preset`,
    `image_size` and `method` are. `precision`: fp32, bf16 or fp16; by default bf16 on CUDA and what the model says on a
    CPU. torch runs it, whatever else is installed: `Recognizer.run_by` changes that."""
    if precision is not None and precision not in DTYPES:
        raise RamatchError(f"precision must be one of {', '.join(DTYPES)}, got '{precision}'")
    options: dict[str, Any] = {"label_features": label_features, "backbone": backbone}
    options |= {
        "preset": preset,
        "image_size": image_size,
        "method": method,
        "dtype": DTYPES[precision] if precision else None,
    }
    return Recognizer.from_pretrained(model, device=device, runtime="torch", **options)
