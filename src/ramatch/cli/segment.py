"""ramatch segment: which pixels show which label."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import printable
from ._shared import add_labels, add_model, labels_of, load_recognizer, share


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "segment",
        help="say which pixels of an image show which label",
        description="Write masks of an image: IMAGE-masks.png (pixel values as numbered in the JSON), "
        "IMAGE-masks.json (each label's probability, box, COCO RLE and polygons) and IMAGE-overlay.png to look at.",
        epilog='example: ramatch segment photo.jpg --labels "dog, kite" --out masks/',
    )
    parser.add_argument("image", metavar="IMAGE")
    add_labels(parser, "; by default a general vocabulary")
    add_model(parser)
    parser.add_argument("--out", metavar="DIR", default=".", help="folder for the three files (default: here)")
    what = "leave out labels with a smaller probability (default: hardly any, improbable ones get fewer pixels)"
    parser.add_argument("--threshold", type=share, metavar="P", help=what)
    what = "every pixel to one of the labels, none to their surroundings"
    parser.add_argument("--no-background", action="store_true", help=what)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..assets import GENERAL
    from ..masks import write_masks

    recognizer = load_recognizer(arguments, cache=0)
    own = list(recognizer.ram.backbone.given_labels)  # of a model without a text tower
    recognizer.set_vocabulary(labels_of(arguments) or own or GENERAL)
    prediction = recognizer.predict(arguments.image, masks=True)
    masks = prediction.masks(arguments.threshold, background=not arguments.no_background)
    for label, mask in masks.items():
        print(f"{100 * mask.mean():5.1f} %  {printable(label)}")
    if not masks:
        print("ramatch: note: no label has a pixel; try others, or a lower --threshold", file=sys.stderr)
    for path in write_masks(masks, arguments.image, Path(arguments.out)):
        print(path)
    return 0
