"""Do the maps point at the thing? Pointing game, mass inside, IoU, against boxes.

A map (h, w) covers the whole image evenly, whatever the two sizes are: cell (r, c) is centred at pixel
((c + 0.5) W / w, (r + 0.5) H / h) of an image of size (W, H). Of several boxes of a label any counts, and their union
is its region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from ..data.annotations import Record
from ..data.records import read_annotations
from ..data.splits import find_data
from ..errors import RamatchError
from ..progress import Progress
from ._tables import format_table
from .metrics import Array, as_array


@dataclass(frozen=True)
class Truth:
    """Where one label is in one image of `size` (W, H): `boxes` (k, 4) as x0, y0, x1, y1 in pixels."""

    size: tuple[int, int]
    boxes: np.ndarray

    def __post_init__(self) -> None:
        boxes = np.asarray(self.boxes, dtype=np.float64).reshape(-1, 4)
        if not len(boxes) or not np.isfinite(boxes).all() or (boxes[:, :2] >= boxes[:, 2:]).any():
            raise RamatchError(f"boxes must be x0 < x1, y0 < y1 in pixels, got {boxes.tolist()}")
        object.__setattr__(self, "boxes", boxes)

    def region(self) -> np.ndarray:
        """(H, W) bool: pixels whose centre lies in a box."""
        x, y = (np.arange(length) + 0.5 for length in self.size)
        x0, y0, x1, y1 = self.boxes.T[..., None]
        inside = ((y >= y0) & (y < y1))[:, :, None] & ((x >= x0) & (x < x1))[:, None, :]
        return inside.any(0)

    def distance(self, points: np.ndarray) -> np.ndarray:
        """Distance in pixels of points (k, 2) as x, y to the nearest box; 0 inside."""
        nearest = np.clip(points[:, None], self.boxes[:, :2], self.boxes[:, 2:])  # (k, boxes, 2)
        return np.linalg.norm(points[:, None] - nearest, axis=-1).min(1)


def pointing_game(heat: Array, truth: Truth, *, tolerance: float = 15.0) -> float:
    """1 if the map's maximum falls on the label or within `tolerance` pixels of it (the usual 15), else 0.

    A maximum shared by several cells scores the share of them that hit, so a flat map gets what chance would.
    """
    cells = _map(heat)
    rows, columns = np.nonzero(cells == cells.max())
    scale = np.array([truth.size[0] / cells.shape[1], truth.size[1] / cells.shape[0]])
    points = (np.stack([columns, rows], axis=1) + 0.5) * scale
    return float((truth.distance(points) <= tolerance).mean())


def mass_inside(heat: Array, truth: Truth) -> float:
    """Share of the map's mass on the label, no threshold needed: for a plan's column, what went to the right place."""
    cells, region = np.clip(_map(heat), 0, None), truth.region().astype(np.float64)
    rows, columns = (_overlap(*sizes) for sizes in zip(region.shape, cells.shape, strict=True))
    weight, total = rows @ region @ columns.T, cells.sum()  # the share of each cell's area that the truth covers
    return float((cells * weight).sum() / total) if total > 0 else float(weight.mean())


def map_iou(heat: Array, truth: Truth, *, threshold: float = 0.5) -> float:
    """IoU with the truth of the region where the map, resized bilinearly, reaches `threshold` of its maximum."""
    cells = np.clip(_map(heat), 0, None)
    if cells.max() <= 0:
        return 0.0
    small = torch.from_numpy(np.ascontiguousarray(cells))[None, None]
    full = interpolate(small, size=truth.size[::-1], mode="bilinear", align_corners=False)[0, 0].numpy()
    found, there = full >= threshold * full.max(), truth.region()
    return float((found & there).sum() / max((found | there).sum(), 1))


@dataclass
class Localization:
    """Adds up pairs of image and label: `add` each, then `result` in percent, per class and overall.

    `chance` is the share of the image that the truth covers, which a map that knows nothing gets as mass inside; a
    map that always points at the centre gets `centre` in the pointing game. A score means something above these.
    """

    tolerance: float = 15.0
    threshold: float = 0.5
    _pairs: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)  # numbers by KEYS, for each label

    KEYS = ("pointing", "mass", "IoU", "centre", "chance")

    def add(self, label: str, heat: Array, truth: Truth) -> None:
        """The map (h, w) of a label that is present in an image."""
        numbers = (
            pointing_game(heat, truth, tolerance=self.tolerance),
            mass_inside(heat, truth),
            map_iou(heat, truth, threshold=self.threshold),
            pointing_game(np.ones((1, 1)), truth, tolerance=self.tolerance),
            float(truth.region().mean()),
        )
        self._pairs.setdefault(label, []).append(numbers)

    def result(self) -> dict[str, Any]:
        """{"pointing", ... : mean over pairs, "class_pointing", ...: mean over classes, "per_class", "pairs"}."""
        labels, pairs = sorted(self._pairs), [numbers for found in self._pairs.values() for numbers in found]
        return {
            **self._means(pairs),
            **self._means([np.mean(self._pairs[label], axis=0) for label in labels], "class_"),
            "pairs": len(pairs),
            "per_class": {k: {**self._means(self._pairs[k]), "pairs": len(self._pairs[k])} for k in labels},
        }

    def _means(self, rows: Sequence[Any], prefix: str = "") -> dict[str, float]:
        means = np.mean(rows, axis=0) if rows else np.zeros(len(self.KEYS))
        return {prefix + key: float(100 * value) for key, value in zip(self.KEYS, means, strict=True)}

    def to_table(self, *, markdown: bool = False) -> str:
        """Two lines of numbers: over all pairs, and the mean over classes."""
        result = self.result()
        rows = [
            [name, *(f"{result[prefix + key]:.1f}" for key in self.KEYS)]
            for name, prefix in (("pairs", ""), ("classes", "class_"))
        ]
        return format_table(["", *self.KEYS], rows, markdown=markdown)


def localize(
    model: str | Path,
    data: str | Path,
    *,
    matcher: str | None = None,
    kind: str = "similarity",
    batch_size: int = 32,
    progress: bool = False,
    **options: Any,
) -> Localization:
    """Maps of the labels present in each image against their boxes (COCO instances, VOC); crowds, boxes without an area
    (COCO has some) and images without any other box are left out. `kind` of map as in `Prediction.heatmap`; only plans
    depend on the matcher. Options: those of `read_annotations` and of `Recognizer.from_pretrained`, by name."""
    from .models import Recognizer, split_options  # here, because the recognizer needs this package's calibration

    own = {"method": options.pop("method", None), "runtime": options.pop("runtime", "torch")}  # the recognizer's
    reading, loading = split_options(options, (read_annotations, Recognizer.from_pretrained))
    annotations = read_annotations(find_data(data), **reading)
    chosen = [(record, boxes) for record in annotations.records if (boxes := _boxes_by_label(record))]
    if not chosen:
        raise RamatchError(f"{data}: no image has boxes; localization needs COCO instances or VOC annotations")
    recognizer = Recognizer.from_pretrained(model, cache=0, **own, **loading)
    recognizer.set_vocabulary(annotations.classes)
    total, line = Localization(), Progress(len(chosen), "localizing", enabled=progress)
    for start in range(0, len(chosen), batch_size):
        batch = chosen[start : start + batch_size]
        images = [record.load() for record, _ in batch]
        predictions = recognizer.predict(images, maps=True, masks=kind == "fine", matcher=matcher, strict=True)
        for (record, boxes), image, prediction in zip(batch, images, predictions, strict=True):
            for label, corners in boxes.items():
                truth = Truth(record.size or image.size, boxes=np.array(corners))
                total.add(label, prediction.heatmap(label, kind=kind), truth)
        line.update(start + len(batch), force=start + len(batch) == len(chosen))
    line.clear()
    return total


def _boxes_by_label(record: Record) -> dict[str, list[tuple[float, ...]]]:
    found: dict[str, list[tuple[float, ...]]] = {}
    for box in record.boxes:
        x0, y0, x1, y1 = box.corners
        if not box.crowd and x0 < x1 and y0 < y1:
            found.setdefault(box.label, []).append(box.corners)
    return found


def _map(heat: Array) -> np.ndarray:
    cells = as_array(heat).astype(np.float64)
    if cells.ndim != 2 or cells.size == 0 or not np.isfinite(cells).all():
        raise RamatchError(f"a map must be (h, w) with finite numbers, got {cells.shape}")
    return cells


def _overlap(pixels: int, cells: int) -> np.ndarray:
    """(cells, pixels): the share of each cell, along one axis, that each pixel takes."""
    edges = np.arange(cells + 1) * pixels / cells
    left = np.arange(pixels)
    shared = np.minimum(edges[1:, None], left + 1) - np.maximum(edges[:-1, None], left)
    return np.clip(shared, 0, None) * cells / pixels
