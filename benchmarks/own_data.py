"""What a model learns of a few images: `python -m benchmarks.own_data --data DATA [--sets ucm-ov,…]` prints JSON lines.

Of each set (a prepared benchmark folder below DATA) so many training images are drawn with each seed; the model is
taught with them as `ramatch train --data` does it, and tested on the GZSL test beside the model as it was. What words
it knows that were not taught, ZSL tests: these are looked for as before, so there is nothing to measure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import errors_in_words
from ramatch.data.decode import decode_all
from ramatch.data.splits import hold_out, read_split
from ramatch.evaluation.calibration import Words
from ramatch.evaluation.models import TestSet, load_model, read_test
from ramatch.evaluation.protocol import evaluate_scores
from ramatch.evaluation.reliability import ece
from ramatch.modeling.learned import Learned
from ramatch.progress import Progress
from ramatch.recognizer import Recognizer
from ramatch.train.own import teach

BATCH = 32
SHOWN = ("mAP", "mAP_seen", "mAP_unseen", "F1@3")


@torch.no_grad()
def probabilities(recognizer: Recognizer, test: TestSet, taught: Sequence[Learned | None]) -> list[np.ndarray]:
    """(n, N) by the model after each teaching. The image tower runs once: nothing in it was learned."""
    ram, calibrator, classes = recognizer.ram, recognizer.calibrator, test.annotations.classes
    assert calibrator is not None
    vocabularies, before = [], ram.learned
    for learned in taught:
        ram.learned = learned
        vocabularies.append(ram.encode_labels(classes))
    ram.learned = before
    found: list[list[np.ndarray]] = [[] for _ in taught]
    pixels = decode_all(test.annotations.records, ram.preprocess)
    line, dtype = Progress(len(pixels), "testing"), ram.backbone.dtype
    for images in pixels.split(BATCH):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            trunk = ram.trunk(images)
            outputs = [ram.recognize(trunk, labels, plan=False) for labels in vocabularies]
        for rows, o, labels in zip(found, outputs, vocabularies, strict=True):
            rows.append(calibrator(torch.stack([o.image, o.region, o.best], -1).float(), Words.of(labels)).numpy())
        line.update(line.done + len(images))
    return [np.concatenate(rows) for rows in found]


def measure(name: str, data: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one set: the model as it was, and with each seed."""
    recognizer = load_model(arguments.model, device="cpu")
    train, test = read_split(data / name, "train"), read_test(data / name, "gzsl")
    if arguments.test_images is not None:
        keys = [record.key for record in test.annotations.records]
        some = test.annotations.subset(hold_out(keys, min(arguments.test_images, len(keys))))
        test = TestSet(some, test.seen, test.unseen, test.protocol, test.note)
    rows: list[dict[str, Any]] = [{"set": name, "seed": None}]
    taught: list[Learned | None] = [None]
    for seed in arguments.seeds:
        chosen = np.random.default_rng(seed).permutation(len(train))[: arguments.images]
        began = time.perf_counter()
        found = teach(recognizer, train.subset(sorted(chosen.tolist())))
        changes = {k: [round(100 * x, 2) for x in change] for k, change in found.changes().items()}
        row = {"set": name, "seed": seed, "images": len(chosen), "prior": found.prior, "kept_aside": changes}
        rows.append(row | {"seconds": round(time.perf_counter() - began)})
        taught.append(found.learned)
    targets = test.annotations.targets().numpy()
    for row, values in zip(rows, probabilities(recognizer, test, taught), strict=True):
        report = evaluate_scores(values, targets, test.annotations.classes, test.seen, test.unseen)
        row |= {"test_images": len(targets), **{key: round(report[key], 2) for key in SHOWN}}
        row["ECE"] = round(100 * ece(values, targets), 2)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True)
    add("--sets", type=lambda text: text.split(","), default=["ucm-ov", "peta-ov", "coco-ov"], metavar="A,B")
    add("--model", default="ramatch-mini")
    add("--images", type=int, default=100, help="training images (default: %(default)s)")
    add("--seeds", type=lambda text: [int(x) for x in text.split(",")], default=[0, 1, 2], metavar="A,B")
    add("--test-images", type=int, metavar="N", help="so many test images, chosen by name (default: all)")
    arguments = parser.parse_args()
    for name in arguments.sets:
        for row in measure(name, arguments.data, arguments):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    errors_in_words(main)
