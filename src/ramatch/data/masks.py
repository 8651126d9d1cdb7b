"""Pictures of which every pixel's class is known: JSON lists that also say what the values of their masks mean.

    {"classes": ["dog", "kite"], "images": [["images/beach.webp", ["dog"]]],
     "mask_values": {"background": 0, "dog": 1, "kite": 2}, "void": 255}

The mask of images/beach.webp is masks/beach.png, one byte a pixel, beside the file or in a tar shard there.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image

from ..errors import RamatchError
from ..files import expect, read_json
from .annotations import Annotations, Record
from .records import read_annotations
from .sources import Locator

BACKGROUND, VOID = 0, -1  # of `MaskedImages.truth`


@dataclass(frozen=True)
class MaskedImages:
    """Images with labels, and where the mask of each is: `truth` reads it."""

    annotations: Annotations
    locator: Locator
    numbers: np.ndarray  # (256,): of a mask's byte, the number that `truth` gives

    def truth(self, record: Record) -> np.ndarray:
        """(H, W) int: −1 where the truth is left open, 0 for none of the classes, else 1 + the class's place."""
        path = PurePosixPath(record.key)
        name = str(PurePosixPath(*("masks" if part == "images" else part for part in path.parts)).with_suffix(".png"))
        source, found = self.locator.find(name)
        if source is None or found != name:  # another picture of this name is no mask
            raise RamatchError(f"{record.key}: no mask {name} in {self.locator.describe()}")
        with Image.open(io.BytesIO(source.read())) as picture:
            if picture.mode not in ("L", "P"):
                raise RamatchError(f"{source}: a mask has one byte a pixel, this one is {picture.mode}")
            return self.numbers[np.asarray(picture)]


def read_masks(path: str | os.PathLike) -> MaskedImages:
    """The JSON file, or a folder with labels.json in it."""
    file = Path(path) / "labels.json" if Path(path).is_dir() else Path(path)
    content = expect(read_json(file), dict, file) if file.is_file() else {}
    if "mask_values" not in content:
        raise RamatchError(f"{file}: no masks; segmentation needs a JSON file with classes, images and mask_values")
    annotations = read_annotations(file)
    numbers = np.full(256, VOID)
    places = {name: 1 + i for i, name in enumerate(annotations.classes)} | {"background": BACKGROUND}
    for name, value in expect(content["mask_values"], dict, f"{file}: mask_values").items():
        if name not in places or not isinstance(value, int) or not 0 <= value <= 255:
            raise RamatchError(f"{file}: mask_values gives '{name}' the value {value!r}; expected a class and 0 to 255")
        numbers[value] = places[name]
    if isinstance(void := content.get("void"), int) and 0 <= void <= 255:
        numbers[void] = VOID
    return MaskedImages(annotations, Locator([file.parent]), numbers)
