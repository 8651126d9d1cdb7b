"""PA100K. Expected under the root: annotation.mat and the images in release_data/release_data/ (or data/)."""

from __future__ import annotations

import numpy as np

from ramatch.data.benchmarks.common import Distribution, Owned, Pairs, check_names, label_rows, load_mat, strings
from ramatch.data.classes import class_list
from ramatch.errors import RamatchError

PAGE = "https://github.com/xh-liu/HydraPlus-Net"
LISTS = ("pa100k_classes26",)
SPLIT = "frequency"


def load(files: Distribution) -> Owned:
    """The official training and test sets; the validation set is left aside."""
    path = files.need("annotation file", "annotation.mat", "annotation/annotation.mat")
    prefix = files.images("release_data/release_data", "release_data", "data", "images")
    content = load_mat(path)
    keys = ("attributes", "train_images_name", "train_label", "test_images_name", "test_label")
    absent = [k for k in keys if k not in content]
    if absent:
        raise RamatchError(f"{path}: no variable {', '.join(absent)} in it; not PA100K's annotation file")
    classes = class_list(*LISTS)
    check_names(strings(content["attributes"]), classes, path)

    def pairs(part: str) -> Pairs:
        images, labels = strings(content[f"{part}_images_name"]), np.asarray(content[f"{part}_label"])
        if labels.shape != (len(images), len(classes)):
            raise RamatchError(f"{path}: {part}_label has shape {labels.shape} for {len(images)} images")
        return [(f"{prefix}/{n}", row) for n, row in zip(images, label_rows(labels, classes), strict=True)]

    return Owned(pairs("train"), pairs("test"))
