"""MLRSNet. Expected under the root: Labels/<category>.csv and Images/<category>/<image>.jpg (46 categories).

Each table has a header `image,airplane,airport,...` and one row of 0 and 1 per image. The distribution holds no
list of test images, and the paper only says that a fifth (21K) are tested on: we take a fifth of each category,
chosen by a hash of the image's name, which gives the same images everywhere. Use `test_list` for another choice.
"""

from __future__ import annotations

import csv
from pathlib import Path

from ramatch.data.benchmarks.common import Owned, Pairs, by_hash, check_names, need, relative
from ramatch.data.records import read_classes
from ramatch.errors import RamatchError

PAGE = "https://data.mendeley.com/datasets/7j9bv9vwsx"
CLASSES = Path(__file__).parents[1] / "classes" / "mlrsnet_classes60.txt"
TEST_SHARE = 0.2
SEED = 0


def load(root: Path) -> Owned:
    tables = need(root, "Labels", "labels", what="folder of label tables", page=PAGE)
    images = relative(need(root, "Images", "images", what="image folder", page=PAGE), root)
    files = sorted(tables.glob("*.csv"))
    if not files:
        raise RamatchError(f"{tables}: no .csv file in it; download it from {PAGE}")
    train: Pairs = []
    test: Pairs = []
    for file in files:
        rows = _rows(file)
        held_out = set(by_hash(rows, SEED)[: round(len(rows) * TEST_SHARE)])
        for name, labels in rows.items():
            (test if name in held_out else train).append((f"{images}/{file.stem}/{name}", labels))
    return Owned(train, test, [f"{len(files)} categories; test images: {TEST_SHARE:.0%} of each, by hash"])


def _rows(file: Path) -> dict[str, list[str]]:
    classes = read_classes(CLASSES)
    with open(file, newline="", encoding="utf-8-sig") as stream:
        table = [row for row in csv.reader(stream) if any(row)]
    if not table:
        raise RamatchError(f"{file}: the file is empty")
    check_names([c.strip() for c in table[0][1 : len(classes) + 1]], classes, file)
    rows: dict[str, list[str]] = {}
    for number, row in enumerate(table[1:], start=2):
        values = [cell.strip() for cell in row[1 : len(classes) + 1]]
        if len(values) != len(classes) or not set(values) <= {"0", "1"}:
            raise RamatchError(f"{file}: line {number} is not {len(classes)} values of 0 and 1")
        rows[row[0].strip()] = [c for c, v in zip(classes, values, strict=True) if v == "1"]
    return rows
