"""A sheet of paper measured in inches from its top left corner, on a matplotlib figure without pyplot, and the blocks
that pages are put together from: functions that draw at (x, y), so wide, and say how high it became."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ..errors import RamatchError, require
from ..prediction import Prediction
from .overlay import overlay

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#1b2030", "#6a7182", "#d9dde5", "#ffffff"
RED, GREEN, BLUE, GREY = "#d62839", "#1a8f55", "#2f5fb3", "#aab1bf"
RED_CELL, GREEN_CELL, PLAIN_CELL = "#f9d3d4", "#cdeedb", "#eceff4"
GAP = 0.16  # between photographs
# DejaVu comes with matplotlib; the others only if installed, for labels it has no letters for.
_FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Microsoft YaHei", "Arial Unicode MS")


class Sheet:
    """Wraps a Figure of `width` x `height` inches. Everything is placed by hand, so nothing can shift or overlap."""

    def __init__(self, width: float, height: float) -> None:
        figure_class = require("matplotlib.figure", extra="explain").Figure
        manager = require("matplotlib.font_manager", extra="explain").fontManager
        installed = {font.name for font in manager.ttflist}
        self.fonts = [name for name in _FONTS if name in installed]
        self.patch: Any = require("matplotlib.patches", extra="explain").Rectangle
        self.width, self.height = width, height
        self.figure: Figure = figure_class(figsize=(width, height), facecolor=PAPER, dpi=160)

    def axes(self, x: float, y: float, width: float, height: float, *, frame: bool = False) -> Axes:
        """Axes with their top left corner at (x, y), without ticks."""
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, xticks=[], yticks=[])
        axes.spines[:].set(visible=frame, color=RULE, linewidth=0.8)
        return axes

    def text(self, x: float, y: float, text: str, size: float = 9, **style: Any) -> None:
        """Text whose line has its middle at height y; `ha` left by default. Dollar signs are just that."""
        style = {"ha": "left", "va": "center", "color": INK, "fontfamily": self.fonts, "parse_math": False, **style}
        self.figure.text(x / self.width, 1 - y / self.height, text, fontsize=size, **style)

    def rectangle(self, x: float, y: float, width: float, height: float, color: str) -> None:
        corner = (x / self.width, 1 - (y + height) / self.height)
        size, style = (width / self.width, height / self.height), {"facecolor": color, "edgecolor": "none"}
        self.figure.add_artist(self.patch(corner, *size, transform=self.figure.transFigure, **style))

    def photo(self, x: float, y: float, width: float, height: float, image: Image.Image) -> None:
        self.axes(x, y, width, height).imshow(np.asarray(image), aspect="auto", interpolation="lanczos")


def colormap(table: np.ndarray) -> ListedColormap:
    """A (256, 3) uint8 ramp as a matplotlib colour map."""
    return require("matplotlib.colors", extra="explain").ListedColormap(table / 255.0)


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """About how many inches wide a text is, rather too many than too few."""
    ems = sum(
        1.05 if unicodedata.east_asian_width(c) in "WF" else 0.38 if c in "iljtfr.,:;'|! I" else 0.66 for c in text
    )
    return ems * size / 72 * (1.12 if bold else 1.0)


def elide(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """The text, cut with an ellipsis if it is wider than `width` inches."""
    if text_width(text, size, bold=bold) <= width:
        return text
    while text and text_width(text + "m", size, bold=bold) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def save(figure: Figure, path: str | Path, *, dpi: int = 160) -> Path:
    """Write a figure as PNG, SVG or PDF, by the suffix; its folder is made if need be."""
    path = Path(path)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise RamatchError(f"cannot write a picture as '{path.name}': use .png, .svg or .pdf")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path


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


def photo(image: Image.Image, caption: str, note: str = "", color: str = INK, share: float | None = None) -> Block:
    """An image with a caption and a note under it, and with a `share` a bar of it."""

    def draw(sheet: Sheet, x: float, y: float, width: float) -> float:
        high = width * image.height / image.width
        sheet.photo(x, y, width, high, image)
        below, room = y + high, width - text_width(note, 9) - 0.1
        sheet.text(x, below + 0.15, elide(caption, room, 9, bold=True), 9, fontweight="bold", color=color)
        if note:
            sheet.text(x + width, below + 0.15, note, 9, ha="right", color=MUTED)
        if share is not None:
            bar(sheet, x, below + 0.27, width, share, BLUE if color == INK else color)
        return high + 0.40

    return draw


def label_photo(
    prediction: Prediction, image: Image.Image, label: int, truth: Collection[str] | None, kind: str = "plan"
) -> Block:
    """One label's weights (or its map of another kind) over the image; its name, its probability (or relative score)
    and a bar of it underneath.

    Calibrated, improbable labels glow less: weights always sum to one, also those of a label that is not there. An
    uncalibrated number says little about presence, so the heat does not follow it.
    """
    name, probability = prediction.labels[label], float(prediction.values[label])
    if kind == "plan":
        heat = require_plan(prediction)[:, label].reshape(prediction.grid)
    else:
        heat = prediction.heatmap(name, kind=kind)
    picture = glowing(image, heat, 0.45 + 0.55 * min(1.0, 2 * probability) if prediction.calibrated else 1.0)
    return photo(picture, name, f"{probability:.2f}", verdict(name, truth, INK), probability)


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
            color = verdict(tag.label, truth, BLUE)
            bar(sheet, x + name, middle - 0.07, width - name - number, tag.value, color, 0.14)
            sheet.text(x + width, middle, f"{tag.value:.2f}", 9.5, ha="right")
        return 0.3 * len(tags)

    return draw


def verdict(label: str, truth: Collection[str] | None, unknown: str, right: str = GREEN, wrong: str = RED) -> str:
    """The color of a label: whether it is among the true ones, if these are known."""
    return unknown if truth is None else right if label in truth else wrong


def bar(sheet: Sheet, x: float, y: float, width: float, share: float, color: str, height: float = 0.045) -> None:
    """A horizontal bar filled to `share` of its width."""
    sheet.rectangle(x, y, width, height, PLAIN_CELL)
    sheet.rectangle(x, y, width * float(np.clip(share, 0, 1)), height, color)
