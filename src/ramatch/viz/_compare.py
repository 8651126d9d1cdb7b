"""Matchers side by side: plan, where it looks, and the top labels in green and red cells."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ramatch.errors import RamatchError
from ramatch.viz import _sheet as s
from ramatch.viz._blocks import full_heat, ranking, require_plan
from ramatch.viz._matrix import Matrix, Rows, choose_rows, plan_scale
from ramatch.viz._sheet import Sheet, elide
from ramatch.viz.overlay import overlay

if TYPE_CHECKING:
    from ramatch.prediction import Prediction

_TITLES = {"kcot": "KCOT", "ot": "OT", "reweight": "Re-weighting", "average": "Average", "bipartite": "Bipartite"}
_GAP, _NAMES, _TITLE, _CELL = 0.22, 1.6, 0.32, 0.30


@dataclass
class Comparison:
    """`predictions` by the matcher's name, all of one image and one vocabulary."""

    predictions: dict[str, Prediction]
    image: Image.Image
    truth: tuple[str, ...] | None
    top: int = 3

    def __post_init__(self) -> None:
        if not self.predictions:
            raise RamatchError("no prediction to compare: give one for each matcher")
        first = next(iter(self.predictions.values()))
        for name, prediction in self.predictions.items():
            require_plan(prediction)
            if prediction.labels != first.labels or prediction.grid != first.grid:
                raise RamatchError(f"matcher '{name}' was run with other labels or another grid than the first one")

    @property
    def natural_width(self) -> float:
        return 0.6 + _NAMES + len(self.predictions) * 3.3

    @property
    def rows(self) -> Rows:
        return choose_rows(list(self.predictions.values()), self.truth, self.top, by_score=False)

    def _column(self, width: float) -> float:
        count = len(self.predictions)
        return (width - _NAMES - _GAP * (count - 1)) / count

    def _photo(self, width: float) -> tuple[float, float]:
        """Width and height of the overlays under the plans."""
        wide = 0.46 * self._column(width)
        high = wide * self.image.height / self.image.width
        shrink = min(1.0, 2.4 / high)
        return wide * shrink, high * shrink

    def _matrices(self) -> list[Matrix]:
        vmax, rows = plan_scale(list(self.predictions.values())), self.rows
        strip = any(p.marginal is not None for p in self.predictions.values())
        return [Matrix(p, rows, vmax, 0.0, 0.0, key=False, strip=strip) for p in self.predictions.values()]

    def _table_height(self) -> float:
        return 0.25 + self.top * _CELL

    def height(self, width: float) -> float:
        plans = max(matrix.height(self._column(width)) for matrix in self._matrices())
        return _TITLE + plans + 0.12 + max(self._photo(width)[1], self._table_height())

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        wide, matrices = self._column(width), self._matrices()
        plans = max(matrix.height(wide) for matrix in matrices)
        replace(matrices[0], names=_NAMES).draw_names(sheet, x, y + _TITLE)
        below = y + _TITLE + plans + 0.12
        note = "where the marked\nlabels' weights lie,\nand the best labels"
        sheet.text(x + _NAMES - 0.1, below + 0.42, note, 8.5, ha="right", color=s.MUTED)
        for i, ((name, prediction), matrix) in enumerate(zip(self.predictions.items(), matrices, strict=True)):
            left = x + _NAMES + i * (wide + _GAP)
            sheet.text(left + wide / 2, y + 0.13, _TITLES.get(name, name), 11.5, ha="center", fontweight="bold")
            matrix.draw(sheet, left, y + _TITLE, wide)
            photo_wide, photo_high = self._photo(width)
            heat = require_plan(prediction)[:, sorted(matrix.rows.marked)].mean(1).reshape(prediction.grid)
            sheet.photo(left, below, photo_wide, photo_high, overlay(self.image, heat, vmax=full_heat(heat)))
            self._draw_table(sheet, prediction, left + photo_wide + 0.12, below, wide - photo_wide - 0.12)

    def _draw_table(self, sheet: Sheet, prediction: Prediction, x: float, y: float, width: float) -> None:
        best = ranking(prediction)[: self.top]
        sheet.text(x, y + 0.09, f"top {len(best)}", 8.5, color=s.MUTED)
        for row, i in enumerate(np.asarray(best)):
            label, p = prediction.labels[i], float(prediction.probabilities[i])
            cell = s.PLAIN_CELL if self.truth is None else s.GREEN_CELL if label in self.truth else s.RED_CELL
            top = y + 0.25 + row * _CELL
            sheet.rectangle(x, top, width, _CELL - 0.04, facecolor=cell, edgecolor="none")
            number = f"{p:.2f}"
            room = width - s.text_width(number, 8.5) - 0.22
            middle = top + (_CELL - 0.04) / 2
            sheet.text(x + 0.07, middle, elide(label, room, 8.5), 8.5)
            sheet.text(x + width - 0.07, middle, number, 8.5, ha="right")
