"""Transport plans as matrices: labels down, regions across, the labels that count in red boxes; one plan with its
probabilities, or those of several matchers side by side with their top labels in green and red cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ..config import MATCHERS
from ..errors import RamatchError
from ..prediction import Prediction, Tag
from . import _sheet as s
from ._sheet import Block, Sheet, elide, full_heat, glowing, positions, ranking, require_plan, verdict
from .overlay import INK as INK_RAMP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GAP, NAMES, _TITLE, _CELL = 0.22, 1.6, 0.32, 0.30  # inches, side by side
_NAMED = 40  # up to so many labels each has a row with its name
_SHOWN = 24  # of more labels so many do, and the rest lies below in thin rows


@dataclass(frozen=True)
class Layout:
    """What plans that are drawn side by side share: which labels get a named row, which a thin one, and which are
    marked (columns of the plan, top to bottom), in which color; the weight, in multiples of the uniform one, drawn
    darkest; whether there is room for a marginal below."""

    named: list[int]
    thin: list[int]
    marked: frozenset[int]
    vmax: float
    strip: bool
    color: str  # of what is marked: that of true labels on the rest of the page, or of labels of which nothing is known

    @property
    def row_height(self) -> float:
        return 0.30 if len(self.named) <= 8 else 0.21

    @property
    def thin_top(self) -> float:
        return len(self.named) * self.row_height + 0.1

    @property
    def thin_height(self) -> float:
        return float(np.clip(len(self.thin) * 0.011, 0.5, 2.6))

    @property
    def strip_top(self) -> float:
        return (self.thin_top + self.thin_height if self.thin else self.thin_top - 0.1) + 0.08


def layout(predictions: Sequence[Prediction], truth: Sequence[str] | None, top: int, *, by_score: bool) -> Layout:
    """Marked are the truth, or else the first prediction's `top` labels; they always get a named row.

    Rows run in the order of the scores, or of the vocabulary, which several predictions share. All but the top 0.3 % of
    the weights are lighter than the darkest color.
    """
    first = predictions[0]
    if not first.labels:
        raise RamatchError("no label to draw: the vocabulary is empty")
    orders = [ranking(p) for p in predictions]
    marked = positions(first, truth, "true label") if truth is not None else orders[0][:top]
    # Best rank under any prediction, so that what one matcher gets wrong is on the picture of all.
    rank = np.min([np.argsort(order) for order in orders], axis=0)
    by_rank = np.argsort(rank, kind="stable").tolist()
    room = max(_SHOWN - len(set(marked)), 3) if len(first.labels) > _NAMED else len(first.labels)
    chosen = {*marked, *[i for i in by_rank if i not in marked][:room]}
    order = orders[0] if by_score else list(range(len(first.labels)))
    named, thin = ([i for i in order if (i in chosen) == has_name] for has_name in (True, False))
    plans = [plan for plan in map(require_plan, predictions) if plan.size]
    vmax = max(*(float(np.quantile(plan, 0.997)) * len(plan) for plan in plans), 2.0)
    color = verdict("", None if truth is None else ("",), s.BLUE)
    return Layout(named, thin, frozenset(marked), vmax, any(p.marginal is not None for p in predictions), color)


@dataclass
class Matrix:
    """One prediction's plan, with names, probabilities and a color scale around it unless it is `bare`."""

    prediction: Prediction
    rows: Layout
    bare: bool = False

    _STRIP, _NAMES, _BARS = 0.16, 1.75, 1.15

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> float:
        plan, rows, marginal = require_plan(self.prediction), self.rows, self.prediction.marginal
        weights = plan.T * plan.shape[0]  # (N, M), 1 is uniform
        left, wide, top = x, width, y
        if not self.bare:
            left, wide, y = x + self._NAMES, width - self._NAMES - self._BARS, y + 0.3
            self._draw_key(sheet, left, top, wide)
            self.draw_names(sheet, x, y, self._NAMES)
            self._draw_bars(sheet, y, left + wide)
        axes = self._image(sheet, left, y, wide, len(rows.named) * rows.row_height, weights[rows.named])
        for row, i in enumerate(rows.named):
            if i in rows.marked:
                style: dict[str, Any] = {"fill": False, "edgecolor": rows.color, "linewidth": 1.6, "clip_on": False}
                axes.add_patch(sheet.patch((-0.5, row - 0.5), len(plan), 1, gid=f"marked-{i}", **style))
        if rows.thin:
            axes = self._image(sheet, left, y + rows.thin_top, wide, rows.thin_height, weights[rows.thin])
            axes.images[0].set_interpolation("antialiased")
        if marginal is not None:
            scaled = marginal[None] * rows.vmax / full_heat(marginal)  # on a scale of its own
            self._image(sheet, left, y + rows.strip_top, wide, self._STRIP, scaled)
        y += rows.strip_top + (self._STRIP if rows.strip else -0.08)
        self._draw_axis(sheet, left, y, wide)
        return y + 0.42 - top

    def _image(self, sheet: Sheet, x: float, y: float, width: float, height: float, weights: np.ndarray) -> Axes:
        axes = sheet.axes(x, y, width, height, frame=True)
        axes.imshow(
            weights, aspect="auto", cmap=s.colormap(INK_RAMP), vmin=0, vmax=self.rows.vmax, interpolation="nearest"
        )
        rows, columns = self.prediction.grid
        for row in range(1, rows):
            axes.axvline(row * columns - 0.5, color=s.RULE, linewidth=0.5)
        return axes

    def draw_names(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        """The labels beside their rows, marked ones in their color; a comparison draws them once for all its plans."""
        right, step = x + width - 0.1, self.rows.row_height
        size = 9.0 if step >= 0.25 else 8.0
        for row, i in enumerate(self.rows.named):
            marked = i in self.rows.marked
            style = {"color": self.rows.color, "fontweight": "bold"} if marked else {"color": s.INK}
            name = elide(self.prediction.labels[i], width - 0.15, size, bold=marked)
            sheet.text(right, y + (row + 0.5) * step, name, size, ha="right", **style)
        below: dict[str, Any] = {"size": 8.5, "ha": "right", "color": s.MUTED}
        if self.rows.thin:
            middle = y + self.rows.thin_top + self.rows.thin_height / 2
            sheet.text(right, middle, f"{len(self.rows.thin):,} more labels", **below)
        if self.rows.strip:
            sheet.text(right, y + self.rows.strip_top + self._STRIP / 2, "region marginal ũ", **below)

    def _draw_bars(self, sheet: Sheet, y: float, x: float) -> None:
        step, full = self.rows.row_height, self._BARS - 0.5
        for row, i in enumerate(self.rows.named):
            p, marked = float(self.prediction.values[i]), i in self.rows.marked
            top = y + (row + 0.2) * step
            sheet.rectangle(
                x + 0.1, top, full * float(np.clip(p, 0, 1)), 0.6 * step, self.rows.color if marked else s.GREY
            )
            style = {"ha": "right", "color": s.INK if marked else s.MUTED}
            sheet.text(x + self._BARS, top + 0.3 * step, f"{p:.2f}", 8.0 if step >= 0.25 else 7.5, **style)

    def _draw_key(self, sheet: Sheet, left: float, y: float, wide: float) -> None:
        number = f"{self.rows.vmax:.2g}× uniform"
        right = left + wide - s.text_width(number, 8) - 0.12
        bar = sheet.axes(right - 1.0, y + 0.05, 1.0, 0.1, frame=True)
        bar.imshow(np.arange(256)[None], aspect="auto", cmap=s.colormap(INK_RAMP))
        sheet.text(right - 1.06, y + 0.1, "weight 0", 8, ha="right", color=s.MUTED)
        sheet.text(left + wide, y + 0.1, number, 8, ha="right", color=s.MUTED)
        kind = "probability" if self.prediction.calibrated else "relative"
        sheet.text(left + wide + 0.1, y + 0.1, kind, 8, color=s.MUTED)

    def _draw_axis(self, sheet: Sheet, left: float, y: float, wide: float) -> None:
        rows, columns = self.prediction.grid
        step = -(-rows * 22 // max(int(wide * 72), 1))  # at least 22 points from one number to the next
        for row in range(0, rows, max(step, 1)):
            sheet.text(left + wide * (row + 0.5) / rows, y + 0.1, str(row + 1), 7.5, ha="center", color=s.MUTED)
        text = f"regions, by row of the {rows} × {columns} grid"
        sheet.text(left + wide / 2, y + 0.29, text, 8.5, ha="center", color=s.MUTED)


def comparison(
    predictions: Mapping[str, Prediction], image: Image.Image, truth: Sequence[str] | None, top: int = 3
) -> Block:
    """`predictions` by the matcher's name, all of one image and one vocabulary, side by side."""
    found = list(predictions.values())
    if not found:
        raise RamatchError("no prediction to compare: give one for each matcher")
    for name, prediction in predictions.items():
        if prediction.labels != found[0].labels or prediction.grid != found[0].grid:
            raise RamatchError(f"matcher '{name}' was run with other labels or another grid than the first one")
    rows = layout(found, truth, top, by_score=False)
    matrices = {name: Matrix(p, rows, bare=True) for name, p in predictions.items()}
    heats = [require_plan(p)[:, sorted(rows.marked)].mean(1).reshape(p.grid) for p in found]
    pictures = [glowing(image, heat) for heat in heats]

    def draw(sheet: Sheet, x: float, y: float, width: float) -> float:
        left, below = x + NAMES, 0.0
        wide = (width - NAMES - _GAP * (len(found) - 1)) / len(found)
        high = 0.46 * wide * image.height / image.width
        shrink = min(1.0, 2.4 / high)
        photo = 0.46 * wide * shrink, high * shrink  # under its plan
        matrices[next(iter(matrices))].draw_names(sheet, x, y + _TITLE, NAMES)
        for (name, matrix), picture in zip(matrices.items(), pictures, strict=True):
            title = MATCHERS.get(name, name)
            sheet.text(left + wide / 2, y + 0.13, title, 11.5, ha="center", fontweight="bold")
            below = y + _TITLE + matrix.draw(sheet, left, y + _TITLE, wide) + 0.12
            sheet.photo(left, below, *photo, picture)
            _draw_table(sheet, matrix.prediction.top(top), truth, left + photo[0] + 0.12, below, wide - photo[0] - 0.12)
            left += wide + _GAP
        note = "where the marked\nlabels' weights lie,\nand the best labels"
        sheet.text(x + NAMES - 0.1, below + 0.42, note, 8.5, ha="right", color=s.MUTED)
        return below - y + max(photo[1], 0.25 + top * _CELL)

    return draw


def _draw_table(
    sheet: Sheet, best: Sequence[Tag], truth: Sequence[str] | None, x: float, y: float, width: float
) -> None:
    sheet.text(x, y + 0.09, f"top {len(best)}", 8.5, color=s.MUTED)
    y += 0.25
    for tag in best:
        sheet.rectangle(x, y, width, _CELL - 0.04, verdict(tag.label, truth, s.PLAIN_CELL, s.GREEN_CELL, s.RED_CELL))
        number, middle = f"{tag.value:.2f}", y + (_CELL - 0.04) / 2
        room = width - s.text_width(number, 8.5) - 0.22
        sheet.text(x + 0.07, middle, elide(tag.label, room, 8.5), 8.5)
        sheet.text(x + width - 0.07, middle, number, 8.5, ha="right")
        y += _CELL
