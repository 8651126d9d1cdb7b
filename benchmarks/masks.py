"""How much longer masks take than tagging, side by side in one run: `python -m benchmarks.masks`.

Both begin with the picture decoded and end with what users get: tags, or a mask of the picture's size for each label.
"""

from __future__ import annotations

import argparse
import json
import time

from ramatch import Recognizer
from ramatch.assets import photo_paths, vocabulary
from ramatch.data.images import load_image


def measure(model: str, labels: list[str], rounds: int) -> dict[str, float]:
    """Milliseconds of the processor per picture, the best of some rounds over the bundled photographs, one picture at a
    time; the two take turns. Not of the clock, so that what else runs on the machine counts little."""
    recognizer = Recognizer.from_pretrained(model, cache=0)
    recognizer.set_vocabulary(labels)
    photos = [load_image(path) for path in photo_paths()]
    ways = {
        "tagging": lambda photo: recognizer.predict(photo).tags(),
        "masks": lambda photo: recognizer.predict(photo, masks=True).masks(),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds + 1):  # the first warms up, and is the slowest
        for name, way in ways.items():
            start = time.process_time()
            for photo in photos:
                way(photo)
            best[name] = min(best[name], 1000 * (time.process_time() - start) / len(photos))
    return {**best, "ratio": best["masks"] / best["tagging"]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.masks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="ramatch-mini")
    parser.add_argument("--vocabulary", default="voc20")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    found = measure(arguments.model, vocabulary(arguments.vocabulary), arguments.rounds)
    print(json.dumps({name: round(value, 2) for name, value in found.items()}))


if __name__ == "__main__":
    main()
