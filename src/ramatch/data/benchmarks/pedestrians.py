"""RAPv1 and PA100K: MATLAB files with a matrix of attributes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ramatch.data.benchmarks.common import Distribution, Owned, Pairs, check_names
from ramatch.data.classes import class_list
from ramatch.errors import RamatchError, require


def load_rap(files: Distribution) -> Owned:
    """RAPv1. Expected under the root: RAP_annotation/RAP_annotation.mat and the images in RAP_dataset/.

    The file holds one structure; its fields are used by position, as everyone who reads it does: 0 the five random
    partitions (each with training and test indices, from 1), 1 the labels (images, 92), 3 the English attribute
    names, 5 the image names. The first 51 attributes are the benchmark's, the first partition is the official one.
    """
    path = files.need("annotation file", "RAP_annotation/RAP_annotation.mat", "RAP_annotation.mat")
    prefix = files.images("RAP_dataset", "images")
    record = _load(path, "RAP_annotation")["RAP_annotation"]
    fields = list(record.values()) if isinstance(record, dict) else []
    if len(fields) < 6 or np.ndim(fields[1]) != 2:
        raise RamatchError(f"{path}: not the structure of RAPv1 (RAPv2 is another data set)")
    classes = class_list("rap_classes51")
    # eight attributes are spelled differently by the owners (attach-SingleShoulderBag for SSBag, ...)
    check_names(_strings(fields[3])[: len(classes)], classes, path, at_least=40)
    pairs = _pairs(path, prefix, fields[5], np.asarray(fields[1])[:, : len(classes)], classes)
    train, test = ([pairs[i] for i in part] for part in _partition(fields[0], len(pairs), path))
    return Owned(train, test)


def _partition(field: Any, count: int, path: Path) -> list[list[int]]:
    """Training and test indices (from 0) of the first partition."""
    first = next(iter(np.ravel(field)), None)
    parts = [np.ravel(part).astype(int) - 1 for part in list(first.values())[:2]] if isinstance(first, dict) else []
    if len(parts) != 2 or any(p.size == 0 or p.min() < 0 or p.max() >= count for p in parts):
        raise RamatchError(f"{path}: the partition is not a pair of training and test indices within the images")
    if set(parts[0].tolist()) & set(parts[1].tolist()):
        raise RamatchError(f"{path}: training and test images of the partition overlap")
    return [part.tolist() for part in parts]


def load_pa100k(files: Distribution) -> Owned:
    """PA100K. Expected under the root: annotation.mat and the images in release_data/release_data/ (or data/).

    The official training and test sets; the validation set is left aside.
    """
    path = files.need("annotation file", "annotation.mat", "annotation/annotation.mat")
    prefix = files.images("release_data/release_data", "release_data", "data", "images")
    parts = ("train_images_name", "train_label", "test_images_name", "test_label")
    content, classes = _load(path, "attributes", *parts), class_list("pa100k_classes26")
    check_names(_strings(content["attributes"]), classes, path)
    train, test = (
        _pairs(path, prefix, content[f"{part}_images_name"], np.atleast_2d(content[f"{part}_label"]), classes)
        for part in ("train", "test")
    )
    return Owned(train, test)


def _load(path: Path, *variables: str) -> dict[str, Any]:
    scipy_io = require("scipy.io", extra="data")
    try:
        content = scipy_io.loadmat(str(path), simplify_cells=True)
    except NotImplementedError as error:  # v7.3 is another format (HDF5)
        raise RamatchError(f"{path}: MATLAB v7.3 file; the owners' file is older, download it again") from error
    except Exception as error:  # the parser raises many kinds on rubbish
        raise RamatchError(f"{path}: not a readable MATLAB file ({error})") from error
    if absent := [name for name in variables if name not in content]:
        raise RamatchError(f"{path}: no variable {', '.join(absent)} in it; not the owners' annotation file")
    return content


def _strings(cells: Any) -> list[str]:
    return [str(cell).strip() for cell in np.ravel(cells)]


def _pairs(path: Path, prefix: str, names: Any, labels: np.ndarray, classes: Sequence[str]) -> Pairs:
    images = _strings(names)
    if labels.shape != (len(images), len(classes)):
        raise RamatchError(
            f"{path}: labels of shape {labels.shape} for {len(images)} images and {len(classes)} classes"
        )
    shown = ([classes[i] for i in np.flatnonzero(row == 1).tolist()] for row in labels)
    return [(f"{prefix}/{name}", found) for name, found in zip(images, shown, strict=True)]
