"""A prediction as a notebook shows it: the picture, small, and its best tags with bars.

The page a notebook lies on may drop styles (GitHub does), so bars are text and only their color is style.
"""

from __future__ import annotations

import base64
import html
import io
from typing import TYPE_CHECKING

from PIL import Image

from ..config import GUESS
from ..data.images import ImageError, load_image
from ..prediction import RELATIVE, short_name

if TYPE_CHECKING:
    from ..prediction import Prediction, Tag

TOP = 6  # tags shown
SIDE = 224  # pixels of the picture's longer side
BAR = 20  # characters of a full bar


def prediction_html(prediction: Prediction, top: int = TOP) -> str:
    """A table with the picture, if its file is still there, and the best tags."""
    tags, name = prediction.top(top), html.escape(short_name(prediction.source), quote=True)
    rows = [f'<th colspan="3" style="text-align: left">{name}</th>', *map(_row, tags)]
    picture = _picture(prediction.source, name, len(rows)) if prediction.source else ""
    note = "" if prediction.calibrated else f"<p>{html.escape(RELATIVE)}</p>"
    lines = "".join(f"<tr>{row}</tr>\n" for row in [picture + rows[0], *rows[1:]])
    return f"<table>\n{lines}</table>\n<p>the best of {len(prediction.labels):,} labels</p>{note}"


def _row(tag: Tag) -> str:
    bar = "█" * round(BAR * tag.value) or "▏"
    guess = f' title="{GUESS}"' if tag.calibrated and not tag.trusted else ""
    mark = " ?" if guess else ""
    return (
        f'<td style="text-align: left"{guess}>{html.escape(tag.label)}</td>'
        f'<td style="text-align: left; color: #7c3aed; letter-spacing: -1px">{bar}</td><td>{tag.value:.2f}{mark}</td>'
    )


def _picture(source: str, name: str, rows: int) -> str:
    """A cell beside all rows; nothing where the file cannot be read any more."""
    try:
        picture = load_image(source)
    except ImageError:
        return ""
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    picture.save(buffer := io.BytesIO(), "JPEG", quality=80)
    data = base64.b64encode(buffer.getvalue()).decode()
    image = f'<img alt="{name}" width="{picture.width}" src="data:image/jpeg;base64,{data}">'
    return f'<td rowspan="{rows}">{image}</td>'
