"""MultiScene and MLRSNet: tables of 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ramatch.data.benchmarks.common import Distribution, Owned, Pairs, check_names
from ramatch.data.classes import class_list
from ramatch.data.formats.tables import read_csv
from ramatch.data.images import EXTENSIONS
from ramatch.data.splits import hold_out
from ramatch.errors import RamatchError

TEST_SHARE = 0.2  # of each category of MLRSNet


def load_multiscene(files: Distribution) -> Owned:
    """MultiScene. Expected under the root: MultiScene-Clean/{Tra,Test}.csv, MultiScene-Clean/images/, and for
    training on the large, crowd-labelled part MultiScene/*.csv with MultiScene/images/.

    Each table has a header, the image's name without extension first, then one column of 0 and 1 per scene in the
    owners' order. What the crowd-labelled tables are called is not documented, so all in that folder are taken, less
    the images of the clean test set.
    """

    def clean(part: str, *names: str) -> Pairs:
        choices = (f"MultiScene-Clean/{name}" for name in names)
        return _scenes(files, files.need(f"table of the clean {part} images", *choices))

    test = clean("test", "Test.csv", "test.csv")
    noisy = sorted((files.root / "MultiScene").glob("*.csv"))
    if not noisy:
        train = clean("training", "Tra.csv", "train.csv", "Train.csv")
        return Owned(train, test, ["no folder MultiScene: training on the clean training images only"])
    held_out = {Path(name).stem for name, _ in test}
    merged = {name: labels for file in noisy for name, labels in _scenes(files, file)}
    train = [(n, labels) for n, labels in merged.items() if Path(n).stem not in held_out]
    return Owned(train, test, [f"training on crowd labels from {', '.join(f.name for f in noisy)}"])


def _scenes(files: Distribution, file: Path) -> Pairs:
    classes = class_list("multiscene_classes36")
    rows = _read_one_hot(file, classes, at_least=len(classes) - 1)  # the owners spell 'OilFiled'
    prefix = files.images(*(f"{file.parent.name}/{name}" for name in ("images", "Images")))
    extension = {name: "" if name.lower().endswith(EXTENSIONS) else ".jpg" for name in rows}
    return [(f"{prefix}/{name}{extension[name]}", labels) for name, labels in rows.items()]


def load_mlrsnet(files: Distribution) -> Owned:
    """MLRSNet. Expected under the root: Labels/<category>.csv and Images/<category>/<image>.jpg (46 categories).

    Each table has a header `image,airplane,airport,...` and one row of 0 and 1 per image. The distribution holds no
    list of test images, and the paper only says that a fifth (21K) are tested on: we take a fifth of each category,
    chosen by a hash of the image's name, which gives the same images everywhere. Use `test_list` for another choice.
    """
    folder = files.need("folder of label tables", "Labels", "labels")
    images = files.images("Images", "images")
    tables = sorted(folder.glob("*.csv"))
    if not tables:
        raise RamatchError(f"{folder}: no .csv file in it; download it from {files.page}")
    owned = Owned([], [], [f"{len(tables)} categories; test images: {TEST_SHARE:.0%} of each, by hash"])
    for file in tables:
        rows = _read_one_hot(file, class_list("mlrsnet_classes60"))
        held_out = set(hold_out(list(rows), round(len(rows) * TEST_SHARE), "0:"))
        for place, (name, labels) in enumerate(rows.items()):
            (owned.test if place in held_out else owned.train).append((f"{images}/{file.stem}/{name}", labels))
    return owned


def _read_one_hot(file: Path, classes: Sequence[str], at_least: int | None = None) -> dict[str, list[str]]:
    """Image → labels, from a table with a header, the image first, then a column of 0 and 1 for each class in order."""
    header, *table = [[cell.strip() for cell in row[: len(classes) + 1]] for row in read_csv(file) if any(row)]
    check_names(header[1:], classes, file, at_least)
    rows: dict[str, list[str]] = {}
    for number, (name, *values) in enumerate(table, start=2):
        if len(values) != len(classes) or not set(values) <= {"0", "1", "0.0", "1.0"}:
            raise RamatchError(f"{file}: line {number} is not {len(classes)} values of 0 and 1")
        rows[name] = [c for c, v in zip(classes, values, strict=True) if v.startswith("1")]
    return rows
