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


def load(root: Path) -> Owned:
    """Flickr tags (the thousand of TagList1k less the concepts) for both, the 81 verified concepts for test."""
    concepts = _lines(need(root, "ConceptsList/Concepts81.txt", "Concepts81.txt", what="concept list", page=PAGE))
    tags = _lines(need(root, "NUS_WID_Tags/TagList1k.txt", what="tag list", page=PAGE))
    folder = next((f for f in ("Flickr", "images", "Images") if (root / f).is_dir()), "Flickr")
    train = _image_list(root, "Train")
    test = _image_list(root, "Test")
    skip = set(concepts)
    train_pairs = _tagged(root, "Train", train, tags, skip, folder)
    test_pairs = _tagged(root, "Test", test, tags, skip, folder)
    for concept in concepts:
        for row in np.flatnonzero(_concept(root, concept, test)):
            test_pairs[row][1].append(concept)
    return Owned(train_pairs, test_pairs)


def _image_list(root: Path, which: str) -> list[str]:
    names = (f"ImageList/{which}Imagelist.txt", f"ImageList/{which}ImageList.txt")
    path = need(root, *names, what=f"{which.lower()} image list", page=PAGE)
    return [line.replace("\\", "/") for line in _lines(path)]


def _all_images(root: Path) -> dict[str, int]:
    names = ("ImageList/Imagelist.txt", "ImageList/ImageList.txt")
    path = need(root, *names, what="list of all images", page=PAGE)
    return {line.replace("\\", "/"): i for i, line in enumerate(_lines(path))}


def _tagged(root: Path, which: str, images: Sequence[str], tags: Sequence[str], skip: set[str], folder: str) -> Pairs:
    parts = [f"NUS_WID_Tags/{which}_Tags1k.{ext}" for ext in ("dat", "txt")]
    whole = [f"NUS_WID_Tags/AllTags1k.{ext}" for ext in ("txt", "dat")]
    path = need(root, *parts, *whole, what="matrix of the thousand tags", page=PAGE)
    rows = _binary_rows(path, len(tags))
    if path.name.startswith("All"):
        position = _all_images(root)
        wanted = {position[name]: i for i, name in enumerate(images) if name in position}
        found: list[list[str]] = [[] for _ in images]
        for number, hot in enumerate(rows):
            if number in wanted:
                found[wanted[number]] = [tags[i] for i in hot if tags[i] not in skip]
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
    position = _all_images(root)
    if len(hot) != len(position):
        raise RamatchError(f"{path}: {len(hot)} rows for {len(position)} images")
    return np.array([name in position and hot[position[name]] for name in test])


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
