"""Parts of a page: functions that draw with their top left corner at (x, y), so wide, and say how high it became."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from PIL import Image

from ..errors import RamatchError
from ..prediction import Prediction
from . import _sheet as s
from ._sheet import Sheet, elide
from .overlay import overlay

GAP = 0.16


Block = Callable[[Sheet, float, float, float], float]


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


def photo(image: Image.Image, caption: str, note: str = "", color: str = s.INK, share: float | None = None) -> Block:
    """An image with a caption and a note under it, and with a `share` a bar of it."""

    def draw(sheet: Sheet, x: float, y: float, width: float) -> float:
        high = width * image.height / image.width
        sheet.photo(x, y, width, high, image)
        below, room = y + high, width - s.text_width(note, 9) - 0.1
        sheet.text(x, below + 0.15, elide(caption, room, 9, bold=True), 9, fontweight="bold", color=color)
        if note:
            sheet.text(x + width, below + 0.15, note, 9, ha="right", color=s.MUTED)
        if share is not None:
            bar(sheet, x, below + 0.27, width, share, s.BLUE if color == s.INK else color)
        return high + 0.40

    return draw


def label_photo(prediction: Prediction, image: Image.Image, label: int, truth: Collection[str] | None) -> Block:
    """One label's weights over the image; its name, its probability (or relative score) and a bar of it underneath.

    Calibrated, improbable labels glow less: weights always sum to one, also those of a label that is not there. An
    uncalibrated number says little about presence, so the heat does not follow it.
    """
    name, probability = prediction.labels[label], float(prediction.values[label])
    heat = require_plan(prediction)[:, label].reshape(prediction.grid)
    picture = glowing(image, heat, 0.45 + 0.55 * min(1.0, 2 * probability) if prediction.calibrated else 1.0)
    return photo(picture, name, f"{probability:.2f}", verdict(name, truth, s.INK), probability)


def marginal_photo(prediction: Prediction, image: Image.Image) -> Block:
    """The region marginal ũ over the image: where label presence detection sees anything at all."""
    if prediction.marginal is None:
        raise RamatchError("this prediction has no region marginal to draw; predict with maps=True or plan=True")
    heat = np.asarray(prediction.marginal, dtype=np.float64).reshape(prediction.grid)
    return photo(glowing(image, heat), "region marginal ũ")


def grid(photos: Sequence[Block], columns: int) -> Block:
    """Photos of one width in rows."""

    def draw(sheet: Sheet, x: float, y: float, width: float) -> float:
        wide, high = (width - GAP * (columns - 1)) / columns, -0.08
        for start in range(0, len(photos), columns):
            top, row = y + high + 0.08, enumerate(photos[start : start + columns])
            high = top - y + max(draw_photo(sheet, x + i * (wide + GAP), top, wide) for i, draw_photo in row)
        return high

    return draw


def ranked(prediction: Prediction, top: int, truth: Collection[str] | None) -> Block:
    """The best labels as bars. With a truth, right and wrong ones in green and red."""

    def draw(sheet: Sheet, x: float, y: float, width: float) -> float:
        name, number, tags = 0.42 * width, 0.45, prediction.top(top)
        for row, tag in enumerate(tags):
            middle = y + 0.3 * row + 0.15
            sheet.text(x + name - 0.1, middle, elide(tag.label, name - 0.15, 9.5), 9.5, ha="right")
            color = verdict(tag.label, truth, s.BLUE)
            bar(sheet, x + name, middle - 0.07, width - name - number, tag.value, color, 0.14)
            sheet.text(x + width, middle, f"{tag.value:.2f}", 9.5, ha="right")
        return 0.3 * len(tags)

    return draw


def verdict(label: str, truth: Collection[str] | None, unknown: str, right: str = s.GREEN, wrong: str = s.RED) -> str:
    """The color of a label: whether it is among the true ones, if these are known."""
    return unknown if truth is None else right if label in truth else wrong


def bar(sheet: Sheet, x: float, y: float, width: float, share: float, color: str, height: float = 0.045) -> None:
    """A horizontal bar filled to `share` of its width."""
    sheet.rectangle(x, y, width, height, s.PLAIN_CELL)
    sheet.rectangle(x, y, width * float(np.clip(share, 0, 1)), height, color)
