"""MS-COCO and NUS-WIDE: photographs with a list of test images of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ramatch.data.annotations import Request
from ramatch.data.benchmarks.common import Distribution, Owned, Pairs
from ramatch.data.formats import coco
from ramatch.errors import RamatchError
from ramatch.files import read_lines


def load_coco(files: Distribution) -> Owned:
    """MS-COCO. Expected under the root: annotations/instances_{train,val}2014.json, train2014/, val2014/ (or 2017).

    Training images from the train file, test images from the val file, with all 80 categories. The 48/17 protocol
    (Bansal et al. 2018) is defined on the 2014 files; 2017's are taken if only they are there.
    """

    def pairs(subset: str) -> Pairs:
        request = Request(files.need("annotation file", f"annotations/instances_{subset}.json"))
        prefix = files.images(subset, f"images/{subset}")
        if not coco.detect(request):
            raise RamatchError(f"{request.path}: not a COCO instances file")
        return [(f"{prefix}/{Path(row.key).name}", row.labels) for row in coco.read(request).rows]

    there = [year for year in ("2014", "2017") if (files.root / f"annotations/instances_val{year}.json").is_file()]
    year = next(iter(there), "2014")
    owned = Owned(pairs(f"train{year}"), pairs(f"val{year}"))
    if year == "2017":
        owned.notes.append("COCO 2017 files: its val is part of 2014's, so counts differ from the paper's")
    owned.warning = (
        f"without --test-list the test is all of val{year}, so figures are not those of the paper: its authors test on "
        "a part of val2014 (6,392 images GZSL, 2,729 ZSL), of which we have no list"
    )
    return owned


def load_nuswide(files: Distribution) -> Owned:
    """NUS-WIDE. Expected under the root, as unpacked from the owners' archives:

    ImageList/{TrainImagelist,TestImagelist}.txt, ConceptsList/Concepts81.txt (or Concepts81.txt),
    NUS_WID_Tags/TagList1k.txt with Train_Tags1k.dat and Test_Tags1k.dat (or AllTags1k.txt, which also needs
    ImageList/Imagelist.txt), Groundtruth/TrainTestLabels/Labels_<concept>_Test.txt (or Groundtruth/AllLabels/
    Labels_<concept>.txt), and the images in Flickr/ (or images/).

    Flickr tags (the thousand of TagList1k less the concepts) for both, the 81 verified concepts for test.
    """
    concepts = read_lines(files.need("concept list", "ConceptsList/Concepts81.txt", "Concepts81.txt"))
    tags, verified = read_lines(files.need("tag list", "NUS_WID_Tags/TagList1k.txt")), set(concepts)
    folder = next((f for f in ("Flickr", "images", "Images") if (files.root / f).is_dir()), "Flickr")

    def tagged(part: str) -> Pairs:
        names = [*(f"{part}_Tags1k.{ext}" for ext in ("dat", "txt")), *(f"AllTags1k.{ext}" for ext in ("txt", "dat"))]
        path = files.need("matrix of the thousand tags", *(f"NUS_WID_Tags/{name}" for name in names))
        images = _image_list(files, part)
        rows = _rows_of(images, path, list(_binary_rows(path, len(tags))), files, path.name.startswith("All"))
        found = ([tags[i] for i in row if tags[i] not in verified] for row in rows)
        return [(f"{folder}/{name}", labels) for name, labels in zip(images, found, strict=True)]

    owned = Owned(
        tagged("Train"),
        tagged("Test"),
        warning="without --test-list the test is every labelled image of the owners' test list, so figures are not "
        "those of the paper: its authors test on about 59,000 images, of which we have no list",
    )
    test = _image_list(files, "Test")
    for concept in concepts:
        for (_, labels), there in zip(owned.test, _concept(files, concept, test), strict=True):
            if there:
                labels.append(concept)
    return owned


def _image_list(files: Distribution, part: str = "") -> list[str]:
    """The images of the Train or Test list, or of the list of all."""
    what = f"{part.lower()} image list" if part else "list of all images"
    path = files.need(what, f"ImageList/{part}Imagelist.txt", f"ImageList/{part}ImageList.txt")
    return [line.replace("\\", "/") for line in read_lines(path)]


def _rows_of(images: Sequence[str], path: Path, rows: Sequence, files: Distribution, whole: bool) -> Sequence:
    """A row for each of `images`; `whole`: the file has one for each image of the list of all."""
    names = _image_list(files) if whole else images
    if len(rows) != len(names):
        raise RamatchError(f"{path}: {len(rows)} rows for {len(names)} images")
    found = dict(zip(names, rows, strict=True))
    return [found.get(name, ()) for name in images] if whole else rows


def _binary_rows(path: Path, columns: int) -> Iterator[np.ndarray]:
    """Positions of the ones in each row of a matrix of 0 and 1 written as text, however separated."""
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            digits = np.frombuffer(line.translate(None, b" \t\r\n,"), dtype=np.uint8)
            if digits.size == 0:
                continue
            if digits.size != columns or ((digits != 48) & (digits != 49)).any():
                raise RamatchError(f"{path}: line {number} is not {columns} values of 0 and 1")
            yield np.flatnonzero(digits == 49)


def _concept(files: Distribution, concept: str, test: Sequence[str]) -> Sequence:
    """For each test image, whether the concept is there."""
    part, whole = f"TrainTestLabels/Labels_{concept}_Test.txt", f"AllLabels/Labels_{concept}.txt"
    choices = [f"{g}{p}" for p in (part, whole) for g in ("Groundtruth/", "GroundTruth/", "")]
    path = files.need(f"ground truth of the concept {concept!r}", *choices)
    values = np.array(path.read_bytes().split())
    if not np.isin(values, (b"0", b"1")).all():
        raise RamatchError(f"{path}: expected one 0 or 1 per line")
    return _rows_of(test, path, (values == b"1").tolist(), files, not path.name.endswith("_Test.txt"))
