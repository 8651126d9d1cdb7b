"""A study's rows as a table in the paper's layout, ours beside the paper's, and as series for its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from ..evaluation._tables import format_table
from .study import Missing
from .study_rows import Row
from .study_spec import COSTS, METRICS, Study

DASH = "–"


@dataclass(frozen=True)
class Series:
    """A line of a picture: a name, and values at the places of its x axis, None where there is none."""

    name: str
    values: tuple[float | None, ...]


def table(study: Study, rows: Sequence[Row], missing: Sequence[Missing] = (), *, markdown: bool = False) -> str:
    """For each data set all variants, means over seeds (± standard deviation), and the paper's figures beside them."""
    sets = list(dict.fromkeys([row["data"] for row in rows] + [m.data for m in missing]))
    parts = [study.title]
    for data in sets or ["no rows yet"]:
        parts += ["", f"**{data}**" if markdown else data, "", _one_table(study, rows, data, markdown)]
    notes = [f"{DASH} {m.variant} on {m.data}: {m.reason}" for m in missing]
    notes += [f"Paper: {study.paper}"] if study.paper else []
    return "\n".join([*parts, "", *notes])


def _one_table(study: Study, rows: Sequence[Row], data: str, markdown: bool) -> str:
    names, printed = list(study.parts) or ["Method"], _printed(study)
    pairs = _paper_columns(study, data)
    head = names + [_heading(column) for column in study.columns]
    head += [f"paper {benchmark} {_heading(column)}" for benchmark, column in pairs]
    lines = []
    for name, paper in printed.items():
        figures = [paper.get(benchmark, {}).get(column) for benchmark, column in pairs]
        if name in study.paper_rows and name not in _ours(study) and not any(figures):
            continue
        first = ["✓" if part in name.split(" + ") else "" for part in study.parts] or [name]
        cells = [_cell(rows, name, data, column) for column in study.columns]
        lines.append(first + cells + [DASH if figure is None else f"{figure:.1f}" for figure in figures])
    return format_table(head, lines, names=len(names), markdown=markdown)


def _ours(study: Study) -> set[str]:
    return {name for variant in study.variants for name in (variant.name, *variant.also)}


def _heading(column: str, data: str = "") -> str:
    return f"{data} {(METRICS | COSTS)[column]}".strip()


def _printed(study: Study) -> dict[str, Mapping[str, Mapping[str, float]]]:
    """Names of the table's rows, with the paper's figures: variants, then the paper's systems that are not here."""
    found: dict[str, Mapping[str, Mapping[str, float]]] = {}
    for variant in study.variants:
        found |= {variant.name: study.printed(variant)} | {name: {} for name in variant.also}
    return found | {name: paper for name, paper in study.paper_rows.items() if name not in found}


def _paper_columns(study: Study, data: str) -> list[tuple[str, str]]:
    """(benchmark, column) of the paper's figures that stand beside this data set's, benchmarks together."""
    pairs = [(b, c) for paper in _printed(study).values() for b, figures in paper.items() for c in figures]
    order = list(study.beside.get(data) or dict.fromkeys(benchmark for benchmark, _ in pairs))
    there, columns = set(pairs), study.columns
    return [(benchmark, column) for benchmark in order for column in columns if (benchmark, column) in there]


def _values(rows: Sequence[Row], name: str, data: str, column: str) -> list[float]:
    return [float(r[column]) for r in rows if r["variant"] == name and r["data"] == data and r[column]]


def _cell(rows: Sequence[Row], name: str, data: str, column: str) -> str:
    values = _values(rows, name, data, column)
    places = 1 if column in METRICS else 2 if column.endswith("_gb") else 0
    if not values:
        return DASH
    spread = f" ± {stdev(values):.{places}f}" if len(values) > 1 and column in METRICS else ""
    return f"{mean(values):.{places}f}{spread}"


def series(study: Study, rows: Sequence[Row]) -> tuple[list[str], list[Series]]:
    """What the study's picture shows: names of its places, and its lines. A line chart has a line for each data set and
    figure along the variants' `x`, bars likewise over the variants; a radar has one for each variant over all data
    sets."""
    sets, metrics = list(dict.fromkeys(row["data"] for row in rows)), study.figure.metrics
    variants = [v for v in study.variants if study.figure.kind != "line" or v.x is not None]

    def value(name: str, data: str, metric: str) -> float | None:
        found = _values(rows, name, data, metric)
        return mean(found) if found else None

    def named(data: str, metric: str) -> str:
        return _heading(metric, data if len(sets) > 1 else "")

    pairs = [(data, metric) for data in sets for metric in metrics]
    if study.figure.kind == "radar":
        lines = [Series(v.name, tuple(value(v.name, *pair) for pair in pairs)) for v in variants]
        return [named(*pair) for pair in pairs], [line for line in lines if None not in line.values]
    places = [f"{v.x:g}" if study.figure.kind == "line" else v.name for v in variants]
    return places, [Series(named(*pair), tuple(value(v.name, *pair) for v in variants)) for pair in pairs]
