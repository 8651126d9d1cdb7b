"""The paper's pictures for any prediction, as matplotlib figures: what the plan does, seen three ways.

Every function takes a `Prediction` made with `maps=True` (or `plan=True`) and, where needed, the PIL image.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from ramatch.errors import RamatchError
from ramatch.viz import _sheet as s
from ramatch.viz._blocks import Block, Grid, Photo, Ranking, label_photo, marginal_photo, positions, ranking
from ramatch.viz._compare import Comparison
from ramatch.viz._matrix import Matrix, choose_rows, plan_scale
from ramatch.viz._sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ramatch.prediction import Prediction

_MARGIN = 0.3
_PIXELS = 960  # longest side drawn: a photograph of 12 megapixels would only make files large


def label_pictures(
    prediction: Prediction,
    image: Image.Image,
    labels: Sequence[str] | None = None,
    top: int = 8,
    *,
    truth: Sequence[str] | None = None,
) -> Figure:
    """Each label's transport weights over the image (individual view): those named, or the `top` best."""
    image = _prepared(image)
    photos = [Photo(image, "image"), *_label_photos(prediction, image, labels, top, truth)]
    columns = min(len(photos), max(2, math.ceil(math.sqrt(len(photos)))))
    # Panels of tall images are narrower, so that all are about equally large.
    panel = 2.6 * float(np.clip(math.sqrt(image.width / image.height), 0.6, 1.25))
    return _page(Grid(photos, columns), width=2 * _MARGIN + columns * panel)


def plan_picture(
    prediction: Prediction, truth: Sequence[str] | None = None, top: int = 5, *, by_score: bool = True
) -> Figure:
    """The whole plan, labels down and regions across (global view), with probabilities beside and ũ below.

    The true labels are in red boxes, or the `top` best when no truth is given. Rows run by score or, with
    `by_score=False`, in the order of the vocabulary. Beyond 40 labels the best (and the marked) have rows with
    names and all others follow in thin ones.
    """
    return _page(_matrix(prediction, truth, top, by_score), width=11.0)


def compare_matchers(
    predictions: Mapping[str, Prediction], image: Image.Image, truth: Sequence[str] | None = None, top: int = 3
) -> Figure:
    """Several matchers side by side (Figure 4 of the paper): the plan of each, where it looks, its top labels.

    With a truth, its rows are in red boxes and right and wrong predictions in green and red cells.
    """
    block = Comparison(predictions, _prepared(image), truth, top)
    return _page(block, width=block.natural_width)


def explanation(
    prediction: Prediction,
    image: Image.Image,
    *,
    truth: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    top: int = 8,
    matchers: Mapping[str, Prediction] | None = None,
    title: str | None = None,
) -> Figure:
    """One page with everything: ranking, ũ, each label's map, the plan, and the matchers if given."""
    size, image = prediction.size or image.size, _prepared(image)
    paler = "; paler where it is improbable" if prediction.calibrated else ""
    maps = Grid(_label_photos(prediction, image, labels, top, truth), 4 if image.width >= image.height * 0.75 else 8)
    blocks: list[Block] = [
        _Title(prediction, title or (Path(prediction.source).name if prediction.source else "Explanation")),
        _Opening(prediction, Photo(image, "image", f"{size[0]} × {size[1]}"), top, truth),
        _Section("Where each label is", f"transport weights over the image, relative to the largest{paler}", maps),
        _Section(
            "The transport plan",
            f"every label's weights on every region; {'best' if truth is None else 'true'} labels in red",
            _matrix(prediction, truth, min(top, 5)),
        ),
    ]
    if matchers:
        block = Comparison(matchers, image, truth)
        blocks.append(_Section("Matchers side by side", "the same features matched in different ways", block))
    return _page(_Stack(blocks), width=12.0, margin=0.5)


@dataclass
class _Stack:
    blocks: Sequence[Block]

    def height(self, width: float) -> float:
        return sum(block.height(width) for block in self.blocks)

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        for block in self.blocks:
            block.draw(sheet, x, y, width)
            y += block.height(width)


@dataclass
class _Title:
    prediction: Prediction
    name: str

    def height(self, width: float) -> float:
        return 0.85

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        count, (rows, columns) = len(self.prediction.labels), self.prediction.grid
        labels = "label" if count == 1 else "labels"
        kind = "calibrated probabilities" if self.prediction.calibrated else "relative scores, not calibrated"
        facts = f"{count:,} {labels}  ·  {rows} × {columns} regions  ·  {kind}"
        sheet.text(x, y + 0.15, s.elide(self.name, width, 17, bold=True), 17, fontweight="bold")
        sheet.text(x, y + 0.47, facts, 9.5, color=s.MUTED)


@dataclass
class _Opening:
    """The image, its marginal and the ranking, side by side."""

    prediction: Prediction
    photo: Photo
    top: int
    truth: Collection[str] | None

    def _third(self, width: float) -> float:
        return (width - 2 * 0.3) / 3 * min(1.0, self.photo.image.width / self.photo.image.height)

    def height(self, width: float) -> float:
        ranked = Ranking(self.prediction, self.top).height(width)
        return max(self.photo.height(self._third(width)), ranked + 0.3)

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        third, left = self._third(width), 2 * (self._third(width) + 0.3)
        self.photo.draw(sheet, x, y, third)
        marginal_photo(self.prediction, self.photo.image).draw(sheet, x + third + 0.3, y, third)
        Ranking(self.prediction, self.top, self.truth).draw(sheet, x + left, y - 0.03, width - left)


@dataclass
class _Section:
    caption: str
    note: str
    block: Block

    def height(self, width: float) -> float:
        return 0.62 + self.block.height(width) + 0.1

    def draw(self, sheet: Sheet, x: float, y: float, width: float) -> None:
        sheet.rectangle(x, y + 0.06, width, 0.012, s.RULE)
        sheet.text(x, y + 0.29, self.caption, 12.5, fontweight="bold")
        sheet.text(x + s.text_width(self.caption, 12.5, bold=True) + 0.2, y + 0.3, self.note, 9, color=s.MUTED)
        self.block.draw(sheet, x, y + 0.62, width)


def _page(block: Block, width: float, margin: float = _MARGIN) -> Figure:
    """A figure that holds one block."""
    inner = width - 2 * margin
    sheet = Sheet(width, block.height(inner) + 2 * margin)
    block.draw(sheet, margin, margin, inner)
    return sheet.figure


def _prepared(image: Image.Image) -> Image.Image:
    """Upright as the model saw it, RGB, and no larger than a picture needs."""
    upright = ImageOps.exif_transpose(image).convert("RGB")
    upright.thumbnail((_PIXELS, _PIXELS), Image.Resampling.LANCZOS)
    return upright


def _label_photos(
    prediction: Prediction, image: Image.Image, labels: Sequence[str] | None, top: int, truth: Collection[str] | None
) -> list[Photo]:
    chosen = positions(prediction, labels) if labels is not None else ranking(prediction)[:top]
    if not chosen:
        raise RamatchError("no label to draw: the vocabulary or the list of labels is empty")
    return [label_photo(prediction, image, label, truth) for label in chosen]


def _matrix(prediction: Prediction, truth: Sequence[str] | None, top: int, by_score: bool = True) -> Matrix:
    rows = choose_rows([prediction], truth, top, by_score=by_score)
    return Matrix(prediction, rows, plan_scale([prediction]), strip=prediction.marginal is not None)
