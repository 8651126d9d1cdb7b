"""A sheet of paper measured in inches from its top left corner, on a matplotlib figure without pyplot."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ramatch.errors import RamatchError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#1b2030", "#6a7182", "#d9dde5", "#ffffff"
RED, GREEN, BLUE, GREY = "#d62839", "#1a8f55", "#2f5fb3", "#aab1bf"
RED_CELL, GREEN_CELL, PLAIN_CELL = "#f9d3d4", "#cdeedb", "#eceff4"
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
        axes = self.figure.add_axes(box)
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_visible(frame)
            spine.set_color(RULE)
            spine.set_linewidth(0.8)
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
