"""A model in a Ray actor beside the same model in one process, on the same images: `python -m benchmarks.ray` prints
JSON.

`model`: images that are decoded already, tagged and written, in this process; and by an actor, which gets them through
Ray's object store. Its ratio is what Ray costs the GPU (bar: 0.85). `tag`: from files, as `ramatch tag` does it, with
two threads that decode; and by an actor with all cores decoding. Its ratio is what a user gains or loses. Rates leave
out the first quarter, in which processes start and CUDA graphs are recorded.

Without --data, the bundled photographs at many sizes are tagged under as many names as are asked for. `--rates`
measures what the model of cost in docs/scale.md is made of instead, in processor time of one core, without Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ramatch.assets import GENERAL, photo_paths, vocabulary
from ramatch.data.find import find_images
from ramatch.data.images import load_image
from ramatch.modeling.preprocess import Preprocess
from ramatch.recognizer import pick_device, predict_files
from ramatch.scale import cluster
from ramatch.scale.inputs import Unit, list_units
from ramatch.scale.pieces import Piece, from_table, read_unit, to_table
from ramatch.scale.tag import Job, Model, Tagger

from .measure import errors_in_words

SIDES = (320, 480, 640, 800, 1024)  # of the longer side, in pixels
QUALITIES = (70, 80, 90, 95)
BAR = 0.85
BY_TORCH = (("runtime", "torch"),)  # on both sides, whatever else is installed
Counts = Iterable[int]  # of images, as they are done


def put_photographs(folder: Path, count: int) -> None:
    """JPEGs of the bundled photographs at every size and quality; beyond these, links to them under other names."""
    pictures = [load_image(path) for path in photo_paths()]
    kinds = [(picture, side, quality) for side in SIDES for quality in QUALITIES for picture in pictures]
    for i in range(count):
        path, first = folder / f"{i:07d}.jpg", folder / f"{i % len(kinds):07d}.jpg"
        if path != first:
            os.link(first, path)
            continue
        picture, side, quality = kinds[i]
        scale = side / max(picture.size)
        size = (round(picture.width * scale), round(picture.height * scale))
        picture.resize(size, Image.Resampling.BICUBIC).save(path, quality=quality)


def rate(done: Counts, total: int) -> dict[str, float]:
    """Images per second after the first quarter, and how long it took to the first."""
    begun, images, moments = time.perf_counter(), 0, list[tuple[float, int]]()
    for count in done:
        images += count
        moments.append((time.perf_counter(), images))
    early = next(moment for moment in moments if moment[1] >= total / 4)
    last = moments[-1]
    steady = (last[1] - early[1]) / max(last[0] - early[0], 1e-9)
    return {"images_per_s": round(steady, 1), "to_the_first_s": round(moments[0][0] - begun, 1)}


def here_tag(model: Model, job: Job, paths: Sequence[Path]) -> Counts:
    recognizer = model.recognizer()
    recognizer.set_vocabulary(list(job.labels) if job.labels else GENERAL)
    for found in predict_files(recognizer, paths, batch_size=job.batch_size):
        found.to_dict(top=job.top)
        yield 1


def repeated(unit: Unit, preprocess: Preprocess, part: int, times: int) -> Iterator[Piece]:
    """A unit that is decoded once, as many pieces: decoding does not hold them up."""
    [piece] = read_unit(unit, preprocess, part)
    for number in range(times):
        yield replace(piece, number=number, last=number == times - 1)


def here_model(model: Model, job: Job, pieces: Iterable[Piece], out: str) -> Counts:
    tagger = Tagger(model, job, out)
    for piece in pieces:
        yield tagger(piece)["rows"]


def by_ray(
    work: Sequence[Any], decode: Callable[[Any], Iterable[Piece]], given: tuple[Any, ...], actors: int
) -> Counts:
    pool = cluster.pool(given[1].device, actors)
    for receipt in cluster.flow(work, decode, Tagger, given, pool):
        yield receipt["rows"]


def measure(job: Job, folder: Path, count: int, part: int, actors: int, out: Path) -> dict[str, Any]:
    """The four rates. `actors`: for each line all of them together are beside one process."""
    paths = find_images(folder)[:count]
    units = list_units(paths, part=part).units
    device = pick_device(job.device)
    cluster.start()
    if device.type == "cpu":
        torch.set_num_threads(cluster.pool("cpu", actors).threads)  # as many as an actor has
    model = Model(job, device.type)
    read = partial(read_unit, preprocess=model.preprocess, part=part)
    cores = os.cpu_count() or 1
    times = max(2, -(-len(paths) // (part * min(cores, len(units)))))
    again = partial(repeated, preprocess=model.preprocess, part=part, times=times)
    few = units[: min(cores, len(units))]
    total = sum(unit.count for unit in few) * times
    warm = [piece for unit in few[:2] for piece in read(unit)]
    turns = -(-total // sum(len(piece.names) for piece in warm))
    found: dict[str, dict[str, Any]] = {"single": {}, "ray": {}}
    found["single"]["model"] = rate(here_model(model, job, warm * turns, str(out / "a")), total)
    found["single"]["tag"] = rate(here_tag(model, job, paths), len(paths))
    if device.type == "cuda":
        model.ram.to("cpu")
        torch.cuda.empty_cache()
    found["ray"]["model"] = rate(by_ray(few, again, (model, job, str(out / "b")), actors), total)
    found["ray"]["tag"] = rate(by_ray(units, read, (model, job, str(out / "c")), actors), len(paths))
    ratio = {
        k: round(found["ray"][k]["images_per_s"] / found["single"][k]["images_per_s"], 3) for k in ("model", "tag")
    }
    return {"ratio": ratio, "bar": BAR, "ok": ratio["model"] >= BAR, **found}


def rates(job: Job, folder: Path, count: int, part: int, out: Path) -> dict[str, float]:
    """What one core does, by its own time: other programs do not count."""
    torch.set_num_threads(1)
    paths = find_images(folder)[:count]
    model = Model(job, "cpu")
    tagger = Tagger(model, job, str(out / "rates"))
    clock = [time.process_time()]

    def lap() -> float:
        clock.append(time.process_time())
        return (clock[-1] - clock[-2]) / len(paths)

    units = list_units(paths, part=part).units
    [first] = from_table(to_table(next(read_unit(units[0], model.preprocess, part))))
    tagger.parts.write("0" * 20, 0, True, tagger.rows(tagger.predict(first)))  # imports, and what is made once
    lap()
    pieces = [piece for unit in units for piece in read_unit(unit, model.preprocess, part)]
    decode = lap()
    pieces = [piece for each in pieces for piece in from_table(to_table(each))]
    store = lap()
    answers = [tagger.predict(piece) for piece in pieces]
    tag = lap()
    rows = [tagger.rows(found) for found in answers]
    host = lap()
    for piece, found in zip(pieces, rows, strict=True):
        tagger.parts.write(piece.unit, piece.number, piece.last, found)
    host += lap()
    written = sum(path.stat().st_size for path in (out / "rates").glob("part-*") if "0" * 20 not in path.name)
    return {
        "decode_per_core_s": round(1 / decode, 1),
        "tag_per_core_s": round(1 / (tag + host), 1),
        "host_us": round(1e6 * host, 1),
        "store_us": round(1e6 * store, 1),
        "image_bytes": round(sum(path.stat().st_size for path in paths) / len(paths)),
        "row_bytes": round(written / len(paths)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--images", type=int, default=20_000, metavar="N")
    add("--data", metavar="DIR", help="a folder of images (default: the bundled photographs, at many sizes)")
    add("--model", default="ramatch-mini")
    add("--vocabulary", default="coco80", help="a bundled one")
    add("--rates", action="store_true", help="what one core does, instead")
    add("--batch-size", type=int, default=64, metavar="N")
    add("--part-size", type=int, default=256, metavar="N")
    add("--actors", type=int, default=1, metavar="N")
    args = parser.parse_args(argv)
    labels = None if args.vocabulary == GENERAL else tuple(vocabulary(args.vocabulary))
    job = Job(args.model, labels, top=5, batch_size=args.batch_size, device=args.device, options=BY_TORCH)
    with tempfile.TemporaryDirectory(prefix="ramatch-ray-") as place:
        folder = Path(args.data) if args.data else Path(place) / "photographs"
        if not args.data:
            folder.mkdir()
            put_photographs(folder, args.images)
        sizes = (args.images, args.part_size)
        if args.rates:
            print(json.dumps(rates(job, folder, *sizes, Path(place)), indent=1))
            return 0
        found = measure(job, folder, *sizes, args.actors, Path(place))
    import ray

    gpu = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    about = {"device": gpu, "cores": os.cpu_count(), "torch": torch.__version__, "ray_version": ray.__version__}
    print(json.dumps({**about, "settings": vars(args), **found}, indent=1))
    return 0


if __name__ == "__main__":
    errors_in_words(main)
