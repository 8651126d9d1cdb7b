"""Fit the map from scores to probabilities on held-out images, save it with the model, say what it changed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..data.annotations import Annotations, Record
from ..data.captions import read_captions
from ..data.records import list_splits, read_annotations, read_classes
from ..data.splits import find_data, hold_out, read_split
from ..data.tags import mine_tags
from ..errors import RamatchError
from ..modeling.checkpoints.folder import is_model_folder, model_folder, save_known
from ..modeling.checkpoints.hashes import write_hashes
from ..modeling.checkpoints.loading import bundled_model
from ..modeling.ram import RAM
from ..recognizer import Recognizer
from .calibration import FEATURES, Calibrator, Evidence
from .familiarity import known_words
from .models import Scores, TestSet, collect_scores, load_model, read_test, save_model, split_options
from .reliability import calibration_report, calibration_table

HELD_OUT_SPLITS = ("val", "validation", "calibration", "dev")
ENOUGH_IMAGES, ENOUGH_PAIRS = (
    50,
    100,
)  # see docs/training.md
MENTIONED = 3  # images whose captions must have a word for it to be a label


@dataclass(frozen=True)
class CalibrationResult:
    """The calibrator, where it was saved, ECE and F1 before and after on seen and unseen labels (fractions), and notes
    on which images were used."""

    calibrator: Calibrator
    path: Path
    report: dict[str, Any]
    notes: tuple[str, ...]

    def to_table(self, *, markdown: bool = False) -> str:
        return "\n".join([calibration_table(self.report, markdown=markdown), *self.notes])


@dataclass(frozen=True)
class Further:
    """What else to learn from than the calibrated labels' own images.

    known: words that the model learned with, or a file of them; they are saved with the model, and say which labels are
    strange to it. also: labelled data whose labels are unlike those of the data (their split `train`, where they have
    several), captions: data with captions, of which tags are made: all these say of which words probabilities are off.
    only: names of images, or files of them; of data that has any of these, nothing else is used.
    """

    known: Sequence[str] | str | None = None
    also: Sequence[str] = ()
    captions: Sequence[str] = ()
    only: Sequence[str] = ()

    def read(self, images_root: str | None) -> list[Annotations]:
        sets = [read_split(find_data(path), "train", images=images_root) for path in self.also]
        sets += [tagged(find_data(path), self.only, images_root) for path in self.captions]
        return [self.chosen(found) for found in sets]

    def chosen(self, data: Annotations) -> Annotations:
        names = set(self.only)
        rows = [i for i, record in enumerate(data.records) if record.key in names]
        return data.subset(rows) if rows else data


def tagged(path: Path, only: Sequence[str], images_root: str | None) -> Annotations:
    """Captioned images with the tags that their captions have in common."""
    found, names = read_captions(path, images_root), set(only)
    records = [r for r in found.records if r.key in names] or found.records
    tags = mine_tags([r.captions for r in records], min_images=MENTIONED)
    named = [tuple(compress(tags.names, row)) for row in tags.targets.tolist()]
    rows = [Record(r.key, labels, r.image) for r, labels in zip(records, named, strict=True)]
    return Annotations(tags.names, rows, found.summary)


def calibrate(
    model: str | Path,
    data: str | os.PathLike,
    *,
    out: str | Path | None = None,
    split: str | None = None,
    images_root: str | None = None,
    classes: Sequence[str] | str | None = None,
    further: Further = Further(),
    **options: Any,
) -> CalibrationResult:
    """Calibrate a model by its name (see `load_model`) and write calibration.json into its folder; with `out`, into a
    new folder with a copy of the model.

    Fitted on, in this order: `split` of the data if given; the images that `further.only` names; its validation split;
    the images that the model's own run held out; failing all these, a random `share` of what there is (of a shipped
    model or a plain CLIP all), with a note that the model may know them. Reported on the data's test_gzsl,
    seen and unseen labels apart, or else on a half of the images that fitting did not get. Options: `share`, and those
    of `load_model` and `collect_scores`, by name."""
    folder, path = _source(model, out), find_data(data)
    foreign = folder in (None, bundled_model(str(model)))  # it did not learn from this user's images
    share = options.pop("share", 1.0 if foreign else 0.2)
    loading, collecting = split_options(options, (load_model, collect_scores))
    held, notes = _held_out(path, folder, split, images_root, classes, share, further)
    test = None
    if path.is_dir() and (path / "test_gzsl.json").is_file() and not (split or "").startswith("test"):
        test = read_test(path, "gzsl", images_root=images_root)
        notes.append(f"reported on {test.note.replace(str(path), path.name)}, {len(test.annotations):,} images")
    others = further.read(images_root)
    recognizer = load_model(folder or model, **loading)
    ram = recognizer.ram
    if further.known is not None:
        words = read_classes(further.known) if isinstance(further.known, str) else further.known
        ram.known = known_words(ram, words)
        notes.append(f"familiarity: by {len(ram.known.unit):,} known words")
    fit = collect_scores(ram, held, what="held-out images", **collecting)
    evidence = [collect_scores(ram, other, what="further images", **collecting).evidence for other in others]
    shown, fit, seen = _parts(ram, fit, test, notes, collecting)
    calibrator = _fitted(fit, evidence, path, notes)
    before = shown.features[..., :2].mean(-1)
    before = np.clip(before, 0, 1) if ram.method is None else 0.5 + 0.5 * np.tanh(before / 2)  # cosines, or logits
    after = calibrator(shown.features, shown.words)
    report = calibration_report(before, after, shown.targets, seen=seen, threshold=calibrator.threshold)
    with _place(folder, out, recognizer, model) as place:
        files.write_json(place / "calibration.json", calibrator.to_dict())
        if further.known is not None and ram.known is not None:
            save_known(ram.known, place)
        files.write_json(place / "calibration_report.json", {"notes": notes, **report})
        write_hashes(place)
    written = folder if out is None else Path(out).expanduser()
    assert written is not None
    return CalibrationResult(calibrator, written / "calibration.json", report, tuple(notes))


def _source(model: str | Path, out: str | Path | None) -> Path | None:
    """The folder of a trained model, None of a plain CLIP; an error where there is no place to write to."""
    local, shipped = Path(model).expanduser().resolve(), bundled_model(str(model))  # a path is no shipped model's name
    folder = local if is_model_folder(local) else model_folder(model)  # here, one on disk comes before a shipped one
    if out is None and folder is None:
        raise RamatchError(f"{model} is not a model folder, which calibration could be saved in; give --out DIR")
    if out is None and folder == shipped:
        raise RamatchError(f"{model} is part of the installation; give --out DIR for a calibrated copy")
    return folder


@contextmanager
def _place(folder: Path | None, out: str | Path | None, recognizer: Recognizer, model: str | Path) -> Iterator[Path]:
    """The folder to write to: the model's own, or a new one with a copy of the model in it."""
    if out is None:
        assert folder is not None
        yield folder
        return
    with files.whole_folder(out) as place:
        save_model(recognizer, folder or model, place)
        yield place


def _parts(
    ram: RAM, fit: Scores, test: TestSet | None, notes: list[str], collecting: dict[str, Any]
) -> tuple[Scores, Scores, np.ndarray | None]:
    """What to report on, what to fit on, and which labels are seen ones."""
    if test is not None:
        shown = collect_scores(ram, test.annotations, what="test images", **collecting)
        return shown, fit, np.array([name in set(test.seen) for name in shown.labels])
    half = hold_out(fit.keys, 0.5, "half ")
    shown, fit = fit.rows(half), fit.rows(sorted(set(range(len(fit.keys))) - set(half)))
    notes.append(f"reported on {len(shown.keys):,} of the held-out images, which fitting did not get")
    return shown, fit, None


def _fitted(fit: Scores, evidence: list[Evidence], path: Path, notes: list[str]) -> Calibrator:
    images, there = len(fit.keys), int(fit.targets.sum())
    if not fit.targets.any() or fit.targets.all():
        raise RamatchError(f"{path}: the held-out images must show some labels and lack others; give more images")
    calibrator = Calibrator.fit(*fit.evidence, names=FEATURES)
    if evidence:
        calibrator = calibrator.with_doubt([fit.evidence, *evidence])
    notes.insert(0, f"fitted on {images:,} images and {len(fit.labels):,} labels")
    notes += [f"and on {len(e.targets):,} images and {e.targets.shape[1]:,} labels of other data" for e in evidence]
    if images < ENOUGH_IMAGES or there < ENOUGH_PAIRS:
        told = f"too little data to rely on: it was fitted on {images:,} images that show {there:,} labels in all"
        notes.append(f"{told}; give at least {ENOUGH_IMAGES} that show {ENOUGH_PAIRS}")
    return calibrator


def _held_out(
    path: Path,
    folder: Path | None,
    split: str | None,
    images_root: str | None,
    classes: Any,
    share: float,
    further: Further,
) -> tuple[Annotations, list[str]]:
    """Images to fit on, and a note on where they come from."""
    if split is not None:
        return read_annotations(path, split=split, classes=classes, images_root=images_root), [f"images: split {split}"]
    for name in HELD_OUT_SPLITS if path.is_dir() and not further.only else ():
        if name in list_splits(path):
            found = read_annotations(path, split=name, classes=classes, images_root=images_root)
            return found, [f"images: split {name}"]
    everything = read_split(path, "train", classes=classes, images=images_root)
    if (chosen := further.chosen(everything)) is not everything:
        return chosen, [f"images: the {len(chosen):,} that were named"]
    record = None if folder is None or folder.name != "model" else folder.parent / "validation.json"
    if record is not None and record.is_file():
        keys = set(files.read_json(record))
        rows = [i for i, r in enumerate(everything.records) if r.key in keys]
        if rows:
            return everything.subset(rows), [f"images: the {len(rows):,} that this model's run held out from training"]
    if not 0 < share <= 1:
        raise RamatchError(f"share must lie in (0, 1], got {share}")
    rows = hold_out([r.key for r in everything.records], float(share))
    part = f"all {len(rows):,}" if len(rows) == len(everything) else f"a random {100 * share:.0f} % ({len(rows):,})"
    known = "; if the model was trained on them, its probabilities will be too sure: give held-out images with split"
    return everything.subset(rows), [f"images: {part} of {path.name}{known if folder else ''}"]
