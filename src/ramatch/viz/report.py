"""One self-contained HTML page of many images with their labels and region maps.

It opens from the disk without a server: style, script and pictures are inside. Everything that comes from outside
(labels, file names, the title) is escaped, and a content policy forbids the page to load or send anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import os
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from PIL import Image

from ..config import GUESS
from ..data.images import ImageError, load_image
from ..errors import RamatchError
from ..files import write_atomic
from ..prediction import Prediction, Unreadable

RELATIVE = "Relative scores, which compare these labels: the model is not calibrated."
_PACKAGE = Path(__file__).parents[1]
_PARTS = _PACKAGE / "assets" / "report"
_SHARED = _PACKAGE / "serve" / "page"  # the web page's colours, label list and map drawing


def write_report(
    predictions: Iterable[Prediction | Unreadable],
    images: Iterable[Any] | None,
    out_path: str | os.PathLike[str],
    *,
    title: str = "What is in these pictures?",
    top: int = 10,
    threshold: float | None = None,
    maps: bool = True,
    max_side: int = 640,
) -> Path:
    """Write the page and return its path.

    predictions, images: as many of each, in the same order; images as `Recognizer.predict` takes them, or None for the
        files that the predictions were made from. Both may be generators: one picture is held at a time. Images that
        could not be read are left out.
    top: labels listed per image. threshold: labels below it are shown faintly and are not found by the filter.
    maps: with region maps, for predictions made with maps=True.
    max_side: pictures are inlined as JPEG, no larger than this many pixels.
    An existing file is replaced only when the new one is complete.
    """
    if top < 1:
        raise RamatchError(f"top={top}: a report lists at least 1 label per image")
    if threshold is not None and not 0 <= threshold <= 1:
        raise RamatchError(f"threshold={threshold} lies outside 0 to 1")
    path = Path(out_path)

    def write(temporary: Path) -> None:
        head, tail = _frame(title)
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(head)
            for prediction, image in _pairs(predictions, images):
                if isinstance(prediction, Unreadable):
                    continue
                answer = prediction.to_dict(top=top, maps=maps and prediction.plan is not None)
                name = html.escape(Path(prediction.source).name if prediction.source else "image", quote=True)
                rows, columns = prediction.grid
                file.write(f'<article class="card" data-grid="{rows} {columns}">\n')
                file.write(
                    f'<div class="heat">{_picture(image, name, max_side)}</div>\n<h2 title="{name}">{name}</h2>\n'
                )
                if not answer["calibrated"]:
                    file.write(f'<p class="hush">{RELATIVE}</p>\n')
                items = (_label(entry, threshold) for entry in answer["labels"])
                file.writelines(["<ol>\n", *items, "</ol>\n</article>\n"])
            file.write(tail)

    try:
        write_atomic(path, write)
    except OSError as error:
        raise RamatchError(f"cannot write the report to {path}: {error.strerror or error}") from error
    return path


def _pairs(
    predictions: Iterable[Prediction | Unreadable], images: Iterable[Any] | None
) -> Iterator[tuple[Prediction | Unreadable, Any]]:
    if images is None:
        yield from ((prediction, prediction.source) for prediction in predictions)
        return
    missing = object()
    for prediction, image in zip_longest(predictions, images, fillvalue=missing):
        if prediction is missing or image is missing:
            raise RamatchError("a report needs exactly one prediction for each image; one of the two lists is shorter")
        yield prediction, image  # type: ignore[misc]


def _frame(title: str) -> tuple[str, str]:
    """The page before its cards and after them."""
    parts = {
        "title": html.escape(title),
        "style": _read(_SHARED / "base.css", _PARTS / "report.css"),
        "script": _read(_SHARED / "theme.js", _SHARED / "heat.js", _PARTS / "report.js"),
    }
    inline = f"style-src {_hash(parts['style'])}; script-src {_hash(parts['script'])}"
    policy = f"default-src 'none'; img-src data:; {inline}; base-uri 'none'"
    before, after = _read(_PARTS / "report.html").split("$cards")
    return Template(before).substitute(parts, policy=policy), Template(after).substitute(parts)


def _label(entry: dict[str, Any], threshold: float | None) -> str:
    label, calibrated = html.escape(entry["label"], quote=True), "probability" in entry
    p = entry["probability" if calibrated else "relative"]
    below = " below" if threshold is not None and p < threshold else ""
    grid = ""
    if "map" in entry:  # (H, W) in [0, 1] as one byte per region, row by row
        heat = np.rint(np.clip(entry["map"], 0, 1) * 255).astype(np.uint8)
        grid = f' data-map="{base64.b64encode(heat).decode()}"'
    shown = f"{p:.2f}" if not calibrated else "&lt;1 %" if 0 < p < 0.005 else f"{100 * p:.0f} %"
    title = label
    if calibrated and not entry["calibrated"]:
        shown, title = f"{shown} ?", f"{label}: {GUESS}"
    return (
        f'<li><button type="button" class="label{below}" aria-pressed="false" '
        f'data-p="{p:.4f}" data-label="{label}"{grid}>'
        f'<span class="name" title="{title}">{label}</span>'
        f'<span class="track" aria-hidden="true"><span class="fill"></span></span>'
        f'<span class="value">{shown}</span></button></li>\n'
    )


def _picture(image: Any, name: str, max_side: int) -> str:
    try:
        picture = load_image(image, shrink=True)
    except ImageError as error:  # it was readable when it was tagged; a report of the others is still worth having
        return f'<p class="lost">The picture can no longer be read: {html.escape(error.reason)}</p>'
    picture.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=82, optimize=True, progressive=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    size = f'width="{picture.width}" height="{picture.height}"'
    return f'<img alt="{name}" {size} src="data:image/jpeg;base64,{data}"><canvas aria-hidden="true"></canvas>'


def _read(*paths: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def _hash(text: str) -> str:
    """Source expression of a content policy that allows exactly this inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
