"""Scores of a model on a labelled set, and their evaluation under ZSL and GZSL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import TEST_SETTINGS, RAMConfig
from ..data.annotations import Annotations
from ..data.benchmarks import read_protocol
from ..data.records import read_annotations, read_classes
from ..errors import RamatchError
from ..evaluation.protocol import Report, evaluate_scores
from ..modeling.fuse import fuse
from ..modeling.graph import GraphedRAM
from ..modeling.ram import RAM, Output
from ..recognizer import PATIENCE, Recognizer
from .assemble import DTYPES, find_data
from .batches import ImageCache, image_loader, unguarded
from .distributed import pick_device
from .log import Progress

FEATURES = ("image", "region", "best")  # s_G, s_R, cosine of the best region: what calibration looks at
FLUSH = 1 << 26  # numbers kept on the device before they move to the CPU (256 MiB)
RANKINGS = {
    "model": "the model's own score, or its probability where it is calibrated",
    "image": "class token: s_G alone",
    "region": "matched regions: s_R alone",
    "best": "max over regions",
}


@dataclass(frozen=True)
class Scores:
    """Scores (n, N), features (n, N, 3) in the order of FEATURES, targets (n, N) bool, and whose they are."""

    labels: tuple[str, ...]
    keys: tuple[str, ...]
    scores: np.ndarray
    features: np.ndarray
    targets: np.ndarray

    def ranking(self, name: str = "model") -> np.ndarray:
        """Scores (n, N) by one of RANKINGS."""
        if name not in RANKINGS:
            raise RamatchError(f"unknown score '{name}'; known: {', '.join(RANKINGS)}")
        return self.scores if name == "model" else self.features[..., FEATURES.index(name)]

    def report(
        self, ranking: str = "model", *, protocol: str = "gzsl", seen: Sequence[str] | None = None,
        unseen: Sequence[str] | None = None, ks: Sequence[int] = (3, 5), threshold: float | None = None,
    ) -> Report:  # fmt: skip
        return evaluate_scores(
            self.ranking(ranking), self.targets, self.labels, seen, unseen, ks, protocol=protocol, threshold=threshold,  # type: ignore[arg-type]
        )  # fmt: skip


@torch.no_grad()
def collect_scores(
    ram: RAM,
    data: Annotations,
    labels: Sequence[str] | None = None,
    *,
    batch_size: int = 64,
    workers: int = 4,
    images: ImageCache | None = None,
    progress: bool = True,
    what: str = "evaluating",
    fast: bool | None = None,
) -> Scores:
    """Run the model over a set of images with a vocabulary (by default the set's own classes).

    Labels are encoded once. `images`: a cache of decoded pictures, for sets that are looked at again and again. `fast`: score with
    a fused copy of the weights (see `fuse`); by default on a GPU.
    """
    names = tuple(labels) if labels is not None else data.classes
    data = data if names == data.classes else data.restrict(names)
    training, device = ram.training, ram.backbone.device
    kept, pending, done = [], [], 0  # numbers on the CPU; those still on the device, moved in large pieces
    line = Progress(len(data), what, enabled=progress)
    line.start()
    ram.eval()
    try:
        with torch.autocast(device.type, dtype=ram.backbone.dtype, enabled=ram.backbone.dtype != torch.float32):
            encoded = ram.encode_labels(names)
            model = fuse(ram) if fast or (fast is None and device.type == "cuda") else ram
            engine = GraphedRAM(model, encoded, batch_size=batch_size, best=True, patience=PATIENCE)
            for pixels in _pixels(ram, data, batch_size, workers, images, progress):
                pending.append(_numbers(engine(pixels)))
                done += len(pixels)
                if sum(map(torch.numel, pending)) > FLUSH:
                    kept.append(torch.cat(pending).cpu())
                    pending.clear()
                line.update(done)
    finally:
        ram.train(training)
        line.clear()
    kept += [p.cpu() for p in pending]
    found = torch.cat(kept).numpy() if kept else np.zeros((0, len(names), 4), np.float32)
    keys = tuple(r.key for r in data.records)
    return Scores(names, keys, found[..., 0], found[..., 1:], data.targets().numpy())


def _numbers(output: Output) -> Tensor:
    """(B, N, 4): the model's score, s_G, s_R, best region; left on the device, so that nothing waits for it."""
    assert output.scores is not None
    return torch.stack([output.scores, output.image, output.region, output.best], dim=-1).float()


def _pixels(ram: RAM, data: Annotations, batch_size: int, workers: int, images: ImageCache | None, progress: bool):  # type: ignore[no-untyped-def]
    if images is not None:
        yield from images.stack(data.records, ram.preprocess, progress=progress).split(batch_size)
        return
    pin = ram.backbone.device.type == "cuda"
    batches = image_loader(data, ram.preprocess.resize, batch_size=batch_size, workers=workers, pin=pin)
    for pixels, _ in unguarded(batches):
        yield pixels


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
    """A prepared benchmark folder (train.json, test_gzsl.json, ...), or any annotations with lists of seen and/or unseen
    labels (names, or a text file). ZSL ranks the unseen labels alone, on images that show at least one of them."""
    if protocol not in ("zsl", "gzsl"):
        raise RamatchError(f"protocol must be 'zsl' or 'gzsl', got '{protocol}'")
    path = find_data(data)
    names = [_names(x) for x in (classes, seen, unseen)]
    if split is None and names == [None] * 3 and path.is_dir() and (path / "test_gzsl.json").is_file():
        test = read_protocol(path, protocol, images_root=images_root)
        note = f"{path}: {test.protocol.split}"
        return TestSet(test.annotations, tuple(test.seen), tuple(test.unseen), protocol, note)
    annotations = read_annotations(path, split=split, classes=names[0], images_root=images_root)
    known, new = names[1], names[2]
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


def _names(value: Sequence[str] | str | None) -> list[str] | None:
    return None if value is None else read_classes(value) if isinstance(value, (str, os.PathLike)) else list(value)


def evaluate(
    model: str | Path | RAM,
    data: str | os.PathLike | TestSet,
    protocol: str = "gzsl",
    *,
    score: str = "model",
    **options: object,
) -> Report:
    """Evaluate a model (bundled name, model or run folder, or a plain CLIP, zero-shot) on test data.

    `score` is one of RANKINGS; "image" of a plain CLIP is the paper's zero-shot baseline. Options: those of `evaluate_all`.
    """
    return evaluate_all(model, data, protocol, scores=(score,), **options)[score]  # type: ignore[arg-type]


def evaluate_all(
    model: str | Path | RAM,
    data: str | os.PathLike | TestSet,
    protocol: str = "gzsl",
    *,
    scores: Sequence[str] = tuple(RANKINGS),
    split: str | None = None,
    images_root: str | None = None,
    classes: Sequence[str] | str | None = None,
    seen: Sequence[str] | str | None = None,
    unseen: Sequence[str] | str | None = None,
    matcher: str | None = None,
    settings: dict[str, Any] | None = None,
    label_features: str | Path | None = None,
    backbone: str | None = None,
    preset: str | RAMConfig = "ramatch",
    image_size: int | tuple[int, int] | None = None,
    device: str | None = None,
    precision: str | None = None,
    batch_size: int = 64,
    workers: int = 4,
    ks: Sequence[int] = (3, 5),
    threshold: float | None = None,
    images: ImageCache | None = None,
    progress: bool = True,
    fast: bool | None = None,
) -> dict[str, Report]:
    """Several ways of scoring (RANKINGS) from one pass over the images: name → report.

    "model" ranks by probability where the model is calibrated, by its own score otherwise. `settings`: fields of RAMConfig
    that only matter when a model is used (TEST_SETTINGS), to be changed for this test; it then ranks by its score in any case.
    `preset` and `image_size` are for a plain CLIP. `fast`: see `collect_scores`. `precision`: fp32, bf16 or fp16; by default bf16 on CUDA and fp32 on a CPU.
    """
    test = data if isinstance(data, TestSet) else read_test(
        data, protocol, split=split, images_root=images_root, classes=classes, seen=seen, unseen=unseen
    )  # fmt: skip
    calibrator = None
    if isinstance(model, RAM):
        ram = model
    else:
        loaded = load_model(
            model, label_features=label_features, backbone=backbone, preset=preset, image_size=image_size, device=device,
            precision=precision,
        )  # fmt: skip
        ram, calibrator = loaded.ram, loaded.calibrator
    if unknown := sorted(set(settings or ()) - set(TEST_SETTINGS)):
        raise RamatchError(f"{', '.join(unknown)}: a test can change {', '.join(TEST_SETTINGS)} only")
    changes = dict(settings or {})
    if changes:
        calibrator = None
    ram = ram.with_config(ram.config.replace(**changes | ({} if matcher is None else {"matcher": matcher})))
    found = collect_scores(ram, test.annotations, batch_size=batch_size, workers=workers, images=images,
                           progress=progress, what=f"{test.protocol}", fast=fast)  # fmt: skip
    if calibrator is not None:  # what users of the model see, and are shown first, is its probability
        found = replace(found, scores=np.asarray(calibrator(found.features, found.labels)))
    return {
        name: found.report(name, protocol=test.protocol, seen=test.seen, unseen=test.unseen, ks=ks, threshold=threshold)
        for name in scores
    }


def load_model(
    model: str | Path,
    *,
    device: str | None = None,
    precision: str | None = None,
    backbone: str | None = None,
    **options: object,
) -> Recognizer:
    """A recognizer from a bundled name, a model folder, a run folder (its model/), or a plain CLIP."""
    folder = Path(model).expanduser()
    if (folder / "model" / "ram.safetensors").is_file():
        folder = folder / "model"
    if precision is not None and precision not in DTYPES:
        raise RamatchError(f"precision must be one of {', '.join(DTYPES)}, got '{precision}'")
    dtype = DTYPES[precision] if precision else None
    where = str(folder) if folder.exists() else str(model)
    return Recognizer.from_pretrained(where, device=pick_device(device), dtype=dtype, backbone=backbone, **options)  # type: ignore[arg-type]
