"""MLRSNet. Expected under the root: Labels/<category>.csv and Images/<category>/<image>.jpg (46 categories).

Each table has a header `image,airplane,airport,...` and one row of 0 and 1 per image. The distribution holds no
list of test images, and the paper only says that a fifth (21K) are tested on: we take a fifth of each category,
chosen by a hash of the image's name, which gives the same images everywhere. Use `test_list` for another choice.
"""

from __future__ import annotations

from ramatch.data.benchmarks.common import Distribution, Owned, read_one_hot
from ramatch.data.classes import class_list
from ramatch.data.splits import hold_out
from ramatch.errors import RamatchError

PAGE = "https://data.mendeley.com/datasets/7j9bv9vwsx"
LISTS = ("mlrsnet_classes60",)
SPLIT = "random"
TEST_SHARE = 0.2
SALT = "0:"


def load(distribution: Distribution) -> Owned:
    tables = distribution.need("folder of label tables", "Labels", "labels")
    images = distribution.images("Images", "images")
    files = sorted(tables.glob("*.csv"))
    if not files:
        raise RamatchError(f"{tables}: no .csv file in it; download it from {PAGE}")
    owned = Owned([], [], [f"{len(files)} categories; test images: {TEST_SHARE:.0%} of each, by hash"])
    for file in files:
        rows = read_one_hot(file, class_list(*LISTS))
        held_out = set(hold_out(list(rows), round(len(rows) * TEST_SHARE), SALT))
        for place, (name, labels) in enumerate(rows.items()):
            (owned.test if place in held_out else owned.train).append((f"{images}/{file.stem}/{name}", labels))
    return owned
