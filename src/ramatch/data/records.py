"""`read_annotations`: any of the usual annotation formats, recognised and cleaned, with an account of it."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from ramatch.data.annotations import Annotations, Reading, Record, Request, Row, Summary, locate
from ramatch.data.formats import boxes, coco, hub, lists, sidecars, tables, voc, webdataset
from ramatch.data.images import natural_key
from ramatch.data.sources import Locator
from ramatch.errors import RamatchError
from ramatch.files import read_lines, shown
from ramatch.labels import tidy

READERS: dict[str, ModuleType] = {  # in the order in which they are tried
    "lists": lists,
    "boxes": boxes,
    "coco": coco,
    "table": tables,
    "voc": voc,
    "hub": hub,
    "webdataset": webdataset,
    "sidecars": sidecars,
}
ANNOTATION_SUFFIXES = (".json", *tables.SUFFIXES)
NOT_ANNOTATIONS = re.compile(r"^(dataset_infos?|dataset_dict|state|config|captions.*|person_keypoints.*)\.json$")

SAME_CLASS = "classes that differ only in case"

Unknown = Literal["drop", "error", "add"]
Missing = Literal["drop", "error", "keep"]
Empty = Literal["keep", "drop", "error"]
Paths = str | os.PathLike | Iterable[str | os.PathLike]


def read_annotations(
    path: str | os.PathLike,
    *,
    classes: Sequence[str] | str | os.PathLike | None = None,
    images_root: Paths | None = None,
    split: str | None = None,
    format: str | None = None,
    unknown: Unknown = "drop",
    missing: Missing = "drop",
    empty: Empty = "keep",
) -> Annotations:
    """Read a labelled set of images; `annotations.summary` says what was understood and what was wrong.

    path: annotation file, folder, or a pattern of tar or parquet files (`shards-*.tar`).
    classes: names, or a text file of them; by default those the format declares, else those that occur.
    images_root: folder(s) or tar file(s) to look for images in, before the usual places.
    split: `train`, `test_gzsl`, ...: which file, list or rows of several. format: one of READERS, to force it.
    unknown: a label outside the classes is dropped (its image stays), an error, or added to the classes.
    missing: an image that is not there is left out, an error, or kept without looking for it.
    empty: an image without labels is kept (it shows none of them), left out, or an error.

    docs/data.md lists the awkward cases (a label or image twice, another machine's root in a path, other spellings).
    """
    chosen = {"unknown": (unknown, Unknown), "missing": (missing, Missing), "empty": (empty, Empty)}
    for option, (value, choices) in chosen.items():
        if value not in get_args(choices):
            raise RamatchError(f"{option} must be one of {', '.join(get_args(choices))}, not {value!r}")
    names = read_classes(classes) if isinstance(classes, (str, os.PathLike)) else classes
    request = _resolve(path, split, names)
    reader = _reader(request, format)
    reading: Reading = reader.read(request)
    roots = [images_root] if isinstance(images_root, (str, os.PathLike)) else list(images_root or [])
    locator = Locator([*roots, *reading.roots], prefer=f"{split or ''} {request.path.stem}")
    summary = Summary(str(request.path), reader.DESCRIPTION, split, notes=reading.notes)
    if request.files:
        summary.notes.insert(0, f"{len(request.files)} file(s) match {Path(path).name}")
    for issue in reading.issues:
        summary.add_issue(*issue)
    declared = reading.classes if names is None else names
    return _Cleaner(reading, declared, summary, locator, unknown, missing, empty).run()


def read_classes(path: str | os.PathLike) -> list[str]:
    """Class names from a text file, one per line; blank lines and lines starting with # are skipped."""
    if not os.path.isfile(path):
        raise RamatchError(f"no such class list: {path}")
    names = [line for line in read_lines(Path(path)) if not line.startswith("#")]
    if not names:
        raise RamatchError(f"{path}: no class names in it")
    return names


def list_splits(path: str | os.PathLike) -> list[str]:
    """Names that `split` can take for this path; empty when there is only one thing to read."""
    folder = Path(os.path.expanduser(path))
    request = Request(folder)
    if folder.is_file():
        return tables.splits(request) if tables.detect(request) else []
    if not folder.is_dir():
        if glob.glob(str(folder)):
            return []  # a pattern names its files itself
        raise RamatchError(f"no such file or folder: {path}")
    if voc.detect(request) and not hub.is_saved(folder):
        return voc.splits(folder)
    files = _annotation_files(folder)
    if hub.is_saved(folder) or not files:
        return hub.splits(folder)
    return [p.stem for p in files] if len(files) > 1 else []


def _resolve(path: str | os.PathLike, split: str | None, classes: Sequence[str] | None) -> Request:
    """The file or folder that is meant."""
    where = Path(os.path.expanduser(path))
    if not where.exists():
        hits = sorted((Path(p) for p in glob.glob(str(where))), key=natural_key)
        if not hits:
            raise RamatchError(f"no such file or folder: {where}")
        return Request(hits[0], split, classes, files=hits)
    folder = Request(where, split, classes)
    if where.is_file() or hub.is_saved(where) or voc.detect(folder):
        return folder
    files = _annotation_files(where)
    chosen = [p for p in files if split is None or _is_split(p.stem, split)]
    if len(chosen) > 1 and split is not None:
        chosen = [p for p in chosen if p.stem.casefold() == split.casefold()] or chosen
    if len(chosen) == 1:
        request = Request(chosen[0], split, classes)
        # some other JSON file may lie in a folder of images with sidecars
        return request if split or _recognised(request) else folder
    if len(chosen) > 1:
        names = ", ".join(p.stem for p in chosen[:12])
        raise RamatchError(f"{where}: several annotation files; name one with split: {names}")
    if split is not None and (where / split).is_dir():
        return Request(where / split, None, classes)
    if split is not None and not (hub.detect(folder) or webdataset.detect(folder)):
        known = ", ".join(p.stem for p in files) or "none found"
        raise RamatchError(f"{where}: no split {split!r}; annotation files here: {known}")
    return folder


def _annotation_files(folder: Path) -> list[Path]:
    places = [place for place in (folder / "Annotations", folder / "annotations", folder) if place.is_dir()]
    named = (p for place in places for p in place.iterdir() if p.suffix.lower() in ANNOTATION_SUFFIXES)
    found = {p.resolve(): p for p in named if not NOT_ANNOTATIONS.match(p.name)}  # on some systems the two are one
    return sorted(found.values(), key=natural_key)


def _is_split(stem: str, split: str) -> bool:
    """`train` names train.json and instances_train2017.json."""
    words = re.split(r"[_.-]", stem.casefold())
    return split.casefold() in (stem.casefold(), *words, *(w.rstrip("0123456789") for w in words))


def _recognised(request: Request) -> ModuleType | None:
    return next((reader for reader in READERS.values() if reader.detect(request)), None)


def _reader(request: Request, format: str | None) -> ModuleType:
    if format is not None and format not in READERS:
        raise RamatchError(f"unknown annotation format {format!r}; there are {', '.join(READERS)}")
    reader = READERS[format] if format else _recognised(request)
    if reader is None:
        known = "; ".join(reader.DESCRIPTION for reader in READERS.values())
        raise RamatchError(f"{request.path}: not recognised as any annotation format ({known})")
    return reader


@dataclass
class _Cleaner:
    """Rows as a reader found them to records, every oddity counted."""

    reading: Reading
    declared: Sequence[str] | None
    summary: Summary
    locator: Locator
    unknown: Unknown
    missing: Missing
    empty: Empty

    def __post_init__(self) -> None:
        # class numbers count the names as declared, repeated ones too
        self.order = None if self.declared is None else [tidy(name) for name in self.declared]
        if self.order is None:
            labels = {self._text(label, row) for row in self.reading.rows for label in row.labels}
            self.classes = dict.fromkeys(sorted(sorted(labels - {""}), key=natural_key))
        else:
            self.classes = dict.fromkeys(self.order)
            for name in (Counter(self.order) - Counter(list(self.classes))).elements():
                self.summary.add_issue("duplicate class", "counted once", name)
        self.by_spelling: dict[str, str | None] = {}
        by_case: dict[str, str] = {}
        for name in self.classes:  # a spelling that two classes share stands for neither
            key = loose(name)
            self.by_spelling[key] = None if key in self.by_spelling else name
            first = by_case.setdefault(name.casefold(), name)
            if first != name:
                self.summary.add_issue(SAME_CLASS, "kept as several classes", f"{first}, {name}")

    def run(self) -> Annotations:
        records: dict[str, Record] = {}
        for row in self.reading.rows:
            record = self._record(row)
            if record is None:
                continue
            earlier = records.get(record.key)
            if earlier is not None:
                if not self.reading.one_label_per_row:
                    example = f"{row.where}: {record.key}"
                    self.summary.add_issue("duplicate image", "merged, with the labels of both", example)
                record = _merge(earlier, record)
            records[record.key] = record
        kept = self._without_empty(list(records.values()))
        lost = self.summary.issues.get("missing image")
        if not kept and lost:
            raise RamatchError(
                f"{self.summary.path}: none of its {lost.count:,} images was found, for example {lost.examples[0]}; "
                f"looked in {self.locator.describe() or 'no folder'}; say where they are with images_root"
                + "".join(f"; {note}" for note in self.summary.notes)
            )
        if not kept or not self.classes:
            lacking = "labels in it; give the class names" if kept else "images in it"
            raise RamatchError(f"{self.summary.path}: no {lacking}")
        return Annotations(tuple(self.classes), kept, self.summary)

    def _record(self, row: Row) -> Record | None:
        key, image = row.key.strip(), row.image
        if image is None and not (key and self.missing == "keep"):
            image, key = locate(row, self.locator, self.summary)
            if image is None and key and self.missing == "error":
                where = f"{self.summary.path}: {row.where}"
                raise RamatchError(f"{where}: image {row.key} not found in {self.locator.describe()}")
            if image is None:
                return None
        named = [(self._class_of(box.label), box) for box in row.boxes]
        boxes = tuple(replace(box, label=name) for name, box in named if name is not None)
        return Record(key, self._labels(row), image, boxes, row.size)

    def _labels(self, row: Row) -> tuple[str, ...]:
        labels: dict[str, None] = {}
        for raw in row.labels:
            text = self._text(raw, row)
            if not text:
                self.summary.add_issue("empty label", "skipped", f"{row.where}: {row.key}")
                continue
            name = self._class_of(raw)
            if name is not None and name != text and isinstance(raw, str):
                self.summary.add_issue("respelled label", "taken as the class", f"{text} -> {name}")
            name = name or self._unknown(text, row)
            if name is None:
                continue
            if name in labels:
                self.summary.add_issue("duplicate label", "counted once", f"{row.where}: {row.key}: {name}")
            labels[name] = None
        return tuple(labels)

    def _text(self, raw: Any, row: Row) -> str:
        """A label as text: the one place where strangers' labels are checked."""
        if raw is None or isinstance(raw, (str, int, float)):
            return tidy("" if raw is None else str(raw))
        label = f"{row.where}: {row.key} has the label {shown(raw)}"
        raise RamatchError(f"{self.summary.path}: {label}; expected a name or a number")

    def _class_of(self, raw: Any) -> str | None:
        if isinstance(raw, int) and not isinstance(raw, bool) and self.order is not None:
            return self.order[raw] if 0 <= raw < len(self.order) else None
        text = tidy(str(raw))
        return text if text in self.classes else self.by_spelling.get(loose(text))

    def _unknown(self, text: str, row: Row) -> str | None:
        if self.unknown == "error":
            raise RamatchError(
                f"{self.summary.path}: {row.where}: {row.key} has the label {text!r}, which is not among the "
                f"{len(self.classes)} classes; correct it, or read with unknown='drop' or 'add'"
            )
        if self.unknown == "add":
            self.summary.add_issue("unknown label", "added to the classes", f"{row.where}: {text}")
            self.classes[text] = None
            return text
        self.summary.add_issue("unknown label", "dropped, its image kept", f"{row.where}: {row.key}: {text}")
        return None

    def _without_empty(self, records: list[Record]) -> list[Record]:
        bare = [r for r in records if not r.labels]
        if bare and self.empty == "error":
            raise RamatchError(f"{self.summary.path}: {len(bare):,} images have no label, first {bare[0].key}")
        outcome = "kept, showing none of the classes" if self.empty == "keep" else "left out"
        for record in bare:
            self.summary.add_issue("image without labels", outcome, record.key)
        return records if self.empty == "keep" else [r for r in records if r.labels]


def loose(label: str) -> str:
    """Spelling without case, spaces, underscores and hyphens."""
    return re.sub(r"[\s_\-]+", "", label).casefold()


def _merge(a: Record, b: Record) -> Record:
    labels = tuple(dict.fromkeys(a.labels + b.labels))
    return replace(a, labels=labels, image=a.image or b.image, boxes=a.boxes + b.boxes, size=a.size or b.size)
