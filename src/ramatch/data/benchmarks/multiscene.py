"""MultiScene. Expected under the root: MultiScene-Clean/{Tra,Test}.csv, MultiScene-Clean/images/, and for
training on the large, crowd-labelled part MultiScene/*.csv with MultiScene/images/.

Each table has a header, the image's name without extension first, then one column of 0 and 1 per scene in the
owners' order. What the crowd-labelled tables are called is not documented, so all in that folder are taken.
"""

from __future__ import annotations

from pathlib import Path

from ramatch.data.benchmarks.common import Distribution, Owned, Pairs, read_one_hot
from ramatch.data.classes import class_list
from ramatch.data.images import EXTENSIONS

PAGE = "https://gitlab.lrz.de/ai4eo/reasoning/multiscene"
LISTS = ("multiscene_classes36",)
SPLIT = "random"


def load(files: Distribution) -> Owned:
    """Test: the clean test set. Training: the crowd-labelled images that are not in it, or the clean ones."""
    test = _pairs(files, _clean(files, "test", "Test.csv", "test.csv"))
    noisy = sorted((files.root / "MultiScene").glob("*.csv"))
    if noisy:
        held_out = {Path(name).stem for name, _ in test}
        merged = {name: labels for file in noisy for name, labels in _pairs(files, file)}
        train = [(n, labels) for n, labels in merged.items() if Path(n).stem not in held_out]
        return Owned(train, test, [f"training on crowd labels from {', '.join(f.name for f in noisy)}"])
    train = _pairs(files, _clean(files, "training", "Tra.csv", "train.csv", "Train.csv"))
    return Owned(train, test, ["no folder MultiScene: training on the clean training images only"])


def _clean(files: Distribution, part: str, *names: str) -> Path:
    return files.need(f"table of the clean {part} images", *(f"MultiScene-Clean/{name}" for name in names))


def _pairs(files: Distribution, file: Path) -> Pairs:
    classes = class_list(*LISTS)
    rows = read_one_hot(file, classes, at_least=len(classes) - 1)  # the owners spell 'OilFiled'
    prefix = files.images(*(f"{file.parent.name}/{name}" for name in ("images", "Images")))
    extension = {name: "" if name.lower().endswith(EXTENSIONS) else ".jpg" for name in rows}
    return [(f"{prefix}/{name}{extension[name]}", labels) for name, labels in rows.items()]
