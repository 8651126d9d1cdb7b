"""`check`: what a data set looks like to us, before anything is trained on it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from ramatch.data.annotations import Annotations, Record
from ramatch.data.records import SAME_CLASS, Paths, list_splits, read_annotations
from ramatch.errors import RamatchError

BROKEN = ("missing image", "unknown label", "dangling annotation", "missing annotation")
SAMPLES = 5  # images listed, evenly spaced
THREADS = 4  # that decode
PROBLEMS = (*BROKEN, "duplicate class", SAME_CLASS)


@dataclass
class Part:
    """One split: its annotations and what decoding its images showed."""

    annotations: Annotations
    decoded: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)  # key -> reason
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (width, height)

    def to_dict(self) -> dict[str, Any]:
        records = self.annotations.records
        per_image = [len(r.labels) for r in records]
        counts = self.annotations.class_counts()
        return {
            **self.annotations.summary.to_dict(),
            "class_names": list(self.annotations.classes),
            "labels_per_image": {f.__name__: f(per_image) for f in (min, median, mean, max)},
            "class_counts": counts,
            "classes_without_images": [name for name, count in counts.items() if count == 0],
            "boxes": sum(len(r.boxes) for r in records),
            "samples": [[r.key, list(r.labels)] for r in records[:: max(1, len(records) // SAMPLES)][:SAMPLES]],
            "decoded": self.decoded,
            "unreadable": dict(self.unreadable),
            "sizes": {f"{w}x{h}": times for (w, h), times in self.sizes.most_common()},
        }

    def to_text(self, top: int | None = 20) -> str:
        facts = self.to_dict()
        per_image = facts["labels_per_image"]
        lines = [
            self.annotations.summary.to_text(),
            f"  labels per image: {per_image['min']} to {per_image['max']}, median {per_image['median']:g}, "
            f"mean {per_image['mean']:.2f}; {facts['unlabelled']:,} images without any",
        ]
        if facts["boxes"]:
            lines.append(f"  boxes: {facts['boxes']:,}")
        if self.decoded:
            shapes = ", ".join(f"{s} ({n:,})" for s, n in list(facts["sizes"].items())[:4])
            lines.append(f"  decoded {self.decoded:,} images, {len(self.unreadable):,} unreadable; sizes {shapes}")
            lines += [f"    {reason}" for reason in list(self.unreadable.values())[:10]]
        lines += self._class_lines(facts["class_counts"], top)
        if empty := facts["classes_without_images"]:
            lines.append(f"  no image has: {', '.join(empty[:10])}{' ...' if len(empty) > 10 else ''}")
        lines.append("  samples")
        lines += [f"    {key}: {', '.join(labels) or '(none)'}" for key, labels in facts["samples"]]
        return "\n".join(lines)

    def _class_lines(self, counts: dict[str, int], top: int | None) -> list[str]:
        ranked = sorted(counts.items(), key=lambda item: -item[1])
        width, most = max(map(len, counts)), max(ranked[0][1], 1)
        lines = [f"    {name:<{width}} {n:>8,} {'#' * round(30 * n / most)}".rstrip() for name, n in ranked]
        title = "  images per class"
        if top is not None and len(lines) > top:
            title += " (most and least frequent)"
            least = top // 4
            lines[top - least : len(lines) - least] = [f"    ... {len(lines) - top} more"]
        return [title, *lines]


@dataclass
class Report:
    """What `check` found: one part per split."""

    path: str
    parts: dict[str, Part] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # split -> why it could not be read

    @property
    def ok(self) -> bool:
        """Everything could be read, and no problem of the kinds in PROBLEMS was found."""
        parts = self.parts.values()
        found = {kind for part in parts for kind in part.annotations.summary.issues}
        return not self.failures and not any(part.unreadable for part in parts) and found.isdisjoint(PROBLEMS)

    def to_dict(self) -> dict[str, Any]:
        parts = {name: part.to_dict() for name, part in self.parts.items()}
        return {"path": self.path, "ok": self.ok, "splits": parts, "failures": dict(self.failures)}

    def to_text(self, top: int | None = 20) -> str:
        """top: classes listed per split (None: all)."""
        blocks = [part.to_text(top) for part in self.parts.values()]
        blocks += [f"split {name} could not be read: {why}" for name, why in self.failures.items()]
        blocks.append("no problems found" if self.ok else "problems found: see above")
        return "\n\n".join(blocks)

    __str__ = to_text


def check(
    path: str | os.PathLike,
    *,
    split: str | None = None,
    classes: Sequence[str] | str | os.PathLike | None = None,
    images_root: Paths | None = None,
    format: str | None = None,
    decode: bool = False,
) -> Report:
    """Read a data set without training on it; with several splits and none named, all of them.

    decode: also decode every image and report those that cannot be.
    """
    names: list[str | None] = [split] if split is not None else list(list_splits(path)) or [None]
    report = Report(os.fspath(path))
    for name in names:
        try:
            annotations = read_annotations(path, classes=classes, images_root=images_root, split=name, format=format)
        except RamatchError as error:
            if len(names) == 1:
                raise
            report.failures[str(name)] = str(error)
            continue
        report.parts[name or "all"] = part = Part(annotations)
        if decode:
            with ThreadPoolExecutor(THREADS) as pool:
                for record, found in zip(annotations, pool.map(_size_or_reason, annotations), strict=True):
                    part.decoded += 1
                    if isinstance(found, str):
                        part.unreadable[record.key] = found
                    else:
                        part.sizes[found] += 1
    return report


def _size_or_reason(record: Record) -> tuple[int, int] | str:
    """Size of the picture, or why it cannot be decoded."""
    try:
        return record.load().size
    except RamatchError as error:
        return str(error)
