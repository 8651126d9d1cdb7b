"""ramatch explain: pictures of what was matched where."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import RamatchError
from ._shared import add_labels, add_method, add_model, count, labels_of, load_recognizer, split

SHOWN = "reweight,ot,kcot"


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "explain",
        help="draw where each label was found, and why",
        description="One page for an image: ranking, the region marginal, where each label is and where it won in "
        "the transport plan, the whole plan, and the matchers side by side.",
    )
    parser.add_argument("image", metavar="IMAGE")
    add_labels(parser)
    add_model(parser)
    add_method(parser)
    parser.add_argument("--out", metavar="F", help="PNG, SVG or PDF (default: IMAGE's name with -explained.png, here)")
    what = "labels known to be there: they are marked instead of the top ones"
    parser.add_argument("--truth", metavar="A,B", help=what)
    parser.add_argument("--top", type=count, default=8, metavar="K", help="labels with a map of their own (default: 8)")
    what = f"of RAM, side by side; empty for none (default: {SHOWN})"
    parser.add_argument("--matchers", metavar="A,B", help=what)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..data.images import load_image
    from ..viz import explanation, save

    labels = labels_of(arguments)
    if labels is None:
        raise RamatchError("no labels: give --labels A,B,C or --labels-file F or --vocabulary coco80")
    image = load_image(arguments.image, shrink=True)
    recognizer = load_recognizer(arguments)
    truth = split(arguments.truth) if arguments.truth else None
    recognizer.set_vocabulary(list(dict.fromkeys([*labels, *(truth or [])])))
    prediction = recognizer.predict(arguments.image, maps=True, masks=True)
    chosen = arguments.matchers
    if chosen is None:  # a system that RAM is compared with has none
        chosen = SHOWN if recognizer.ram.method is None else ""
    matchers = {m: recognizer.predict(arguments.image, maps=True, matcher=m) for m in split(chosen)}
    out = Path(arguments.out or f"{Path(arguments.image).stem}-explained.png")
    shown = {"truth": truth, "top": arguments.top, "matchers": matchers, "title": Path(arguments.image).name}
    save(explanation(prediction, image, **shown), out)
    print(out)
    return 0
