"""The paper's pictures for any prediction, as matplotlib figures: what the plan does, seen three ways.

Every function takes a `Prediction` made with `maps=True` (or `plan=True`) and, where needed, the PIL image.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from ..data.images import load_image
from ..errors import RamatchError
from ..prediction import Prediction
from . import _sheet as s
from ._matrix import NAMES, Matrix, comparison, layout
from ._sheet import Block, Sheet, grid, label_photo, marginal_photo, photo, positions, ranked, ranking

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    photos = [photo(image, "image"), *_label_photos(prediction, image, labels, top, truth)]
    columns = min(len(photos), max(2, math.ceil(math.sqrt(len(photos)))))
    # Panels of tall images are narrower, so that all are about equally large.
    panel = 2.6 * float(np.clip(math.sqrt(image.width / image.height), 0.6, 1.25))
    return _page(grid(photos, columns), width=2 * _MARGIN + columns * panel)


def plan_picture(
    prediction: Prediction, truth: Sequence[str] | None = None, top: int = 5, *, by_score: bool = True
) -> Figure:
    """The whole plan, labels down and regions across (global view), with probabilities beside and ũ below.

    The true labels are in green boxes, or the `top` best in blue ones when no truth is given. Rows run by score
    or, with `by_score=False`, in the order of the vocabulary. Beyond 40 labels the best (and the marked) have rows with
    names and all others follow in thin ones.
    """
    return _page(_matrix(prediction, truth, top, by_score), width=11.0)


def compare_matchers(
    predictions: Mapping[str, Prediction], image: Image.Image, truth: Sequence[str] | None = None, top: int = 3
) -> Figure:
    """Several matchers side by side (Figure 4 of the paper): the plan of each, where it looks, its top labels.

    With a truth, its rows are in green boxes and right and wrong predictions in green and red cells.
    """
    block = comparison(predictions, _prepared(image), truth, top)
    return _page(block, width=2 * _MARGIN + NAMES + 3.3 * len(predictions))


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
    """One page with everything: ranking, ũ, each label's maps (where it is, of a prediction with masks, and where it
    won), the plan, and the matchers if given."""
    size, image = prediction.size or image.size, _prepared(image)
    shown = photo(image, "image", f"{size[0]} × {size[1]}")
    paler = "; paler where it is improbable" if prediction.calibrated else ""
    across = 4 if image.width >= image.height * 0.75 else 8
    weights = grid(_label_photos(prediction, image, labels, top, truth), across)
    true = "best ones in blue" if truth is None else "true ones in green"
    rows = f"a row for each label ({true}), a column for each region, row by row from the top left; darker: more weight"
    blocks: list[Block] = [
        _title(prediction, title or (Path(prediction.source).name if prediction.source else "Explanation")),
        _opening(shown, marginal_photo(prediction, image), ranked(prediction, top, truth), image.width / image.height),
    ]
    if prediction.fine is not None:
        looks = grid(_label_photos(prediction, image, labels, top, truth, "fine"), across)
        blocks.append(_section("Where each label is", f"how much each place looks like it{paler}", looks))
    blocks += [
        _section("Where each label won", f"its weights in the transport plan, relative to the largest{paler}", weights),
        _section("The transport plan", rows, _matrix(prediction, truth, min(top, 5))),
    ]
    if matchers:
        block = comparison(matchers, image, truth)
        blocks.append(_section("Matchers side by side", "the same features matched in different ways", block))
    return _page(*blocks, width=12.0, margin=0.5)


def _title(prediction: Prediction, name: str) -> Block:
    def draw(sheet: Sheet, x: float, y: float, width: float) -> float:
        count, (rows, columns) = len(prediction.labels), prediction.grid
        labels = "label" if count == 1 else "labels"
        kind = "calibrated probabilities" if prediction.calibrated else "relative scores, not calibrated"
        facts = f"{count:,} {labels}  ·  {rows} × {columns} regions  ·  {kind}"
        sheet.text(x, y + 0.15, s.elide(name, width, 17, bold=True), 17, fontweight="bold")
        sheet.text(x, y + 0.47, facts, 9.5, color=s.MUTED)
        return 0.85

    return draw


def _opening(image: Block, marginal: Block, ranking: Block, aspect: float) -> Block:
    """The image, its marginal and the ranking, side by side."""

    def draw(sheet: Sheet, x: float, y: float, width: float) -> float:
        third = (width - 2 * 0.3) / 3 * min(1.0, aspect)
        left, high = 2 * (third + 0.3), image(sheet, x, y, third)
        marginal(sheet, x + third + 0.3, y, third)
        return max(high, ranking(sheet, x + left, y - 0.03, width - left) + 0.3)

    return draw


def _section(caption: str, note: str, block: Block) -> Block:
    def draw(sheet: Sheet, x: float, y: float, width: float) -> float:
        sheet.rectangle(x, y + 0.06, width, 0.012, s.RULE)
        sheet.text(x, y + 0.29, caption, 12.5, fontweight="bold")
        sheet.text(x + s.text_width(caption, 12.5, bold=True) + 0.2, y + 0.3, note, 9, color=s.MUTED)
        return 0.62 + block(sheet, x, y + 0.62, width) + 0.1

    return draw


def _page(*blocks: Block, width: float, margin: float = _MARGIN) -> Figure:
    """A figure that holds blocks, one below the other: drawn once to see how high they become, and then for good."""
    height = 1.0
    for _ in range(2):
        sheet, y = Sheet(width, height), margin
        for block in blocks:
            y += block(sheet, margin, y, width - 2 * margin)
        height = y + margin
    return sheet.figure


def _prepared(image: Image.Image) -> Image.Image:
    """Upright as the model saw it, RGB, and no larger than a picture needs."""
    upright = load_image(image)
    upright.thumbnail((_PIXELS, _PIXELS), Image.Resampling.LANCZOS)
    return upright


def _label_photos(
    prediction: Prediction,
    image: Image.Image,
    labels: Sequence[str] | None,
    top: int,
    truth: Collection[str] | None,
    kind: str = "plan",
) -> list[Block]:
    chosen = positions(prediction, labels) if labels is not None else ranking(prediction)[:top]
    if not chosen:
        raise RamatchError("no label to draw: the vocabulary or the list of labels is empty")
    return [label_photo(prediction, image, label, truth, kind) for label in chosen]


def _matrix(prediction: Prediction, truth: Sequence[str] | None, top: int, by_score: bool = True) -> Block:
    return Matrix(prediction, layout([prediction], truth, top, by_score=by_score)).draw
