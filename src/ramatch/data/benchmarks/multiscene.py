"""MultiScene. Expected under the root: MultiScene-Clean/{Tra,Test}.csv, MultiScene-Clean/images/, and for
training on the large, crowd-labelled part MultiScene/*.csv with MultiScene/images/.

Each table has a header, the image's name without extension first, then one column of 0 and 1 per scene in the
owners' order. What the crowd-labelled tables are called is not documented, so all in that folder are taken.
"""

from __future__ import annotations

from pathlib import Path

from ramatch.data.benchmarks.common import Owned, Pairs, need, read_one_hot, relative
from ramatch.data.classes import class_list
from ramatch.data.images import EXTENSIONS

PAGE = "https://gitlab.lrz.de/ai4eo/reasoning/multiscene"
LISTS = ("multiscene_classes36",)
SPLIT = "random"


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
    classes = class_list(*LISTS)
    rows = read_one_hot(file, classes, at_least=len(classes) - 1)  # the owners spell 'OilFiled'
    prefix = relative(need(file.parent, "images", "Images", what="image folder", page=PAGE), root)
    names = {name: name if name.lower().endswith(EXTENSIONS) else f"{name}.jpg" for name in rows}
    return [(f"{prefix}/{names[name]}", labels) for name, labels in rows.items()]
