"""MS-COCO. Expected under the root: annotations/instances_{train,val}2014.json, train2014/, val2014/ (or 2017)."""

from __future__ import annotations

from pathlib import Path

from ramatch.data.benchmarks.common import Owned, Pairs, need, relative
from ramatch.data.formats import coco
from ramatch.data.formats.request import Request
from ramatch.errors import RamatchError

PAGE = "https://cocodataset.org/#download"
LISTS = ("coco_seen48", "coco_unseen17")
SPLIT = "lists"


def load(root: Path) -> Owned:
    """Training images from the train file, test images from the val file, with all 80 categories.

    The 48/17 protocol (Bansal et al. 2018) is defined on the 2014 files; 2017's are taken if only they are there.
    """
    years = [y for y in ("2014", "2017") if (root / "annotations" / f"instances_val{y}.json").is_file()]
    year = years[0] if years else "2014"
    owned = Owned(_pairs(root, f"train{year}"), _pairs(root, f"val{year}"))
    if year == "2017":
        owned.notes.append("COCO 2017 files: its val is part of 2014's, so counts differ from the paper's")
    owned.warning = (
        f"without --test-list the test is all of val{year}, so figures are not those of the paper: its authors test on "
        "a part of val2014 (6,392 images GZSL, 2,729 ZSL), of which we have no list"
    )
    return owned


def _pairs(root: Path, subset: str) -> Pairs:
    file = need(root, f"annotations/instances_{subset}.json", what="annotation file", page=PAGE)
    folder = need(root, subset, f"images/{subset}", what="image folder", page=PAGE)
    request = Request(file)
    if not coco.detect(request):
        raise RamatchError(f"{file}: not a COCO instances file")
    prefix = relative(folder, root)
    return [(f"{prefix}/{Path(row.key).name}", list(row.labels)) for row in coco.read(request).rows]
