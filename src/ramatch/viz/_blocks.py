"""Parts of a page. Each knows the height it needs for a width, and draws itself with its top left corner at (x, y)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from PIL import Image

from ramatch.errors import RamatchError
from ramatch.viz import _sheet as s
from ramatch.viz._sheet import Sheet, elide
from ramatch.viz.overlay import overlay

if TYPE_CHECKING:
    from ramatch.prediction import Prediction

GAP = 0.16
_CAPTION = 0.40


class Block(Protocol):
    def height(self, width: float) -> float: ...
    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None: ...


def require_plan(prediction: Prediction) -> np.ndarray:
    """The plan (M, N), or what to do to get one."""
    if prediction.plan is None:
        raise RamatchError("this prediction has no transport plan to draw; predict with maps=True or plan=True")
    return np.asarray(prediction.plan, dtype=np.float64)


def positions(prediction: Prediction, labels: Collection[str], what: str = "label") -> list[int]:
    """Columns of the labels, or an error that names the first that is not in the vocabulary."""
    index = {name: i for i, name in enumerate(prediction.labels)}
    for name in labels:
        if name not in index:
            raise RamatchError(f"the {what} '{name}' is not in the vocabulary of this prediction")
    return [index[name] for name in labels]


def ranking(prediction: Prediction) -> list[int]:
    """Columns of all labels, best first; ties in the order of the vocabulary."""
    return np.argsort(-np.asarray(prediction.scores), kind="stable").tolist()


def glowing(image: Image.Image, heat: np.ndarray, level: float = 1.0) -> Image.Image:
    """The image with weights (rows, columns) over it; `level` below 1 lets them glow less."""
    return overlay(image, heat, vmax=full_heat(heat) / level)


def full_heat(weights: np.ndarray) -> float:
    """The weight drawn as full heat: the largest, but at least four times the uniform weight.

    Without that floor the map of a label that is nowhere, which is flat, would glow all over.
    """
    return max(float(weights.max()), 4.0 * float(weights.sum()) / weights.size, 1e-12)


@dataclass
class Photo:
    """An image with a caption and a note under it, and with a `share` a bar of it."""

    image: Image.Image
    caption: str
    note: str = ""
    color: str = s.INK
    share: float | None = None

    def height(self, width: float) -> float:
        return width * self.image.height / self.image.width + _CAPTION

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        below = y + self.height(width) - _CAPTION
        sheet.photo(x, y, width, below - y, self.image)
        room = width - s.text_width(self.note, 9) - 0.1
        caption = elide(self.caption, room, 9, bold=True)
        sheet.text(x, below + 0.15, caption, 9, fontweight="bold", color=self.color)
        if self.note:
            sheet.text(x + width, below + 0.15, self.note, 9, ha="right", color=s.MUTED)
        if self.share is not None:
            bar(sheet, x, below + 0.27, width, self.share, s.BLUE if self.color == s.INK else self.color)


def label_photo(prediction: Prediction, image: Image.Image, label: int, truth: Collection[str] | None) -> Photo:
    """One label's weights over the image; its name, its probability (or relative score) and a bar of it underneath.

    Calibrated, improbable labels glow less: weights always sum to one, also those of a label that is not there. An
    uncalibrated number says little about presence, so the heat does not follow it.
    """
    name, probability = prediction.labels[label], float(prediction.values[label])
    heat = require_plan(prediction)[:, label].reshape(prediction.grid)
    picture = glowing(image, heat, 0.45 + 0.55 * min(1.0, 2 * probability) if prediction.calibrated else 1.0)
    return Photo(picture, name, f"{probability:.2f}", verdict(name, truth, s.INK), probability)


def marginal_photo(prediction: Prediction, image: Image.Image) -> Photo:
    """The region marginal ũ over the image: where label presence detection sees anything at all."""
    if prediction.marginal is None:
        raise RamatchError("this prediction has no region marginal to draw; predict with maps=True or plan=True")
    heat = np.asarray(prediction.marginal, dtype=np.float64).reshape(prediction.grid)
    return Photo(glowing(image, heat), "region marginal ũ")


@dataclass
class Grid:
    """Photos of one width in rows."""

    photos: Sequence[Photo]
    columns: int

    def _cell(self, width: float) -> tuple[float, float]:
        wide = (width - GAP * (self.columns - 1)) / self.columns
        return wide, max(photo.height(wide) for photo in self.photos)

    def height(self, width: float) -> float:
        rows = -(-len(self.photos) // self.columns)
        return rows * self._cell(width)[1] + (rows - 1) * 0.08

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        wide, high = self._cell(width)
        for i, photo in enumerate(self.photos):
            row, column = divmod(i, self.columns)
            photo.draw(sheet, x + column * (wide + GAP), y + row * (high + 0.08), wide)


@dataclass
class Ranking:
    """The best labels as bars. With a truth, right and wrong ones in green and red."""

    prediction: Prediction
    top: int
    truth: Collection[str] | None = None

    def height(self, width: float) -> float:
        return 0.3 * min(self.top, len(self.prediction.labels))

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        name, number = 0.42 * width, 0.45
        for row, tag in enumerate(self.prediction.top(self.top)):
            middle = y + 0.3 * row + 0.15
            sheet.text(x + name - 0.1, middle, elide(tag.label, name - 0.15, 9.5), 9.5, ha="right")
            color = verdict(tag.label, self.truth, s.BLUE)
            bar(sheet, x + name, middle - 0.07, width - name - number, tag.value, color, 0.14)
            sheet.text(x + width, middle, f"{tag.value:.2f}", 9.5, ha="right")


def verdict(label: str, truth: Collection[str] | None, unknown: str, right: str = s.GREEN, wrong: str = s.RED) -> str:
    """The color of a label: whether it is among the true ones, if these are known."""
    return unknown if truth is None else right if label in truth else wrong


def bar(sheet: Sheet, x: float, y: float, width: float, share: float, color: str, height: float = 0.045) -> None:
    """A horizontal bar filled to `share` of its width."""
    sheet.rectangle(x, y, width, height, s.PLAIN_CELL)
    sheet.rectangle(x, y, width * float(np.clip(share, 0, 1)), height, color)
