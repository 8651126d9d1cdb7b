"""ZSL and GZSL evaluation of a score matrix, and tables like the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ramatch.errors import RamatchError
from ramatch.evaluation import metrics
from ramatch.evaluation._tables import format_table
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
        counts = {name: getattr(self, name) for name in ("protocol", "images", "labels", "positives")}
        details = {"labels_without_positives": self.labels_without_positives}
        return {**self.values, **counts, **details, "average_precision": self.average_precisions}

    def to_table(self, *, name: str = "", markdown: bool = False) -> str:
        """The paper's columns for this one report, with a line on what was measured."""
        empty = len(self.labels_without_positives)
        about = f"{self.protocol.upper()}: {self.images:,} images, {self.labels:,} labels"
        about += f" ({empty} without positives, not in mAP)" if empty else ""
        columns = [key for key in self.values if "@" in key and not key.endswith("_tagged")]
        columns += [key for key in ("mAP", "mAP_seen", "mAP_unseen", "mAP_H") if key in self.values]
        cells = [f"{self.values[key]:.1f}" for key in columns]
        named = bool(name)  # a nameless report needs no column of names
        head, row = (["Method", *columns], [name, *cells]) if named else (columns, cells)
        table = format_table(head, [row], names=int(named), markdown=markdown)
        return f"{table}\n\n{about}, {self.positives:,} positives"


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
) -> Report:
    """Scores and targets (n, N) of the labels `classes` to a Report.

    `gzsl` ranks all labels together; `zsl` keeps the `unseen` columns and ranks those alone. With `seen` and
    `unseen` given, GZSL adds `mAP_seen`, `mAP_unseen` and their harmonic mean `mAP_H`. All readings of mAP
    are there under their own names (`metrics.mean_aps`), and so are `P@k_tagged`, ... on images with at
    least one positive. With a `threshold`, also CP, CR, CF1, OP, OR, OF1.
    """
    s, t = metrics.check(scores, targets)
    if s.shape[1] != len(classes) or len(set(classes)) != len(classes):
        raise RamatchError(f"{s.shape[1]} columns of scores need as many distinct class names, got {len(classes)}")
    names = list(classes)
    if protocol == "zsl":
        if not unseen:
            raise RamatchError("protocol zsl needs the unseen labels: pass unseen=[...]")
        keep = _columns(names, unseen, "unseen")
        s, t, names = s[:, keep], t[:, keep], [names[i] for i in keep]
    elif protocol != "gzsl":
        raise RamatchError(f"protocol must be 'zsl' or 'gzsl', got {protocol!r}")
    ap, has = metrics.average_precision(s, t), np.any(t, axis=0)
    values = {**_at_ks(s, t, ks), **metrics.mean_aps(s, t, ap)}
    if protocol == "gzsl" and seen and unseen:
        for key, part in (("seen", seen), ("unseen", unseen)):
            columns = _columns(names, part, key)
            values[f"mAP_{key}"] = metrics.mean_over(ap[columns], has[columns])
        values["mAP_H"] = metrics.harmonic_mean(values["mAP_seen"], values["mAP_unseen"])
    if threshold is not None:
        values.update(metrics.at_threshold(s, t, threshold))
    return Report(
        values={key: 100.0 * value for key, value in values.items()},
        average_precisions={name: 100.0 * float(a) if h else None for name, a, h in zip(names, ap, has, strict=True)},
        images=s.shape[0],
        labels=s.shape[1],
        positives=int(t.sum()),
        protocol=protocol,
    )


def _at_ks(s: np.ndarray, t: np.ndarray, ks: Sequence[int]) -> dict[str, float]:
    """P, R and F1 at each k, on all images and on the tagged ones."""
    values: dict[str, float] = {}
    best = {k: metrics.topk_mask(s, k) for k in ks}
    for suffix, rows in (("", slice(None)), ("_tagged", np.any(t, axis=1))):
        for k, predicted in best.items():
            values |= metrics.micro(predicted[rows], t[rows]).named(f"@{k}{suffix}")
    return values


def _columns(classes: Sequence[str], part: Sequence[str], what: str) -> np.ndarray:
    index = {name: i for i, name in enumerate(classes)}
    missing = [name for name in part if name not in index]
    if missing:
        raise RamatchError(f"{len(missing)} {what} labels are not among the classes evaluated, first: {missing[0]!r}")
    return np.array([index[name] for name in part], dtype=np.int64)
