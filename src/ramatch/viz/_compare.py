"""Matchers side by side: plan, where it looks, and the top labels in green and red cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from PIL import Image

from ramatch.config import MATCHERS
from ramatch.errors import RamatchError
from ramatch.viz import _sheet as s
from ramatch.viz._blocks import glowing, require_plan, verdict
from ramatch.viz._matrix import Matrix, choose_rows, plan_scale
from ramatch.viz._sheet import Sheet, elide

if TYPE_CHECKING:
    from ramatch.prediction import Prediction

_GAP, _NAMES, _TITLE, _CELL = 0.22, 1.6, 0.32, 0.30


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
        self._matrices = [Matrix(p, rows, vmax, names=0.0, bars=0.0, key=False, strip=strip) for p in found]
        self.natural_width = 0.6 + _NAMES + len(found) * 3.3

    def _column(self, width: float) -> float:
        count = len(self.predictions)
        return (width - _NAMES - _GAP * (count - 1)) / count

    def _photo(self, width: float) -> tuple[float, float]:
        """Width and height of the overlays under the plans."""
        wide = 0.46 * self._column(width)
        high = wide * self.image.height / self.image.width
        shrink = min(1.0, 2.4 / high)
        return wide * shrink, high * shrink

    def _plans(self, width: float) -> float:
        return _TITLE + self._matrices[0].height(self._column(width)) + 0.12

    def height(self, width: float) -> float:
        return self._plans(width) + max(self._photo(width)[1], 0.25 + self.top * _CELL)

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        wide, below, photo = self._column(width), y + self._plans(width), self._photo(width)
        replace(self._matrices[0], names=_NAMES).draw_names(sheet, x, y + _TITLE)
        note = "where the marked\nlabels' weights lie,\nand the best labels"
        sheet.text(x + _NAMES - 0.1, below + 0.42, note, 8.5, ha="right", color=s.MUTED)
        left = x + _NAMES
        for name, matrix in zip(self.predictions, self._matrices, strict=True):
            title = MATCHERS.get(name, name)
            sheet.text(left + wide / 2, y + 0.13, title, 11.5, ha="center", fontweight="bold")
            matrix.draw(sheet, left, y + _TITLE, wide)
            plan = require_plan(matrix.prediction)
            heat = plan[:, sorted(matrix.rows.marked)].mean(1).reshape(matrix.prediction.grid)
            sheet.photo(left, below, *photo, glowing(self.image, heat))
            self._draw_table(sheet, matrix.prediction, left + photo[0] + 0.12, below, wide - photo[0] - 0.12)
            left += wide + _GAP

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
