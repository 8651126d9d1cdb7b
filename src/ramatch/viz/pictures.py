"""The paper's pictures for any prediction, as matplotlib figures: what the plan does, seen three ways.

Every function takes a `Prediction` made with `maps=True` (or `plan=True`) and, where needed, the PIL image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from ramatch.errors import RamatchError
from ramatch.viz import _sheet as s
from ramatch.viz._blocks import (
    GAP,
    Grid,
    HeatKey,
    LabelPanel,
    Photo,
    Ranking,
    full_heat,
    positions,
    ranking,
    require_plan,
)
from ramatch.viz._compare import Comparison
from ramatch.viz._matrix import Matrix, Rows, choose_rows, plan_scale
from ramatch.viz._sheet import Sheet, save
from ramatch.viz.overlay import overlay

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ramatch.prediction import Prediction

_MARGIN = 0.3
_PIXELS = 960  # longest side drawn: a photograph of 12 megapixels would only make files large


def marginal_picture(prediction: Prediction, image: Image.Image) -> Figure:
    """The region marginal ũ over the image, beside the image: where label presence detection sees anything at all."""
    image = _prepared(image)
    blocks = [Photo(image, "image"), _marginal_photo(prediction, image)]
    wide = 3.4 * min(1.0, image.width / image.height)
    inner = 2 * wide + GAP
    grid, key = Grid(blocks, columns=2), HeatKey(_marginal_full(prediction))
    high = grid.height(inner)
    sheet = Sheet(inner + 2 * _MARGIN, high + key.height(wide) + 2 * _MARGIN)
    grid.draw(sheet, _MARGIN, _MARGIN, inner)
    key.draw(sheet, _MARGIN + wide + GAP, _MARGIN + high, wide)
    return sheet.figure


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
    grid = _label_grid(prediction, image, labels, top, truth)
    return _page(grid, width=2 * _MARGIN + grid.columns * _panel_width(image))


def plan_picture(
    prediction: Prediction, truth: Sequence[str] | None = None, top: int = 5, *, by_score: bool = True
) -> Figure:
    """The whole plan, labels down and regions across (global view), with probabilities beside and ũ below.

    The true labels are in red boxes, or the `top` best when no truth is given. Rows run by score or, with
    `by_score=False`, in the order of the vocabulary. Beyond 40 labels the best (and the marked) have rows with
    names and all others follow in thin ones.
    """
    rows = choose_rows([prediction], truth, top, by_score=by_score)
    return _page(_matrix(prediction, rows), width=11.0)


def compare_matchers(
    predictions: Mapping[str, Prediction], image: Image.Image, truth: Sequence[str] | None = None, top: int = 3
) -> Figure:
    """Several matchers side by side (Figure 4 of the paper): the plan of each, where it looks, its top labels.

    With a truth, its rows are in red boxes and right and wrong predictions in green and red cells.
    """
    block = Comparison(dict(predictions), _prepared(image), None if truth is None else tuple(truth), top)
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
    rows = choose_rows([prediction], truth, min(top, 5), by_score=True)
    known = None if truth is None else frozenset(truth)
    sections: list[tuple[str, str, Any]] = [
        (
            "Where each label is",
            "transport weights over the image, relative to the label's own largest"
            + ("; paler where it is improbable" if prediction.calibrated else ""),
            _label_grid(prediction, image, labels, top, truth, with_image=False),
        ),
        (
            "The transport plan",
            f"every label's weights on every region; {'best' if truth is None else 'true'} labels in red",
            _matrix(prediction, rows),
        ),
    ]
    if matchers:
        block = Comparison(dict(matchers), image, None if truth is None else tuple(truth), 3)
        sections.append(("Matchers side by side", "the same features matched in different ways", block))
    width, margin = 12.0, 0.5
    inner = width - 2 * margin
    third = (inner - 2 * 0.3) / 3 * min(1.0, image.width / image.height)
    opening = max(Photo(image, "").height(third), Ranking(prediction, top).height(1.0) + 0.3)
    head, heading = 0.85, 0.62
    height = margin + head + opening + sum(heading + block.height(inner) + 0.1 for *_, block in sections) + margin / 2

    sheet = Sheet(width, height)
    y = margin
    name = title or (Path(prediction.source).name if prediction.source else "Explanation")
    sheet.text(margin, y + 0.15, s.elide(name, inner, 17, bold=True), 17, fontweight="bold")
    facts = [
        f"{len(prediction.labels):,} label{'s' if len(prediction.labels) != 1 else ''}",
        f"{prediction.grid[0]} × {prediction.grid[1]} regions",
        f"probabilities {'' if prediction.calibrated else 'not '}calibrated",
    ]
    sheet.text(margin, y + 0.47, "  ·  ".join(facts), 9.5, color=s.MUTED)
    y += head
    Photo(image, "image", f"{size[0]} × {size[1]}").draw(sheet, margin, y, third)
    _marginal_photo(prediction, image).draw(sheet, margin + third + 0.3, y, third)
    left = margin + 2 * (third + 0.3)
    Ranking(prediction, top, known).draw(sheet, left, y - 0.03, width - margin - left)
    y += opening
    for caption, note, block in sections:
        sheet.line([margin, width - margin], [y + 0.06, y + 0.06], color=s.RULE, linewidth=0.8)
        sheet.text(margin, y + 0.29, caption, 12.5, fontweight="bold")
        sheet.text(margin + s.text_width(caption, 12.5, bold=True) + 0.2, y + 0.3, note, 9, color=s.MUTED)
        y += heading
        block.draw(sheet, margin, y, inner)
        y += block.height(inner) + 0.1
    return sheet.figure


def save_explanation(
    prediction: Prediction, image: Image.Image, path: str | Path, *, dpi: int = 160, **options: Any
) -> Path:
    """`explanation(prediction, image, **options)` written to a PNG, SVG or PDF file."""
    return save(explanation(prediction, image, **options), path, dpi=dpi)


def _page(block: Any, width: float) -> Figure:
    """A figure that holds one block."""
    inner = width - 2 * _MARGIN
    sheet = Sheet(width, block.height(inner) + 2 * _MARGIN)
    block.draw(sheet, _MARGIN, _MARGIN, inner)
    return sheet.figure


def _prepared(image: Image.Image) -> Image.Image:
    """Upright as the model saw it, RGB, and no larger than a picture needs."""
    upright = ImageOps.exif_transpose(image).convert("RGB")
    upright.thumbnail((_PIXELS, _PIXELS), Image.Resampling.LANCZOS)
    return upright


def _panel_width(image: Image.Image) -> float:
    """Inches: panels of tall images are narrower, so that all are about equally large."""
    return 2.6 * float(np.clip(math.sqrt(image.width / image.height), 0.6, 1.25))


def _label_grid(
    prediction: Prediction,
    image: Image.Image,
    labels: Sequence[str] | None,
    top: int,
    truth: Sequence[str] | None,
    *,
    with_image: bool = True,
) -> Grid:
    plan = require_plan(prediction)
    chosen = positions(prediction, labels) if labels is not None else ranking(prediction)[:top].tolist()
    if not chosen:
        raise RamatchError("no label to draw: the vocabulary or the list of labels is empty")
    blocks: list[Photo | LabelPanel] = [Photo(image, "image")] if with_image else []
    for i in chosen:
        name = prediction.labels[i]
        right = None if truth is None else name in truth
        heat = plan[:, i].reshape(prediction.grid)
        probability = float(prediction.probabilities[i])
        # An uncalibrated number says little about presence, so the heat does not follow it.
        blocks.append(LabelPanel(image, heat, name, probability, right, fade=prediction.calibrated))
    if with_image:
        columns = min(len(blocks), max(2, math.ceil(math.sqrt(len(blocks)))))
    else:  # on a page of fixed width
        columns = 4 if image.width >= image.height * 0.75 else 8
    return Grid(blocks, columns)


def _matrix(prediction: Prediction, rows: Rows) -> Matrix:
    return Matrix(prediction, rows, plan_scale([prediction]), strip=prediction.marginal is not None)


def _marginal_full(prediction: Prediction) -> float:
    assert prediction.marginal is not None
    return full_heat(np.asarray(prediction.marginal)) * len(prediction.marginal)


def _marginal_photo(prediction: Prediction, image: Image.Image) -> Photo:
    if prediction.marginal is None:
        raise RamatchError("this prediction has no region marginal to draw; predict with maps=True or plan=True")
    heat = np.asarray(prediction.marginal, dtype=np.float64).reshape(prediction.grid)
    return Photo(overlay(image, heat, vmax=full_heat(heat)), "region marginal ũ")
