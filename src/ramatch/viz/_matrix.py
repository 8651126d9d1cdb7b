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
from ..prediction import Prediction
from . import _sheet as s
from ._blocks import full_heat, glowing, positions, ranking, require_plan, verdict
from ._sheet import Sheet, elide
from .overlay import INK as INK_RAMP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GAP, _NAMES, _TITLE, _CELL = 0.22, 1.6, 0.32, 0.30  # inches, side by side
_NAMED = 40  # up to so many labels each has a row with its name
_SHOWN = 24  # of more labels so many do, and the rest lies below in thin rows


@dataclass(frozen=True)
class Rows:
    """Which labels get a named row, which a thin one, and which are marked; columns of the plan, top to bottom."""

    named: tuple[int, ...]
    thin: tuple[int, ...]
    marked: frozenset[int]

    @property
    def row_height(self) -> float:
        return 0.30 if len(self.named) <= 8 else 0.21

    @property
    def named_height(self) -> float:
        return len(self.named) * self.row_height

    @property
    def thin_height(self) -> float:
        return float(np.clip(len(self.thin) * 0.011, 0.5, 2.6)) if self.thin else 0.0


def choose_rows(predictions: Sequence[Prediction], truth: Sequence[str] | None, top: int, *, by_score: bool) -> Rows:
    """Marked are the truth, or else the first prediction's `top` labels; they always get a named row.

    Rows run in the order of the scores, or of the vocabulary, which several predictions share.
    """
    first = predictions[0]
    if not first.labels:
        raise RamatchError("no label to draw: the vocabulary is empty")
    orders = [ranking(p) for p in predictions]
    marked = positions(first, truth, "true label") if truth is not None else orders[0][:top]
    # Best rank under any prediction, so that what one matcher gets wrong is on the picture of all.
    rank = np.min([np.argsort(order) for order in orders], axis=0)
    by_rank = np.argsort(rank, kind="stable").tolist()
    if len(first.labels) <= _NAMED:
        chosen = set(by_rank)
    else:
        chosen = set(marked)
        chosen |= set([i for i in by_rank if i not in chosen][: max(_SHOWN - len(chosen), 3)])
    order = orders[0] if by_score else list(range(len(first.labels)))
    return Rows(
        named=tuple(i for i in order if i in chosen),
        thin=tuple(i for i in order if i not in chosen),
        marked=frozenset(marked),
    )


def plan_scale(predictions: Sequence[Prediction]) -> float:
    """The weight, in multiples of the uniform one, drawn darkest: all but the top 0.3 % lie below."""
    plans = [plan for plan in map(require_plan, predictions) if plan.size]
    return max(*(float(np.quantile(plan, 0.997)) * len(plan) for plan in plans), 2.0)


@dataclass
class Matrix:
    """One prediction's plan, with names, probabilities and a color scale around it unless it is `bare`."""

    prediction: Prediction
    rows: Rows
    vmax: float
    strip: bool  # keep room for the marginal below, drawn if the prediction has one
    bare: bool = False

    _STRIP, _NAMES, _BARS = 0.16, 1.75, 1.15

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> float:
        plan = require_plan(self.prediction)
        weights = plan.T * plan.shape[0]  # (N, M), 1 is uniform
        left, wide, top = x, width, y
        if not self.bare:
            left, wide = x + self._NAMES, width - self._NAMES - self._BARS
            self._draw_key(sheet, left, y, wide)
            y += 0.3
            self.draw_names(sheet, x, y, self._NAMES)
            self._draw_bars(sheet, y, left + wide)
        axes = self._image(sheet, left, y, wide, self.rows.named_height, weights[list(self.rows.named)])
        self._boxes(sheet.patch, axes)
        y += self.rows.named_height
        if self.rows.thin:
            y += 0.1
            axes = self._image(sheet, left, y, wide, self.rows.thin_height, weights[list(self.rows.thin)])
            axes.images[0].set_interpolation("antialiased")
            y += self.rows.thin_height
        if self.strip:
            y += 0.08
            if self.prediction.marginal is not None:
                marginal = np.asarray(self.prediction.marginal, dtype=np.float64)
                scaled = marginal[None] * self.vmax / full_heat(marginal)  # on a scale of its own
                self._image(sheet, left, y, wide, self._STRIP, scaled)
            y += self._STRIP
        self._draw_axis(sheet, left, y, wide)
        return y + 0.42 - top

    def _image(self, sheet: Sheet, x: float, y: float, width: float, height: float, weights: np.ndarray) -> Axes:
        axes = sheet.axes(x, y, width, height, frame=True)
        axes.imshow(weights, aspect="auto", cmap=s.colormap(INK_RAMP), vmin=0, vmax=self.vmax, interpolation="nearest")
        rows, columns = self.prediction.grid
        for row in range(1, rows):
            axes.axvline(row * columns - 0.5, color=s.RULE, linewidth=0.5)
        return axes

    def draw_names(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        """The labels beside their rows, the marked ones in red; a comparison draws them once for all its plans."""
        right, step = x + width - 0.1, self.rows.row_height
        size = 9.0 if step >= 0.25 else 8.0
        for row, i in enumerate(self.rows.named):
            marked = i in self.rows.marked
            style = {"color": s.RED, "fontweight": "bold"} if marked else {"color": s.INK}
            name = elide(self.prediction.labels[i], width - 0.15, size, bold=marked)
            sheet.text(right, y + (row + 0.5) * step, name, size, ha="right", **style)
        y += self.rows.named_height
        if self.rows.thin:
            middle = y + 0.1 + self.rows.thin_height / 2
            sheet.text(right, middle, f"{len(self.rows.thin):,} more labels", 8.5, ha="right", color=s.MUTED)
            y += 0.1 + self.rows.thin_height
        if self.strip:
            sheet.text(right, y + 0.08 + self._STRIP / 2, "region marginal ũ", 8.5, ha="right", color=s.MUTED)

    def _draw_bars(self, sheet: Sheet, y: float, x: float) -> None:
        step, full = self.rows.row_height, self._BARS - 0.5
        for row, i in enumerate(self.rows.named):
            p, marked = float(self.prediction.values[i]), i in self.rows.marked
            top = y + (row + 0.2) * step
            sheet.rectangle(x + 0.1, top, full * float(np.clip(p, 0, 1)), 0.6 * step, s.RED if marked else s.GREY)
            style = {"ha": "right", "color": s.INK if marked else s.MUTED}
            sheet.text(x + self._BARS, top + 0.3 * step, f"{p:.2f}", 8.0 if step >= 0.25 else 7.5, **style)

    def _boxes(self, patch: Any, axes: Axes) -> None:
        regions = self.prediction.grid[0] * self.prediction.grid[1]
        for row, i in enumerate(self.rows.named):
            if i in self.rows.marked:
                box = patch((-0.5, row - 0.5), regions, 1, fill=False, edgecolor=s.RED, linewidth=1.6, clip_on=False)
                box.set_gid(f"marked-{i}")
                axes.add_patch(box)

    def _draw_key(self, sheet: Sheet, left: float, y: float, wide: float) -> None:
        number = f"{self.vmax:.2g}× uniform"
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


@dataclass
class Comparison:
    """`predictions` by the matcher's name, all of one image and one vocabulary."""

    predictions: Mapping[str, Prediction]
    image: Image.Image
    truth: Sequence[str] | None
    top: int = 3

    def __post_init__(self) -> None:
        found = list(self.predictions.values())
        if not found:
            raise RamatchError("no prediction to compare: give one for each matcher")
        for name, prediction in self.predictions.items():
            require_plan(prediction)
            if prediction.labels != found[0].labels or prediction.grid != found[0].grid:
                raise RamatchError(f"matcher '{name}' was run with other labels or another grid than the first one")
        rows, vmax = choose_rows(found, self.truth, self.top, by_score=False), plan_scale(found)
        strip = any(p.marginal is not None for p in found)
        self._matrices = [Matrix(p, rows, vmax, strip, bare=True) for p in found]
        heats = [require_plan(p)[:, sorted(rows.marked)].mean(1).reshape(p.grid) for p in found]
        self._pictures = [glowing(self.image, heat) for heat in heats]
        self.natural_width = 0.6 + _NAMES + len(found) * 3.3

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> float:
        count, left, below = len(self.predictions), x + _NAMES, 0.0
        wide = (width - _NAMES - _GAP * (count - 1)) / count
        high = 0.46 * wide * self.image.height / self.image.width
        shrink = min(1.0, 2.4 / high)
        photo = 0.46 * wide * shrink, high * shrink  # under its plan
        self._matrices[0].draw_names(sheet, x, y + _TITLE, _NAMES)
        for name, matrix, picture in zip(self.predictions, self._matrices, self._pictures, strict=True):
            title = MATCHERS.get(name, name)
            sheet.text(left + wide / 2, y + 0.13, title, 11.5, ha="center", fontweight="bold")
            below = y + _TITLE + matrix.draw(sheet, left, y + _TITLE, wide) + 0.12
            sheet.photo(left, below, *photo, picture)
            self._draw_table(sheet, matrix.prediction, left + photo[0] + 0.12, below, wide - photo[0] - 0.12)
            left += wide + _GAP
        note = "where the marked\nlabels' weights lie,\nand the best labels"
        sheet.text(x + _NAMES - 0.1, below + 0.42, note, 8.5, ha="right", color=s.MUTED)
        return below - y + max(photo[1], 0.25 + self.top * _CELL)

    def _draw_table(self, sheet: Sheet, prediction: Prediction, x: float, y: float, width: float) -> None:
        best = prediction.top(self.top)
        sheet.text(x, y + 0.09, f"top {len(best)}", 8.5, color=s.MUTED)
        y += 0.25
        for tag in best:
            cell = verdict(tag.label, self.truth, s.PLAIN_CELL, s.GREEN_CELL, s.RED_CELL)
            sheet.rectangle(x, y, width, _CELL - 0.04, cell)
            number, middle = f"{tag.value:.2f}", y + (_CELL - 0.04) / 2
            room = width - s.text_width(number, 8.5) - 0.22
            sheet.text(x + 0.07, middle, elide(tag.label, room, 8.5), 8.5)
            sheet.text(x + width - 0.07, middle, number, 8.5, ha="right")
            y += _CELL
