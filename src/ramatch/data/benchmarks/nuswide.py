"""NUS-WIDE. Expected under the root, as unpacked from the owners' archives:

ImageList/{TrainImagelist,TestImagelist}.txt, ConceptsList/Concepts81.txt (or Concepts81.txt),
NUS_WID_Tags/TagList1k.txt with Train_Tags1k.dat and Test_Tags1k.dat (or AllTags1k.txt, which also needs
ImageList/Imagelist.txt), Groundtruth/TrainTestLabels/Labels_<concept>_Test.txt (or Groundtruth/AllLabels/
Labels_<concept>.txt), and the images in Flickr/ (or images/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ramatch.data.benchmarks.common import Owned, Pairs, need
from ramatch.errors import RamatchError

PAGE = "https://lms.comp.nus.edu.sg/wp-content/uploads/2019/research/nuswide/NUS-WIDE.html"
LISTS = ("nuswide_seen925", "nuswide_unseen81")
SPLIT = "lists"


def load(root: Path) -> Owned:
    """Flickr tags (the thousand of TagList1k less the concepts) for both, the 81 verified concepts for test."""
    concepts = _lines(need(root, "ConceptsList/Concepts81.txt", "Concepts81.txt", what="concept list", page=PAGE))
    tags = _lines(need(root, "NUS_WID_Tags/TagList1k.txt", what="tag list", page=PAGE))
    folder = next((f for f in ("Flickr", "images", "Images") if (root / f).is_dir()), "Flickr")
    test = _image_list(root, "Test")
    owned = Owned(
        _tagged(root, "Train", _image_list(root, "Train"), tags, set(concepts), folder),
        _tagged(root, "Test", test, tags, set(concepts), folder),
        warning="without --test-list the test is every labelled image of the owners' test list, so figures are not "
        "those of the paper: its authors test on about 59,000 images, of which we have no list",
    )
    for concept in concepts:
        for row in np.flatnonzero(_concept(root, concept, test)):
            owned.test[row][1].append(concept)
    return owned


def _image_list(root: Path, which: str = "") -> list[str]:
    """The images of the Train or Test list, or of the list of all."""
    names = (f"ImageList/{which}Imagelist.txt", f"ImageList/{which}ImageList.txt")
    what = f"{which.lower()} image list" if which else "list of all images"
    return [line.replace("\\", "/") for line in _lines(need(root, *names, what=what, page=PAGE))]


def _tagged(root: Path, which: str, images: Sequence[str], tags: Sequence[str], skip: set[str], folder: str) -> Pairs:
    parts = [f"NUS_WID_Tags/{which}_Tags1k.{ext}" for ext in ("dat", "txt")]
    whole = [f"NUS_WID_Tags/AllTags1k.{ext}" for ext in ("txt", "dat")]
    path = need(root, *parts, *whole, what="matrix of the thousand tags", page=PAGE)
    rows = _binary_rows(path, len(tags))
    if path.name.startswith("All"):
        wanted = set(images)
        whole_rows = zip(_image_list(root), rows, strict=False)
        tagged = {name: [tags[i] for i in hot if tags[i] not in skip] for name, hot in whole_rows if name in wanted}
        found = [tagged.get(name, []) for name in images]
    else:
        found = [[tags[i] for i in hot if tags[i] not in skip] for hot in rows]
        if len(found) != len(images):
            raise RamatchError(f"{path}: {len(found)} rows for {len(images)} images of the {which} list")
    return [(f"{folder}/{name}", labels) for name, labels in zip(images, found, strict=True)]


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


def _concept(root: Path, concept: str, test: Sequence[str]) -> np.ndarray:
    """(test images,) whether the concept is there."""
    part, whole = f"TrainTestLabels/Labels_{concept}_Test.txt", f"AllLabels/Labels_{concept}.txt"
    choices = [f"{g}{p}" for p in (part, whole) for g in ("Groundtruth/", "GroundTruth/", "")]
    path = need(root, *choices, what=f"ground truth of the concept {concept!r}", page=PAGE)
    values = np.array(path.read_bytes().split())
    if not np.isin(values, (b"0", b"1")).all():
        raise RamatchError(f"{path}: expected one 0 or 1 per line")
    hot = values == b"1"
    if path.name.endswith("_Test.txt"):
        if len(hot) != len(test):
            raise RamatchError(f"{path}: {len(hot)} rows for {len(test)} test images")
        return hot
    names = _image_list(root)
    if len(hot) != len(names):
        raise RamatchError(f"{path}: {len(hot)} rows for {len(names)} images")
    shown = {name for name, there in zip(names, hot, strict=True) if there}
    return np.array([name in shown for name in test])


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
