"""Images a second of each runtime of the image part on this CPU, in turns: tagging, and the bare image tower.

python -m benchmarks.runtimes                        # all that are installed, batches of 1, 8 and 32
python -m benchmarks.runtimes --memory               # and what a process takes, and how long to its first answer

Every round runs all of them one after the other, and each keeps its fastest: on a machine that others use too, that is
what disturbs a comparison least. Processor time, with OMP_NUM_THREADS=1, is disturbed still less. Images
are the bundled photographs, resized already; labels are 80 of `everyday`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ramatch import Recognizer
from ramatch.assets import photo_paths, vocabulary
from ramatch.config import RUNTIMES
from ramatch.data.images import load_image
from ramatch.modeling.graph import GraphedRAM
from ramatch.modeling.ram import RAM
from ramatch.modeling.runtimes import PACKAGES, make_runtime

LABELS = 80
ONE = """
import sys, time
from pathlib import Path
started = time.perf_counter()
from ramatch import Recognizer
from ramatch.assets import photo_paths
recognizer = Recognizer.from_pretrained(sys.argv[1], device="cpu", runtime=sys.argv[2])
recognizer.set_vocabulary(["dog", "boat", "cup"])
recognizer.predict(photo_paths()[0])
first = time.perf_counter() - started
recognizer.predict(list(photo_paths()) * 3, batch_size=int(sys.argv[3]))
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(first, *(int(status[name].split()[0]) / 1e3 for name in ("VmRSS", "VmHWM", "RssAnon")))
"""


def installed() -> list[str]:
    names = [name for name in RUNTIMES if name != "auto"]
    return [name for name in names if name == "torch" or importlib.util.find_spec(PACKAGES[name])]


def passes(model: str, names: list[str], rows: int) -> dict[tuple[str, str], Callable[[Tensor], object]]:
    """(what, runtime) → what runs a batch of images."""
    recognizer = Recognizer.from_pretrained(model, device="cpu", runtime="torch")
    ram = recognizer.ram
    bare = RAM(ram.backbone, ram.config.replace(tss=False, prompts="none")).eval().to(ram.backbone.dtype)
    recognizer.set_vocabulary(vocabulary("everyday")[:LABELS])
    assert recognizer.vocabulary is not None
    labels, photos = recognizer.vocabulary.encoded, pictures(ram)
    found: dict[tuple[str, str], Callable[[Tensor], object]] = {}
    for name in names:
        engine = GraphedRAM(ram, best=True, batch_size=rows, runtime=make_runtime(name, ram, lambda: photos))
        tower = GraphedRAM(bare, batch_size=rows, runtime=make_runtime(name, bare, lambda: photos))
        found["tagging", name] = lambda images, engine=engine: engine(images, labels)
        found["tower", name] = tower.trunk
    return found


def pictures(ram: RAM) -> Tensor:
    return torch.stack([ram.preprocess.resize(load_image(path)) for path in photo_paths()])


def measure(model: str, names: list[str], batches: list[int], rounds: int, images: int) -> list[dict]:
    """Each of so many rounds takes about so many images."""
    ways, out = passes(model, names, max(batches)), []
    photos = pictures(Recognizer.from_pretrained(model, device="cpu", runtime="torch").ram)
    for batch in batches:
        pixels = photos.repeat(-(-batch // len(photos)), 1, 1, 1)[:batch]
        best, work = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, float("inf"))
        for run in ways.values():
            run(pixels)
        for _ in range(rounds):
            for way, run in ways.items():
                times = max(1, images // batch)
                begun, busy = time.perf_counter(), time.process_time()
                for _ in range(times):
                    run(pixels)
                best[way] = max(best[way], times * batch / (time.perf_counter() - begun))
                work[way] = min(work[way], (time.process_time() - busy) / times / batch)
        for (what, name), rate in best.items():
            ratio = rate / best[what, "torch"] if "torch" in names else None
            share = rate / max(value for (kind, _), value in best.items() if kind == "tower")
            out.append({"what": what, "runtime": name, "batch": batch, "images/s": rate, "to torch": ratio})
            out[-1] |= {"of the fastest bare tower": share, "processor ms an image": 1000 * work[what, name]}
    return out


def memory(model: str, names: list[str], tries: int = 3) -> list[dict]:
    """Of a process of its own: MB resident, at its peak and not backed by files; seconds from its start to the first
    answer, the fastest of some tries, with what a runtime keeps already made."""
    out = []
    for name in names:
        command = [sys.executable, "-c", ONE, model, name, "8"]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(tries)]
        found = [[float(value) for value in text.split()] for text in runs]
        first, resident, peak, own = (min(values) for values in zip(*found, strict=True))
        out.append({"runtime": name, "first answer s": first, "RSS MB": resident, "peak MB": peak, "own MB": own})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runtimes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="ramatch-mini")
    parser.add_argument("--runtimes", nargs="*", default=installed(), choices=installed())
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=32, help="of a round (default: %(default)s)")
    parser.add_argument("--memory", action="store_true", help="memory and first answers instead")
    arguments = parser.parse_args()
    if arguments.memory:
        rows = memory(arguments.model, arguments.runtimes)
    else:
        options = arguments.runtimes, arguments.batches, arguments.rounds, arguments.images
        rows = measure(arguments.model, *options)
    for row in rows:
        print(json.dumps({key: round(v, 2) if isinstance(v, float) else v for key, v in row.items()}))


if __name__ == "__main__":
    main()
