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
from ramatch.data.records import Paths, list_splits, read_annotations
from ramatch.errors import RamatchError


@dataclass
class Part:
    """One split: its annotations and what decoding its images showed."""

    annotations: Annotations
    samples: list[Record]
    decoded: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)  # key -> reason
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (width, height)

    def to_dict(self) -> dict[str, Any]:
        per_image = [len(r.labels) for r in self.annotations.records]
        counts = self.annotations.class_counts()
        return {
            **self.annotations.summary.to_dict(),
            "class_names": list(self.annotations.classes),
            "labels_per_image": {
                "min": min(per_image),
                "median": median(per_image),
                "mean": mean(per_image),
                "max": max(per_image),
            },
            "class_counts": counts,
            "classes_without_images": [name for name, count in counts.items() if count == 0],
            "boxes": sum(len(r.boxes) for r in self.annotations.records),
            "samples": [[r.key, list(r.labels)] for r in self.samples],
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
        lines.append("  samples")
        lines += [f"    {key}: {', '.join(labels) or '(none)'}" for key, labels in facts["samples"]]
        return "\n".join(lines)

    def _class_lines(self, counts: dict[str, int], top: int | None) -> list[str]:
        ranked = sorted(counts.items(), key=lambda item: -item[1])
        shown = ranked if top is None or len(ranked) <= top else ranked[: top - top // 4] + ranked[-(top // 4) :]
        width = max(len(name) for name, _ in shown)
        most = max(ranked[0][1], 1)
        lines = ["  images per class" + ("" if len(shown) == len(ranked) else " (most and least frequent)")]
        for place, (name, count) in enumerate(shown):
            if len(shown) < len(ranked) and place == len(shown) - top // 4:  # type: ignore[operator]
                lines.append(f"    ... {len(ranked) - len(shown)} more")
            lines.append(f"    {name:<{width}} {count:>8,} {'#' * round(30 * count / most)}".rstrip())
        empty = [name for name, count in counts.items() if count == 0]
        if empty:
            lines.append(f"  no image has: {', '.join(empty[:10])}{' ...' if len(empty) > 10 else ''}")
        return lines


@dataclass
class Report:
    """What `check` found: one part per split."""

    path: str
    parts: dict[str, Part]
    failures: dict[str, str] = field(default_factory=dict)  # split -> why it could not be read

    @property
    def ok(self) -> bool:
        """Everything could be read: no missing or unreadable image, no unknown label, no failed split."""
        bad = ("missing image", "unknown label", "dangling annotation", "missing annotation")
        return not self.failures and all(
            not part.unreadable and not any(part.annotations.summary.count(kind) for kind in bad)
            for part in self.parts.values()
        )

    def to_dict(self) -> dict[str, Any]:
        parts = {name: part.to_dict() for name, part in self.parts.items()}
        return {"path": self.path, "ok": self.ok, "splits": parts, "failures": dict(self.failures)}

    def to_text(self, top: int | None = 20) -> str:
        """top: classes listed per split (None: all)."""
        blocks = [part.to_text(top) for part in self.parts.values()]
        blocks += [f"split {name} could not be read: {why}" for name, why in self.failures.items()]
        blocks.append("no problems found" if self.ok else "problems found: see above")
        return "\n\n".join(blocks)

    def __str__(self) -> str:
        return self.to_text()


def check(
    path: str | os.PathLike,
    *,
    split: str | None = None,
    classes: Sequence[str] | str | os.PathLike | None = None,
    images_root: Paths | None = None,
    format: str | None = None,
    decode: bool = False,
    samples: int = 5,
    threads: int = 4,
) -> Report:
    """Read a data set without training on it; with several splits and none named, all of them.

    decode: also decode every image and report those that cannot be. samples: images listed, evenly spaced.
    """
    names: list[str | None] = [split] if split is not None else list(list_splits(path)) or [None]
    parts: dict[str, Part] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            annotations = read_annotations(path, classes=classes, images_root=images_root, split=name, format=format)
        except RamatchError as error:
            if len(names) == 1:
                raise
            failures[str(name)] = str(error)
            continue
        parts[name or "all"] = part = Part(annotations, _evenly(annotations.records, samples))
        if decode:
            _decode(part, threads)
    return Report(os.fspath(path), parts, failures)


def _decode(part: Part, threads: int) -> None:
    def attempt(record: Record) -> tuple[Record, tuple[int, int] | None, str]:
        try:
            return record, record.load().size, ""
        except RamatchError as error:
            return record, None, str(error)

    with ThreadPoolExecutor(threads) as pool:
        for record, size, reason in pool.map(attempt, part.annotations.records):
            part.decoded += 1
            if size is None:
                part.unreadable[record.key] = reason
            else:
                part.sizes[size] += 1


def _evenly(records: Sequence[Record], count: int) -> list[Record]:
    step = max(1, len(records) // max(1, count))
    return list(records[::step][:count])
