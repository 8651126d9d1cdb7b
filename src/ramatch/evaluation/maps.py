"""How well region maps point at objects: the pointing game and IoU on data with boxes (COCO instances, VOC)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from ..data import read_annotations
from ..data.annotations import Box, Record
from ..data.splits import find_data
from ..errors import RamatchError
from ..recognizer import Recognizer
from .localization import Localisation, Truth


def localise(
    model: str | Path,
    data: str | Path,
    *,
    split: str | None = None,
    images_root: str | None = None,
    label_features: str | None = None,
    backbone: str | None = None,
    device: str | None = None,
    matcher: str | None = None,
    kind: str = "similarity",
    batch_size: int = 32,
    progress: bool = False,
) -> Localisation:
    """Maps of the labels present in each image against their boxes; crowds, boxes without an area (COCO has some) and
    images without any other box are left out. `kind` of map as in `Prediction.heatmap`; only plans depend on the matcher."""
    annotations = read_annotations(find_data(data), split=split, images_root=images_root)
    chosen = [r for r in annotations.records if _boxes(r)]
    if not chosen:
        raise RamatchError(f"{data}: no image has boxes; localisation needs COCO instances or VOC annotations")
    recognizer = Recognizer.from_pretrained(
        model, device=device, label_features=label_features, backbone=backbone, cache=0
    )
    recognizer.set_vocabulary(annotations.classes)
    total = Localisation()
    for start in range(0, len(chosen), batch_size):
        records = chosen[start : start + batch_size]
        images = [r.load() for r in records]
        for record, image, prediction in zip(
            records, images, recognizer.predict(images, maps=True, matcher=matcher), strict=True
        ):
            size = record.size or image.size
            labels = list(dict.fromkeys(b.label for b in _boxes(record)))
            truths = [
                Truth(size, boxes=np.array([b.corners for b in _boxes(record) if b.label == label])) for label in labels
            ]
            total.add(labels, np.stack([prediction.heatmap(label, kind=kind) for label in labels]), truths)
        if progress:
            print(f"\r{min(start + batch_size, len(chosen))}/{len(chosen)} images", end="", file=sys.stderr)
    if progress:
        print(file=sys.stderr)
    return total


def _boxes(record: Record) -> list[Box]:
    return [b for b in record.boxes if not b.crowd and b.corners[0] < b.corners[2] and b.corners[1] < b.corners[3]]
