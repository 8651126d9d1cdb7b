"""Choose the README's picture by a rule, and draw it: `python scripts/choose_picture.py`.

Of the bundled photographs, none of which was trained on, and the boxes of scripts/photo_boxes.json, which were
drawn before any map was looked at: only a photograph on which both kinds of maps that `ramatch explain` shows point
into a box of their label, for every label that is found (probability of at least 0.5); of these the one with most
labels found; of these the one whose maps have most of their energy in the boxes. All labels of the file are asked
for on each of them.
(A stricter rule, that every label with a box must be found, was tried first: no photograph passes it.)
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from ramatch import Recognizer
from ramatch.assets import photo_paths
from ramatch.data.records import read_annotations
from ramatch.errors import RamatchError
from ramatch.evaluation.localization import Truth, mass_inside, pointing_game
from ramatch.viz import explanation, save

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("fine", "plan")  # maps on the page


class Choice(NamedTuple):
    """What the rule looks at, in its order."""

    right: bool
    count: int
    energy: float
    photo: str
    found: tuple[str, ...]
    wrong: tuple[str, ...]
    missed: tuple[str, ...]


def judge(recognizer: Recognizer, boxes: Path) -> list[Choice]:
    """Every photograph, the best first."""
    found = []
    photos = read_annotations(boxes, images_root=photo_paths()[0].parent)
    recognizer.set_vocabulary(photos.classes)
    for record in photos:
        prediction = recognizer.predict(record.load(), maps=True, masks=True)
        sure = {tag.label for tag in prediction.above(0.5)}
        labels = tuple(label for label in record.labels if label in sure)
        wrong, energy = [], []
        for label in labels:
            corners = [box.corners for box in record.boxes if box.label == label]
            truth = Truth(record.size or (1, 1), np.array(corners))
            heats = {kind: prediction.heatmap(label, kind=kind) for kind in SHOWN}
            wrong += [f"{label} {kind}" for kind, heat in heats.items() if pointing_game(heat, truth, tolerance=0) < 1]
            energy += [mass_inside(heat, truth) for heat in heats.values()]
        missed = tuple(label for label in record.labels if label not in sure)
        mean = float(np.mean(energy)) if energy else 0.0
        found.append(Choice(not wrong, len(labels), mean, record.key, labels, tuple(wrong), missed))
    return sorted(found, reverse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "explain.jpg")
    out = parser.parse_args().out
    recognizer, boxes = Recognizer.from_pretrained("ramatch-mini"), ROOT / "scripts" / "photo_boxes.json"
    choices = judge(recognizer, boxes)
    for choice in choices:
        said = {name: ", ".join(getattr(choice, name)) or "none" for name in ("found", "wrong", "missed")}
        print(f"{choice.photo:18s} energy {choice.energy:.2f}", *(f"{k}: {v}" for k, v in said.items()), sep="; ")
    if not (choices[0].right and choices[0].count):
        raise RamatchError("on no photograph is every map right; the picture stays as it is")
    path = next(path for path in photo_paths() if path.name == choices[0].photo)
    truth = list(next(r for r in read_annotations(boxes, images_root=path.parent) if r.key == path.name).labels)
    prediction = recognizer.predict(path, maps=True, masks=True)
    with Image.open(path) as image:
        page = explanation(prediction, image, truth=truth, labels=choices[0].found, title=path.name)
    with tempfile.TemporaryDirectory() as folder, Image.open(save(page, Path(folder) / "page.png", dpi=92)) as picture:
        picture.convert("RGB").save(out, quality=88, optimize=True)


if __name__ == "__main__":
    main()
