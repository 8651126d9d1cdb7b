"""MultiScene. Expected under the root: MultiScene-Clean/{Tra,Test}.csv, MultiScene-Clean/images/, and for
training on the large, crowd-labelled part MultiScene/*.csv with MultiScene/images/.

Each table has a header, the image's name without extension first, then one column of 0 and 1 per scene in the
owners' order. What the crowd-labelled tables are called is not documented, so all in that folder are taken.
"""

from __future__ import annotations

import csv
from pathlib import Path

from ramatch.data.benchmarks.common import Owned, Pairs, check_names, need, relative
from ramatch.data.images import EXTENSIONS
from ramatch.data.records import read_classes
from ramatch.errors import RamatchError

PAGE = "https://gitlab.lrz.de/ai4eo/reasoning/multiscene"
CLASSES = Path(__file__).parents[1] / "classes" / "multiscene_classes36.txt"


def load(root: Path) -> Owned:
    """Test: the clean test set. Training: the crowd-labelled images that are not in it, or the clean ones."""
    clean = need(root, "MultiScene-Clean", what="folder of the clean subset", page=PAGE)
    test_file = need(clean, "Test.csv", "test.csv", what="table of the clean test images", page=PAGE)
    test = _pairs(test_file, root)
    noisy = sorted((root / "MultiScene").glob("*.csv"))
    if noisy:
        held_out = {Path(name).stem for name, _ in test}
        merged = {name: labels for file in noisy for name, labels in _pairs(file, root)}
        train = [(n, labels) for n, labels in merged.items() if Path(n).stem not in held_out]
        return Owned(train, test, [f"training on crowd labels from {', '.join(f.name for f in noisy)}"])
    names = ("Tra.csv", "train.csv", "Train.csv")
    train = _pairs(need(clean, *names, what="table of the clean training images", page=PAGE), root)
    return Owned(train, test, ["no folder MultiScene: training on the clean training images only"])


def _pairs(file: Path, root: Path) -> Pairs:
    classes = read_classes(CLASSES)
    with open(file, newline="", encoding="utf-8-sig") as stream:
        table = [row for row in csv.reader(stream) if row]
    if not table:
        raise RamatchError(f"{file}: the file is empty")
    # the owners spell 'OilFiled'; anything else must agree
    check_names([c.strip() for c in table[0][1 : len(classes) + 1]], classes, file, at_least=len(classes) - 1)
    prefix = relative(need(file.parent, "images", "Images", what="image folder", page=PAGE), root)
    pairs: Pairs = []
    for number, row in enumerate(table[1:], start=2):
        try:
            values = [float(x) for x in row[1 : len(classes) + 1]]
        except ValueError as error:
            raise RamatchError(f"{file}: line {number}: {error}") from error
        if len(values) != len(classes):
            raise RamatchError(f"{file}: line {number} has {len(values)} values for {len(classes)} scenes")
        name = row[0].strip()
        if not name.lower().endswith(EXTENSIONS):
            name += ".jpg"
        pairs.append((f"{prefix}/{name}", [c for c, v in zip(classes, values, strict=True) if v == 1]))
    return pairs
