"""MLRSNet. Expected under the root: Labels/<category>.csv and Images/<category>/<image>.jpg (46 categories).

Each table has a header `image,airplane,airport,...` and one row of 0 and 1 per image. The distribution holds no
list of test images, and the paper only says that a fifth (21K) are tested on: we take a fifth of each category,
chosen by a hash of the image's name, which gives the same images everywhere. Use `test_list` for another choice.
"""

from __future__ import annotations

from pathlib import Path

from ramatch.data.benchmarks.common import Owned, by_hash, need, read_one_hot, relative
from ramatch.data.classes import class_list
from ramatch.errors import RamatchError

PAGE = "https://data.mendeley.com/datasets/7j9bv9vwsx"
LISTS = ("mlrsnet_classes60",)
SPLIT = "random"
TEST_SHARE = 0.2
SEED = 0


def load(root: Path) -> Owned:
    tables = need(root, "Labels", "labels", what="folder of label tables", page=PAGE)
    images = relative(need(root, "Images", "images", what="image folder", page=PAGE), root)
    files = sorted(tables.glob("*.csv"))
    if not files:
        raise RamatchError(f"{tables}: no .csv file in it; download it from {PAGE}")
    owned = Owned([], [], [f"{len(files)} categories; test images: {TEST_SHARE:.0%} of each, by hash"])
    for file in files:
        rows = read_one_hot(file, class_list(*LISTS))
        held_out = set(by_hash(rows, SEED)[: round(len(rows) * TEST_SHARE)])
        for name, labels in rows.items():
            (owned.test if name in held_out else owned.train).append((f"{images}/{file.stem}/{name}", labels))
    return owned
