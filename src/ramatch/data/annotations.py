"""What every annotation format becomes: records, classes and an account of how they were understood."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ramatch.data.images import load_image
from ramatch.data.sources import ImageSource, Locator
from ramatch.errors import RamatchError
from ramatch.files import expect, read_json, shown

EXAMPLES = 5  # of each kind of problem, kept for the summary


@dataclass(frozen=True, slots=True)
class Box:
    """Where a label is: corners (left, top, right, bottom) in pixels of the upright picture."""

    label: str
    corners: tuple[float, float, float, float]
    crowd: bool = False  # COCO: a group outlined as one
    difficult: bool = False  # VOC: hard to recognise without context


@dataclass(frozen=True, slots=True)
class Record:
    """One picture and its labels, in the order of the annotation file, each once."""

    key: str
    labels: tuple[str, ...]
    image: ImageSource | None = None  # None only when missing pictures were asked to be kept
    boxes: tuple[Box, ...] = ()
    size: tuple[int, int] | None = None  # (width, height) if the annotation file says so

    def load(self) -> Image.Image:
        """The picture, upright, RGB."""
        if self.image is None:
            raise RamatchError(f"{self.key}: the image is missing")
        return load_image(self.image.read(), name=str(self.image))


@dataclass
class Issue:
    """One kind of problem: how often, what was done about it, and the first few cases."""

    outcome: str
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Summary:
    """What was understood of an annotation file or folder, and what was wrong with it."""

    path: str
    format: str
    split: str | None = None
    images: int = 0
    classes: int = 0
    labels: int = 0  # (image, label) pairs
    unlabelled: int = 0  # images without any label
    notes: list[str] = field(default_factory=list)
    issues: dict[str, Issue] = field(default_factory=dict)

    def add_issue(self, kind: str, outcome: str, example: str) -> None:
        issue = self.issues.setdefault(kind, Issue(outcome))
        issue.count += 1
        if len(issue.examples) < EXAMPLES:
            issue.examples.append(example)

    def count(self, kind: str) -> int:
        """How often a kind of problem occurred (0 if never)."""
        return self.issues[kind].count if kind in self.issues else 0

    def headline(self) -> str:
        split = f", split {self.split}" if self.split else ""
        per_image = self.labels / self.images if self.images else 0.0
        return (
            f"{self.path}: {self.format}{split}; {self.images:,} images, {self.classes:,} classes, "
            f"{self.labels:,} labels ({per_image:.2f} per image)"
        )

    def to_text(self) -> str:
        lines = [self.headline()]
        lines += [f"  {note}" for note in self.notes]
        for kind, issue in self.issues.items():
            lines.append(f"  {kind}: {issue.count:,}, {issue.outcome}")
            lines += [f"    e.g. {example}" for example in issue.examples]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    __str__ = to_text


@dataclass
class Annotations:
    """A labelled set of pictures, whatever format it came from; its summary counts what is in it."""

    classes: tuple[str, ...]
    records: list[Record]
    summary: Summary

    def __post_init__(self) -> None:
        self.summary.images, self.summary.classes = len(self.records), len(self.classes)
        self.summary.labels = sum(len(r.labels) for r in self.records)
        self.summary.unlabelled = sum(not r.labels for r in self.records)

    @property
    def format(self) -> str:
        return self.summary.format

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def class_counts(self) -> dict[str, int]:
        """Number of images per class, in class order."""
        counts = Counter(label for record in self.records for label in record.labels)
        return {name: counts[name] for name in self.classes}

    def targets(self) -> Tensor:
        """(images, N) multi-hot, bool."""
        index = {name: i for i, name in enumerate(self.classes)}
        hot = torch.zeros(len(self.records), len(self.classes), dtype=torch.bool)
        for row, record in enumerate(self.records):
            hot[row, [index[label] for label in record.labels]] = True
        return hot

    def subset(self, indices: Iterable[int]) -> Annotations:
        """The records at `indices`; classes unchanged."""
        return self._with([self.records[i] for i in indices], self.classes)

    def without(self, keys: Iterable[str]) -> Annotations:
        """All but the records named, for example the unreadable ones that `check` found."""
        gone = set(keys)
        return self._with([r for r in self.records if r.key not in gone], self.classes)

    def restrict(self, classes: Sequence[str], *, drop_unlabelled: bool = False) -> Annotations:
        """Only these classes, in this order; `drop_unlabelled` also leaves out images with none of them."""
        keep = set(classes)
        records = []
        for record in self.records:
            labels = tuple(x for x in record.labels if x in keep)
            if labels or not drop_unlabelled:
                boxes = tuple(b for b in record.boxes if b.label in keep)
                records.append(replace(record, labels=labels, boxes=boxes))
        return self._with(records, tuple(classes))

    def _with(self, records: list[Record], classes: tuple[str, ...]) -> Annotations:
        summary = replace(self.summary, notes=list(self.summary.notes), issues=dict(self.summary.issues))
        return Annotations(classes, records, summary)


# ------------------------------------------------------------------------------- what readers are asked and answer


@dataclass
class Request:
    """What a reader is asked to read. path: the file or folder; files: several when a pattern was given; classes: if
    the caller knows them."""

    path: Path
    split: str | None = None
    classes: Sequence[str] | None = None
    files: Sequence[Path] = ()

    @property
    def suffix(self) -> str:
        return self.path.suffix.lower() if self.path.is_file() else ""

    @cached_property
    def json(self) -> Any:
        """Content of a .json file; None for anything else."""
        return read_json(self.path) if self.suffix == ".json" else None

    def entries(self, name: str) -> Iterator[tuple[str, Any]]:
        """(where, entry) of the list `name` in a JSON object."""
        content = expect(self.json, dict, f"{self.path}: the content")
        for number, entry in enumerate(expect(content.get(name), list, f'{self.path}: "{name}"')):
            yield f"{name}[{number}]", entry

    def objects(self, listing: str, *fields: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(file and place, object) of such a list; each must have `fields`, of them names and numbers only."""
        for place, entry in self.entries(listing):
            where = f"{self.path}: {place}"
            for name in fields:
                if not isinstance(expect(entry, dict, where).get(name), (str, int, float)):
                    raise RamatchError(f"{where} lacks the field '{name}'")
            yield where, expect(entry, dict, where)


@dataclass(slots=True)
class Row:
    """What a reader found for one image, before cleaning. Labels may be names or indices into the classes."""

    key: str
    labels: list[Any]
    image: ImageSource | None = None  # set by readers that know; else the key is looked up under the roots
    boxes: list[Box] = field(default_factory=list)
    size: tuple[int, int] | None = None
    where: str = ""  # line or entry, for messages


@dataclass
class Reading:
    """A reader's answer: rows, the classes if the format declares them, and where images may be."""

    rows: list[Row] = field(default_factory=list)
    classes: list[str] | None = None
    roots: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    issues: list[tuple[str, str, str]] = field(default_factory=list)  # (kind, outcome, example)
    one_label_per_row: bool = False  # several rows per image are then the normal case


def locate(row: Row, locator: Locator, summary: Summary) -> tuple[ImageSource | None, str]:
    """A row's image, None if it has none or it is not there, and the name it was found by; what was odd is counted."""
    name = row.key.strip()
    if not name:
        summary.add_issue("empty row", "skipped", row.where or shown(row.labels))
        return None, name
    image, key = locator.find(name)
    if image is None:
        summary.add_issue("missing image", "left out", f"{row.where}: {name}".removeprefix(": "))
    elif key != name:
        summary.add_issue("foreign root path", "repaired", f"{name} -> {key}")
    return image, key
