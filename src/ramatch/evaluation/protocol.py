"""ZSL and GZSL evaluation of a score matrix, and tables like the paper's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ramatch.errors import RamatchError
from ramatch.evaluation import metrics
from ramatch.evaluation.metrics import Array

Protocol = Literal["zsl", "gzsl"]


@dataclass(frozen=True)
class Report:
    """One evaluation; `values` are in percent, keyed `P@3`, `R@3`, `F1@3`, ..., `mAP`.

    `average_precisions` has None for a label without positives; of the mAPs only `mAP_empty_zero` counts it.
    """

    values: dict[str, float]
    average_precisions: dict[str, float | None] = field(default_factory=dict)
    images: int = 0
    labels: int = 0
    positives: int = 0
    protocol: str = "gzsl"

    def __getitem__(self, key: str) -> float:
        return self.values[key]

    @property
    def labels_without_positives(self) -> list[str]:
        return [name for name, ap in self.average_precisions.items() if ap is None]

    def to_dict(self) -> dict[str, object]:
        """The values at top level, so that `json["mAP"]` works, with the details beside them."""
        return {
            **self.values,
            "protocol": self.protocol,
            "images": self.images,
            "labels": self.labels,
            "positives": self.positives,
            "labels_without_positives": self.labels_without_positives,
            "average_precision": self.average_precisions,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)

    def to_table(self, *, name: str = "", markdown: bool = False, all_values: bool = False) -> str:
        """The paper's columns (or `all_values`) for this one report, with a line on what was measured."""
        empty = len(self.labels_without_positives)
        about = f"{self.protocol.upper()}: {self.images:,} images, {self.labels:,} labels"
        about += f" ({empty} without positives, not in mAP)" if empty else ""
        columns = list(self.values) if all_values else None
        return compare({name: self}, markdown=markdown, columns=columns) + f"\n\n{about}, {self.positives:,} positives"


def evaluate_scores(
    scores: Array,
    targets: Array,
    classes: Sequence[str],
    seen: Sequence[str] | None = None,
    unseen: Sequence[str] | None = None,
    ks: Sequence[int] = (3, 5),
    *,
    protocol: Protocol = "gzsl",
    threshold: float | None = None,
    known: Array | None = None,
) -> Report:
    """Scores and targets (n, N) of the labels `classes` to a Report.

    `gzsl` ranks all labels together; `zsl` keeps the `unseen` columns and ranks those alone. With `seen` and
    `unseen` given, GZSL adds `mAP_seen`, `mAP_unseen` and their harmonic mean `mAP_H`. All readings of mAP
    are there under their own names (`metrics.MAP_VARIANTS`), and so are `P@k_tagged`, ... on images with at
    least one positive. With a `threshold`, also CP, CR, CF1, OP, OR, OF1.
    """
    s, t, m = metrics.check(scores, targets, known)
    if s.shape[1] != len(classes) or len(set(classes)) != len(classes):
        raise RamatchError(f"{s.shape[1]} columns of scores need as many distinct class names, got {len(classes)}")
    names = list(classes)
    if protocol == "zsl":
        if not unseen:
            raise RamatchError("protocol zsl needs the unseen labels: pass unseen=[...]")
        keep = _columns(names, unseen, "unseen")
        s, t, m, names = s[:, keep], t[:, keep], None if m is None else m[:, keep], [names[i] for i in keep]
    elif protocol != "gzsl":
        raise RamatchError(f"protocol must be 'zsl' or 'gzsl', got {protocol!r}")

    values: dict[str, float] = {}
    best = {k: metrics.topk_mask(s, k) for k in ks}
    for suffix, rows in (("", np.ones(len(t), dtype=bool)), ("_tagged", np.any(t, axis=1))):
        for k, predicted in best.items():
            prf = metrics.count(predicted[rows], t[rows], None if m is None else m[rows]).overall
            values |= {f"P@{k}{suffix}": prf.precision, f"R@{k}{suffix}": prf.recall, f"F1@{k}{suffix}": prf.f1}
    ap, has = metrics.average_precision(s, t, known=m), np.any(t, axis=0)
    values["mAP"] = metrics.mean_over(ap, has)
    for key in ("mAP_micro", "mAP_images", "mAP_tagged"):
        same = key == "mAP_tagged" and t.any(1).all()  # no image to leave out
        values[key] = values["mAP"] if same else metrics.MAP_VARIANTS[key](s, t, known=m)
    values["mAP_empty_zero"] = float(ap.mean()) if len(ap) else 0.0
    if protocol == "gzsl" and seen and unseen:
        for key, part in (
            ("mAP_seen", _columns(names, seen, "seen")),
            ("mAP_unseen", _columns(names, unseen, "unseen")),
        ):
            values[key] = metrics.mean_over(ap[part], has[part])
        values["mAP_H"] = metrics.harmonic_mean(values["mAP_seen"], values["mAP_unseen"])
    if threshold is not None:
        values.update(metrics.at_threshold(s, t, threshold, known=m).to_dict())

    return Report(
        values={key: 100.0 * value for key, value in values.items()},
        average_precisions={name: 100.0 * float(a) if h else None for name, a, h in zip(names, ap, has, strict=True)},
        images=s.shape[0],
        labels=s.shape[1],
        positives=int(t.sum()),
        protocol=protocol,
    )


def paper_columns(values: Mapping[str, float]) -> list[str]:
    """Of a report's keys, the columns of the paper's tables: P@k, R@k, F1@k, mAP, seen/unseen where there."""
    plain = [key for key in values if "@" in key and not key.endswith("_tagged")]
    return plain + [key for key in ("mAP", "mAP_seen", "mAP_unseen", "mAP_H") if key in values]


def compare(
    reports: Mapping[str, Report] | Mapping[tuple[str, str], Report],
    *,
    columns: Sequence[str] | None = None,
    markdown: bool = False,
    digits: int = 1,
) -> str:
    """Several reports in one table, a row each, the best of a column marked (`**` in Markdown, else `*`).

    A name may be a pair (method, group), e.g. ("RAM", "ZSL"): the groups of a method share a row, as in the
    paper.
    """
    rows: dict[str, dict[tuple[str, str], float]] = {}
    for name, report in reports.items():
        row, group = name if isinstance(name, tuple) else (name, "")
        wanted = columns if columns is not None else paper_columns(report.values)
        found = {(group, key): round(report.values[key], digits) for key in wanted if key in report.values}
        rows.setdefault(row, {}).update(found)
    keys = list(dict.fromkeys(key for cells in rows.values() for key in cells))
    groups = list(dict.fromkeys(group for group, _ in keys))
    keys.sort(key=lambda key: groups.index(key[0]))  # stable: a group's columns stay in the order met
    values = {key: [cells[key] for cells in rows.values() if key in cells] for key in keys}
    best = {key: max(column) if len(column) > 1 else None for key, column in values.items()}

    mark = "**{}**" if markdown else "{}*"
    body = []
    for row, cells in rows.items():
        texts = [f"{cells[key]:.{digits}f}" if key in cells else "-" for key in keys]
        won = [key in cells and cells[key] == best[key] for key in keys]
        body.append([row, *(mark.format(t) if w else t for t, w in zip(texts, won, strict=True))])
    heads = [[""] + [group for group, _ in keys], ["Method"] + [key for _, key in keys]]
    if list(rows) == [""]:  # a single nameless report needs no column of names
        heads, body = [line[1:] for line in heads], [line[1:] for line in body]
    return _markdown(heads, body) if markdown else _plain(heads, body)


def _plain(heads: list[list[str]], body: list[list[str]]) -> str:
    # A mark stands after its number; the other cells get a blank in its place so that decimals stay aligned.
    marked = any(cell.endswith("*") for line in body for cell in line)
    first = 1 if heads[1][0] == "Method" else 0
    table = [[c if not marked or c.endswith("*") else c + " " for c in line] for line in [*heads, *body]]
    widths = [max(len(line[j]) for line in table) for j in range(len(table[0]))]
    lines = [
        "  ".join(c.ljust(w) if j < first else c.rjust(w) for j, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]
    rule = "-" * max(len(line.rstrip()) for line in lines)
    return "\n".join(line.rstrip() for line in (*lines[:2], rule, *lines[2:]) if line.strip())


def _markdown(heads: list[list[str]], body: list[list[str]]) -> str:
    head = [f"{group} {key}".strip().replace("|", "\\|") for group, key in zip(*heads, strict=True)]
    align = [":---" if key == "Method" else "---:" for key in head]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in body]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, align, *cells])


def _columns(classes: Sequence[str], part: Sequence[str], what: str) -> np.ndarray:
    index = {name: i for i, name in enumerate(classes)}
    missing = [name for name in part if name not in index]
    if missing:
        raise RamatchError(f"{len(missing)} {what} labels are not among the classes evaluated, first: {missing[0]!r}")
    return np.array([index[name] for name in part], dtype=np.int64)
