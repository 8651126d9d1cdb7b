"""Parts of a page. Each knows the height it needs for a width, and draws itself with its top left corner at (x, y)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ramatch.errors import RamatchError
from ramatch.viz import _sheet as s
from ramatch.viz._sheet import Sheet, elide
from ramatch.viz.overlay import HEAT, overlay

if TYPE_CHECKING:
    from ramatch.prediction import Prediction

GAP = 0.16
_CAPTION = 0.40


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


def ranking(prediction: Prediction) -> np.ndarray:
    """Columns of all labels, best first; ties in the order of the vocabulary."""
    return np.argsort(-np.asarray(prediction.scores), kind="stable")


def full_heat(weights: np.ndarray) -> float:
    """The weight drawn as full heat: the largest, but at least four times the uniform weight.

    Without that floor the map of a label that is nowhere, which is flat, would glow all over.
    """
    return max(float(weights.max()), 4.0 * float(weights.sum()) / weights.size, 1e-12)


@dataclass
class Photo:
    """An image with a caption under it."""

    image: Image.Image
    caption: str
    note: str = ""

    def height(self, width: float) -> float:
        return width * self.image.height / self.image.width + _CAPTION

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        high = self.height(width) - _CAPTION
        sheet.photo(x, y, width, high, self.image)
        sheet.text(x, y + high + 0.15, elide(self.caption, width, 9, bold=True), 9, fontweight="bold")
        if self.note:
            sheet.text(x + width, y + high + 0.15, self.note, 8, color=s.MUTED, ha="right")


@dataclass
class LabelPanel:
    """One label's weights over the image; its name, its probability and a bar of it underneath.

    With `fade` improbable labels glow less: weights always sum to one, also those of a label that is not there.
    """

    image: Image.Image
    weights: np.ndarray  # (rows, columns)
    label: str
    probability: float
    right: bool | None = None  # known truth: True present, False absent
    fade: bool = True

    def height(self, width: float) -> float:
        return width * self.image.height / self.image.width + _CAPTION

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        high = self.height(width) - _CAPTION
        level = 0.45 + 0.55 * min(1.0, 2 * self.probability) if self.fade else 1.0
        sheet.photo(x, y, width, high, overlay(self.image, self.weights, vmax=full_heat(self.weights) / level))
        number = f"{self.probability:.2f}"
        room = width - s.text_width(number, 9) - 0.1
        colour = s.INK if self.right is None else s.GREEN if self.right else s.RED
        sheet.text(x, y + high + 0.15, elide(self.label, room, 9, bold=True), 9, fontweight="bold", color=colour)
        sheet.text(x + width, y + high + 0.15, number, 9, ha="right", color=s.INK)
        bar(sheet, x, y + high + 0.27, width, self.probability, s.BLUE if self.right is None else colour)


@dataclass
class Grid:
    """Blocks of one width in rows."""

    blocks: Sequence[Photo | LabelPanel]
    columns: int

    def _cell(self, width: float) -> tuple[float, float]:
        wide = (width - GAP * (self.columns - 1)) / self.columns
        return wide, max(block.height(wide) for block in self.blocks)

    def height(self, width: float) -> float:
        rows = -(-len(self.blocks) // self.columns)
        return rows * self._cell(width)[1] + (rows - 1) * 0.08

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        wide, high = self._cell(width)
        for i, block in enumerate(self.blocks):
            row, column = divmod(i, self.columns)
            block.draw(sheet, x + column * (wide + GAP), y + row * (high + 0.08), wide)


@dataclass
class Ranking:
    """The best labels as bars. With a truth, right and wrong ones in green and red."""

    prediction: Prediction
    top: int
    truth: frozenset[str] | None = None

    def height(self, width: float) -> float:
        return 0.3 * min(self.top, len(self.prediction.labels))

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        name, number = 0.42 * width, 0.45
        for row, i in enumerate(ranking(self.prediction)[: self.top]):
            label, p = self.prediction.labels[i], float(self.prediction.probabilities[i])
            colour = s.BLUE if self.truth is None else s.GREEN if label in self.truth else s.RED
            middle = y + 0.3 * row + 0.15
            sheet.text(x + name - 0.1, middle, elide(label, name - 0.15, 9.5), 9.5, ha="right")
            bar(sheet, x + name, middle - 0.07, width - name - number, p, colour, 0.14)
            sheet.text(x + width, middle, f"{p:.2f}", 9.5, ha="right")


@dataclass
class HeatKey:
    """The colour scale of an overlay, in multiples of the uniform weight."""

    full: float

    def height(self, width: float) -> float:
        return 0.3

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        axes = sheet.axes(x, y, width, 0.09)
        axes.imshow(np.arange(256)[None], aspect="auto", cmap=s.colormap(HEAT))
        sheet.text(x, y + 0.19, "0", 7.5, color=s.MUTED)
        sheet.text(x + width, y + 0.19, f"{self.full:.3g}× uniform", 7.5, color=s.MUTED, ha="right")


def bar(sheet: Sheet, x: float, y: float, width: float, share: float, colour: str, height: float = 0.045) -> None:
    """A horizontal bar filled to `share` of its width."""
    sheet.rectangle(x, y, width, height, facecolor="#eceff4", edgecolor="none")
    sheet.rectangle(x, y, width * float(np.clip(share, 0, 1)), height, facecolor=colour, edgecolor="none")
