"""Figures of a study as pictures: lines along a setting, bars over variants, a radar over data sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import RamatchError, require
from . import _sheet as s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = Mapping[str, Sequence[float | None]]  # by the line's name, one for each place
COLORS = (s.BLUE, s.RED, s.GREEN, "#d98a1f", "#7a4fb0", "#1d8a99", s.GREY, "#8c564b", "#c2458f", s.INK)


def chart(kind: str, places: Sequence[str], values: Values, title: str = "", x: str = "") -> Figure:
    """A "line", "bars" or "radar" picture of values at places; what is not known is left out."""
    if kind not in DRAWN:
        raise RamatchError(f"no chart of kind '{kind}'; known: {', '.join(DRAWN)}")
    if not values or not places:
        raise RamatchError("nothing to draw: no row of the study is there yet")
    wide = 7.2 if kind != "bars" else max(7.2, 0.3 * len(places) * (len(values) + 1) + 2)
    make = require("matplotlib.figure", extra="explain").Figure
    figure = make(figsize=(wide, 4.6), facecolor=s.PAPER, layout="constrained")
    axes = figure.add_subplot(polar=kind == "radar")
    DRAWN[kind](axes, places, values)
    axes.set_title(title, fontsize=11, color=s.INK)
    axes.set_xlabel(x)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)
    return figure


def _line(axes: Axes, places: Sequence[str], values: Values) -> None:
    for color, (name, line) in zip(_colors(len(values)), values.items(), strict=True):
        known = [(float(place), v) for place, v in zip(places, line, strict=True) if v is not None]
        axes.plot([p for p, _ in known], [v for _, v in known], marker="o", color=color, label=name)
    axes.set_xticks([float(place) for place in places], places)
    axes.grid(color=s.RULE, linewidth=0.6)


def _bars(axes: Axes, places: Sequence[str], values: Values) -> None:
    width = 0.8 / len(values)
    for i, (color, (name, line)) in enumerate(zip(_colors(len(values)), values.items(), strict=True)):
        known = [(at + width * (i - (len(values) - 1) / 2), v) for at, v in enumerate(line) if v is not None]
        drawn = axes.bar([p for p, _ in known], [v for _, v in known], width, color=color, label=name)
        axes.bar_label(drawn, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(places)), places, rotation=20, ha="right", fontsize=8)
    found = [v for line in values.values() for v in line if v is not None]
    low, high = min(found, default=0.0), max(found, default=1.0)
    axes.set_ylim(max(0.0, low - (high - low + 1)), high + 0.1 * (high - low + 1))  # differences, not lengths


def _radar(axes: Axes, places: Sequence[str], values: Values) -> None:
    if len(places) < 3:
        raise RamatchError(f"a radar needs three places at least, here are {len(places)}; give more --data")
    angles = [2 * math.pi * i / len(places) for i in range(len(places))]
    for color, (name, line) in zip(_colors(len(values)), values.items(), strict=True):
        round_ = [v if v is not None else math.nan for v in [*line, line[0]]]
        axes.plot([*angles, angles[0]], round_, color=color, label=name, marker="o", markersize=3)
    axes.set_xticks(angles, [place.replace(" ", "\n", 1) for place in places], fontsize=8)
    axes.tick_params(axis="x", pad=14)
    axes.grid(color=s.RULE, linewidth=0.6)


def _colors(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


DRAWN = {"line": _line, "bars": _bars, "radar": _radar}
