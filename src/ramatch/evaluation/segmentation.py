"""Do the masks cover the thing? Mean IoU over classes, with and without background, against masks of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import PARTS
from ..data.masks import read_masks
from ..data.splits import hold_out
from ..errors import RamatchError
from ..masks import FineScores
from ..prediction import Prediction
from ..progress import Progress
from ._tables import format_table

WAYS = {
    "labels given": "the labels that are there, background ignored",
    "all labels": "all labels of the data, background ignored",
    "background": "all labels of the data, and none of them",
}


@dataclass
class Confusion:
    """Pixels by what they are (rows) and what they were called (columns): none of the classes first, then each."""

    classes: tuple[str, ...]
    counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros((len(self.classes) + 1,) * 2, dtype=np.int64)

    def add(self, found: np.ndarray, truth: np.ndarray) -> None:
        """ids (H, W) of one picture: 0 for none, 1 + the class's place; of the truth, −1 is left out."""
        if found.shape != truth.shape:
            raise RamatchError(f"masks of {found.shape} pixels against a truth of {truth.shape}")
        known, size = truth >= 0, len(self.counts)
        self.counts += np.bincount(truth[known] * size + found[known], minlength=size**2).reshape(size, size)

    def iou(self) -> dict[str, float]:
        """In percent, of what occurs in the truth."""
        right = np.diag(self.counts)
        either = self.counts.sum(0) + self.counts.sum(1) - right
        there = np.flatnonzero(self.counts.sum(1))
        names = ("background", *self.classes)
        return {names[i]: float(100 * right[i] / either[i]) for i in there}

    @property
    def mean_iou(self) -> float:
        found = self.iou()
        return sum(found.values()) / max(len(found), 1)


@dataclass(frozen=True)
class SegmentationReport:
    """A confusion for each of WAYS, and of how many images."""

    ways: dict[str, Confusion]
    images: int

    def to_dict(self) -> dict[str, Any]:
        found = {name: {"mIoU": c.mean_iou, "per_class": c.iou()} for name, c in self.ways.items()}
        return {"images": self.images, **found}

    def to_table(self) -> str:
        rows = [[name, f"{c.mean_iou:.1f}", WAYS[name]] for name, c in self.ways.items()]
        return format_table(["", "mIoU", "of"], rows)


def segment(
    model: str | Path,
    data: str | Path,
    *,
    part: str = "all",
    kind: str = "fine",
    batch_size: int = 16,
    progress: bool = False,
    **options: Any,
) -> SegmentationReport:
    """Masks of a model against those of the data (see `read_masks`), of all images or one of their halves (PARTS),
    which are told apart by their names. `kind`: "fine" for masks as users get them; "similarity" or "plan" for the best
    of the plain maps at each pixel, background where it is below the middle between its largest value and its mean.
    Options: those of `Recognizer.from_pretrained`."""
    from .models import Recognizer  # here, because the recognizer needs this package's calibration

    images = read_masks(data)
    records, classes = images.annotations.records, images.annotations.classes
    chosen = set(hold_out([record.key for record in records], 0.5))
    if part not in PARTS:
        raise RamatchError(f"unknown part '{part}' of the images; known: {', '.join(PARTS)}")
    records = [r for i, r in enumerate(records) if part == "all" or (i in chosen) == (part == "val")]
    recognizer = Recognizer.from_pretrained(model, cache=0, **({"runtime": "torch"} | options))
    recognizer.set_vocabulary(classes)
    ways = {name: Confusion(classes) for name in WAYS}
    line = Progress(len(records), "segmenting", enabled=progress)
    for start in range(0, len(records), batch_size):
        batch = records[start : start + batch_size]
        pictures, fine = [record.load() for record in batch], kind == "fine"
        predictions = recognizer.predict(pictures, maps=not fine, masks=fine, strict=True)
        for record, prediction in zip(batch, predictions, strict=True):
            truth = images.truth(record)
            _add(ways, prediction if fine else plain(prediction, kind), record.labels, truth)
        line.update(start + len(batch), force=start + len(batch) == len(records))
    line.clear()
    return SegmentationReport(ways, len(records))


def plain(prediction: Prediction, kind: str) -> Prediction:
    """With masks of its plain maps, whatever its probabilities say."""
    values = {"similarity": prediction.similarities, "plan": prediction.plan}.get(kind)
    if values is None:
        raise RamatchError(f"masks are made of maps of kind similarity, plan or fine, not '{kind}'")
    fine = FineScores(values.reshape(*prediction.grid, -1))
    return replace(prediction, fine=fine, values=np.ones_like(prediction.values))


def _add(ways: dict[str, Confusion], prediction: Prediction, labels: Sequence[str], truth: np.ndarray) -> None:
    size, things = (truth.shape[1], truth.shape[0]), np.where(truth > 0, truth, -1)
    masks = {
        "labels given": (prediction.masks(labels=labels, background=False, size=size), things),
        "all labels": (prediction.masks(background=False, size=size), things),
        "background": (prediction.masks(size=size), truth),
    }
    for name, (found, expected) in masks.items():
        places = np.array([0, *(1 + prediction.labels.index(label) for label in found)])
        ways[name].add(places[found.ids], expected)
