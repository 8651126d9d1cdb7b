"""RAPv1. Expected under the root: RAP_annotation/RAP_annotation.mat and the images in RAP_dataset/.

The file holds one structure; its fields are used by position, as everyone who reads it does: 0 the five random
partitions (each with training and test indices, from 1), 1 the labels (images, 92), 3 the English attribute
names, 5 the image names. The first 51 attributes are the benchmark's, the first partition is the official one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ramatch.data.benchmarks.common import Distribution, Owned, check_names, label_rows, load_mat, strings, unwrap
from ramatch.data.classes import class_list
from ramatch.errors import RamatchError

PAGE = "https://www.rapdataset.com"
LISTS = ("rap_classes51",)
SPLIT = "frequency"


def load(files: Distribution) -> Owned:
    path = files.need("annotation file", "RAP_annotation/RAP_annotation.mat", "RAP_annotation.mat")
    prefix = files.images("RAP_dataset", "images")
    content = load_mat(path)
    if "RAP_annotation" not in content:
        raise RamatchError(f"{path}: no variable RAP_annotation in it")
    record = unwrap(content["RAP_annotation"])
    fields = list(record) if record is not None else []
    if len(fields) < 6 or np.ndim(fields[1]) != 2:
        raise RamatchError(f"{path}: not the structure of RAPv1 (RAPv2 is another data set)")
    classes = class_list(*LISTS)
    labels, attributes, images = np.asarray(fields[1]), strings(fields[3]), strings(fields[5])
    if labels.shape[1] < len(classes) or labels.shape[0] != len(images):
        raise RamatchError(f"{path}: labels of shape {labels.shape} for {len(images)} images; expected (images, 92)")
    # eight attributes are spelled differently by the owners (attach-SingleShoulderBag for SSBag, ...)
    check_names(attributes[: len(classes)], classes, path, at_least=40)
    rows = label_rows(labels[:, : len(classes)], classes)
    train, test = (
        [(f"{prefix}/{images[i]}", rows[i]) for i in part] for part in _partition(fields[0], len(images), path)
    )
    return Owned(train, test)


def _partition(field: Any, count: int, path: Path) -> tuple[list[int], list[int]]:
    """Training and test indices (from 0) of the first partition."""
    first = unwrap(np.asarray(field).ravel()[0])
    parts = [np.asarray(unwrap(p)).ravel().astype(int) - 1 for p in list(first)[:2]] if np.ndim(first) == 0 else []
    if len(parts) != 2 or any(p.size == 0 or p.min() < 0 or p.max() >= count for p in parts):
        raise RamatchError(f"{path}: the partition is not a pair of training and test indices within the images")
    if set(parts[0].tolist()) & set(parts[1].tolist()):
        raise RamatchError(f"{path}: training and test images of the partition overlap")
    return parts[0].tolist(), parts[1].tolist()
