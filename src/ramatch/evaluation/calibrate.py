"""Fit the map from scores to probabilities on held-out images, save it with the model, say what it changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..data.annotations import Annotations
from ..data.records import list_splits, read_annotations
from ..data.splits import find_data, hold_out, read_split
from ..errors import RamatchError
from ..modeling.checkpoints.folder import is_model_folder
from ..modeling.checkpoints.hashes import write_hashes
from ..modeling.checkpoints.loading import read_json
from .calibration import CalibrationSettings, Calibrator
from .models import FEATURES, collect_scores, load_model, read_test, split_options
from .reliability import calibration_table

HELD_OUT_SPLITS = ("val", "validation", "calibration", "dev")


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


def calibrate(
    model: str | Path,
    data: str | os.PathLike,
    *,
    split: str | None = None,
    images_root: str | None = None,
    classes: Sequence[str] | str | None = None,
    share: float = 0.2,
    settings: CalibrationSettings | None = None,
    **options: Any,
) -> CalibrationResult:
    """Calibrate a model folder (or the model of a run folder) and write calibration.json into it.

    Fitted on, in this order: `split` of the data if given; its validation split; the images that the model's own run
    held out; failing all these, a random `share` of what there is, with a note that the model may know them. Reported
    on the data's test_gzsl, seen and unseen labels apart, or else on a half of the images that fitting did not get.
    Options: those of `load_model` and `collect_scores`, by name."""
    folder = Path(model).expanduser()
    folder = folder / "model" if is_model_folder(folder / "model") else folder
    if not is_model_folder(folder):
        raise RamatchError(f"{model} is not a model folder; calibration is saved with a trained model (ramatch train)")
    path = find_data(data)
    loading, collecting = split_options(options, (load_model, collect_scores))
    held, notes = _held_out(path, folder, split, images_root, classes, share)
    test = None
    if path.is_dir() and (path / "test_gzsl.json").is_file() and not (split or "").startswith("test"):
        test = read_test(path, "gzsl", images_root=images_root)
        notes.append(f"reported on {test.note}, {len(test.annotations):,} images")
    ram = load_model(folder, **loading).ram
    fit = collect_scores(ram, held, what="held-out images", **collecting)
    seen = None
    if test is not None:
        shown = collect_scores(ram, test.annotations, what="test images", **collecting)
        seen = np.array([name in set(test.seen) for name in shown.labels])
    else:
        half = hold_out(fit.keys, 0.5, "half ")
        shown, fit = fit.rows(half), fit.rows(sorted(set(range(len(fit.keys))) - set(half)))
        notes.append(f"reported on {len(shown.keys):,} of the held-out images, which fitting did not get")
    if not fit.targets.any() or fit.targets.all():
        raise RamatchError(f"{path}: the held-out images must show some labels and lack others; give more images")
    calibrator = Calibrator.fit(fit.features, fit.targets, fit.labels, settings=settings, feature_names=FEATURES)
    notes.insert(0, f"fitted on {len(fit.keys):,} images and {len(fit.labels):,} labels")
    before = np.clip(shown.features[..., :2].mean(-1), 0, 1)
    report = calibrator.report(shown.features, shown.targets, seen, classes=shown.labels, before=before)
    target = folder / "calibration.json"
    files.write_json(target, calibrator.to_dict())
    files.write_json(folder / "calibration_report.json", {"notes": notes, **report})
    write_hashes(folder)
    return CalibrationResult(calibrator, target, report, tuple(notes))


def _held_out(
    path: Path, folder: Path, split: str | None, images_root: str | None, classes: Any, share: float
) -> tuple[Annotations, list[str]]:
    """Images to fit on, and a note on where they come from."""
    if split is not None:
        return read_annotations(path, split=split, classes=classes, images_root=images_root), [f"images: split {split}"]
    for name in HELD_OUT_SPLITS if path.is_dir() else ():
        if name in list_splits(path):
            found = read_annotations(path, split=name, classes=classes, images_root=images_root)
            return found, [f"images: split {name}"]
    everything = read_split(path, "train", classes=classes, images=images_root)
    record = folder.parent / "validation.json"
    if folder.name == "model" and record.is_file():
        keys = set(read_json(record))
        rows = [i for i, r in enumerate(everything.records) if r.key in keys]
        if rows:
            return everything.subset(rows), [f"images: the {len(rows):,} that this model's run held out from training"]
    if not 0 < share <= 1:
        raise RamatchError(f"share must lie in (0, 1], got {share}")
    rows = hold_out([r.key for r in everything.records], float(share))
    return everything.subset(rows), [
        f"images: a random {100 * share:.0f} % ({len(rows):,}) of {everything.summary.path}; if the model was trained "
        "on them, its probabilities will be too sure: give held-out images with split"
    ]
