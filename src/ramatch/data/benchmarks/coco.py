"""MS-COCO. Expected under the root: annotations/instances_{train,val}2014.json, train2014/, val2014/ (or 2017)."""

from __future__ import annotations

from pathlib import Path

from ramatch.data.annotations import Request
from ramatch.data.benchmarks.common import Distribution, Owned, Pairs
from ramatch.data.formats import coco
from ramatch.errors import RamatchError

PAGE = "https://cocodataset.org/#download"
LISTS = ("coco_seen48", "coco_unseen17")
SPLIT = "lists"


def load(files: Distribution) -> Owned:
    """Training images from the train file, test images from the val file, with all 80 categories.

    The 48/17 protocol (Bansal et al. 2018) is defined on the 2014 files; 2017's are taken if only they are there.
    """
    there = [year for year in ("2014", "2017") if (files.root / f"annotations/instances_val{year}.json").is_file()]
    year = next(iter(there), "2014")
    owned = Owned(_pairs(files, f"train{year}"), _pairs(files, f"val{year}"))
    if year == "2017":
        owned.notes.append("COCO 2017 files: its val is part of 2014's, so counts differ from the paper's")
    owned.warning = (
        f"without --test-list the test is all of val{year}, so figures are not those of the paper: its authors test on "
        "a part of val2014 (6,392 images GZSL, 2,729 ZSL), of which we have no list"
    )
    return owned


def _pairs(files: Distribution, subset: str) -> Pairs:
    request = Request(files.need("annotation file", f"annotations/instances_{subset}.json"))
    prefix = files.images(subset, f"images/{subset}")
    if not coco.detect(request):
        raise RamatchError(f"{request.path}: not a COCO instances file")
    return [(f"{prefix}/{Path(row.key).name}", list(row.labels)) for row in coco.read(request).rows]
