"""The photo library beside its bars: `python -m benchmarks.library [--data DATA/test_gzsl.json]` prints JSON.

Fidelity, bytes and indexing are measured on annotated images; the rates on a library of random vectors, since speed
does not depend on what the numbers are. Bars: 0.99 of the mAP of tagging afresh, 20 KB a photo, 60 s for 100,000 photos
× 1,000 labels on two cores, 200 ms for a search over 100,000 photos.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure import errors_in_words
from ramatch import Recognizer, read_annotations
from ramatch.evaluation.metrics import mean_ap
from ramatch.library import Library
from ramatch.library.features import encode_words
from ramatch.library.search import CANDIDATES, Query, rank
from ramatch.library.store import transaction
from ramatch.library.vectors import quantize

QUERIES = ("dog", "dog beach", "dog -person", "car street night", '"hot dog", table, -person')


def fidelity(data: str, model: str, images: int | None, folder: Path) -> dict[str, Any]:
    """Index the images, tag them from the library and afresh, compare. `images`: so many, drawn with a fixed seed."""
    annotations = read_annotations(data)
    order = np.random.default_rng(0).permutation(len(annotations.records))[:images]
    photos = folder / "photos"
    photos.mkdir()
    names = [f"{i:06d}.webp" for i in range(len(order))]
    for name, i in zip(names, order, strict=True):
        (photos / name).write_bytes(annotations.records[i].image.read())
    recognizer = Recognizer.from_pretrained(model, cache=0)
    library = Library.open(folder / "library", create=True)
    start = time.perf_counter()
    update = library.update(photos, recognizer)
    seconds = time.perf_counter() - start
    labels = annotations.classes
    kept = np.stack([p.values for p in library.tag(labels, recognizer)])
    recognizer.set_vocabulary(labels)
    fresh = np.stack([p.values for p in recognizer.predict([photos / name for name in names], strict=True)])
    truth = np.array([[label in annotations.records[i].labels for label in labels] for i in order])
    maps = {"fresh": mean_ap(fresh, truth), "library": mean_ap(kept, truth)}
    likely = fresh >= 0.1
    status = library.status()
    return {
        "images": len(order),
        "labels": len(labels),
        "mAP": {name: round(float(value), 4) for name, value in maps.items()},
        "mAP_ratio": round(float(maps["library"] / maps["fresh"]), 4),
        "mean_difference": round(float(np.abs(kept - fresh).mean()), 5),
        "mean_difference_where_likely": round(float(np.abs(kept - fresh)[likely].mean()), 4),
        "same_side_of_0.5_where_likely": round(float(((kept >= 0.5) == (fresh >= 0.5))[likely].mean()), 4),
        "best_20_among_candidates": _recall(library, recognizer, labels),
        "bytes_per_photo": status["bytes_per_photo"],
        "bytes_per_photo_without_thumbnails": _without_thumbnails(library, status),
        "images_per_second": round(update.encoded / seconds, 2),
    }


def _recall(library: Library, recognizer: Recognizer, labels: Sequence[str]) -> float:
    """Share of the 20 best that are among the candidates, at the share of photos that are candidates in 100,000."""
    view = library.snapshot(recognizer)
    count = max(20, len(view.rows) * CANDIDATES // 100_000)
    hits = []
    for label in labels:
        query = Query((label,))
        best = rank(view, query, recognizer, room=None).rows[:20]
        hits.append(np.isin(best, rank(view, query, recognizer, room=count).rows).mean())
    return round(float(np.mean(hits)), 4)


def _without_thumbnails(library: Library, status: dict[str, Any]) -> int:
    size = library.database.execute("SELECT SUM(LENGTH(webp)) FROM thumbnails").fetchone()[0]
    return round((status["bytes"] - size) / status["photos"])


def rates(model: str, photos: int, labels: int, folder: Path) -> dict[str, Any]:
    """Tagging and searching a library of random vectors."""
    recognizer = Recognizer.from_pretrained(model, cache=0)
    library = synthetic(folder / "synthetic", recognizer, photos)
    words = [f"thing {i}" for i in range(labels)]
    encode_words(recognizer, words)  # encoding them is not what is measured; it takes as long for one photo
    start = time.perf_counter()
    answers = sum(1 for _ in library.tag(words, recognizer))
    seconds = time.perf_counter() - start
    found = {query: _median(partial(library.search, query, recognizer)) for query in QUERIES}
    fresh = count()
    encode = _median(lambda: encode_words(recognizer, [f"word {next(fresh)}", f"thing {next(fresh)} more"]))
    whole = _median(lambda: library.search("dog beach", recognizer, top=None, threshold=0.9), 3)
    return {
        "photos": answers,
        "labels": labels,
        "tag_seconds": round(seconds, 1),
        "search_ms": {query: round(1000 * value, 1) for query, value in found.items()},
        "search_all_with_threshold_ms": round(1000 * whole, 1),
        "two_words_never_asked_before_ms": round(1000 * encode, 1),
    }


def _median(call: Callable[[], Any], times: int = 7) -> float:
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:]))  # the first warms up


def synthetic(path: Path, recognizer: Recognizer, photos: int) -> Library:
    """A library of random photos, one file each."""
    library = Library.open(path, create=True)
    library.claim(recognizer)
    vectors, generator = library.vectors(), np.random.default_rng(0)
    shapes = {name: shape for name, _, shape in vectors.parts.values()}
    with transaction(library.database):
        for start in range(0, photos, 2000):
            size = min(2000, photos - start)
            image, regions = (generator.standard_normal((size, *shapes[n]), np.float32) for n in ("image", "regions"))
            unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (image, regions)]
            vectors.append(start, quantize(*unit))
            for i in range(start, start + size):
                row = (i, i, i.to_bytes(16, "big"), 0, 640, 480, None)
                library.database.execute("INSERT INTO photos VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                file = (f"photos/{i:06d}.jpg".encode(), i, 1000, 0, None)
                library.database.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?)", file)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="annotations whose images are indexed, for fidelity and bytes")
    parser.add_argument("--images", type=int, help="only so many of them")
    parser.add_argument("--model", default="ramatch-mini")
    parser.add_argument("--photos", type=int, default=100_000, help="of the synthetic library; 0: leave it out")
    parser.add_argument("--labels", type=int, default=1000)
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    with tempfile.TemporaryDirectory() as folder:
        if arguments.data:
            found["fidelity"] = fidelity(arguments.data, arguments.model, arguments.images, Path(folder))
        if arguments.photos:
            found["rates"] = rates(arguments.model, arguments.photos, arguments.labels, Path(folder))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    errors_in_words(main)
