"""`python -m benchmarks.words --model M --data DIR [--part validation] [--limit N] [--json F]`

DIR has the folders coco-ov, ucm-ov, peta-ov, free-tags and captions-coco, unless they are named one by one; what is not
there is left out, and said. `validation` takes the images of --val-images from the training images and the words of its
part; figures to be published are of `test`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ramatch import Recognizer, read_annotations
from ramatch.data.annotations import Annotations
from ramatch.data.decode import ImageCache
from ramatch.data.lexicon import Lexicon
from ramatch.errors import RamatchError
from ramatch.files import read_lines, write_json

from ..measure import Row
from . import PARTS, read_words
from .free_tags import Judge, free_tags, read_free_tags
from .lists import COCO80
from .measure import calibration, hypernyms, meaningless, names_and_synonyms
from .scores import BLOCK, Runner

ROOT = Path(__file__).parents[2]
FOLDERS = {"coco": "coco-ov", "ucm": "ucm-ov", "peta": "peta-ov", "free_tags": "free-tags", "captions": "captions-coco"}
LINES = ("names", "hypernyms", "calibration", "nonsense", "free-tags")


def arguments_of(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.words", description="Does a model know words?")
    add = parser.add_argument
    add("--model", default="ramatch-mini", help="as for `ramatch tag`")
    add("--device", help="cpu or cuda; by default cuda where there is one")
    add("--data", type=Path, required=True, metavar="DIR", help="folder of the data sets")
    for name, folder in FOLDERS.items():
        add(f"--{name.replace('_', '-')}", type=Path, metavar="DIR", help=f"instead of DIR/{folder}")
    add("--words", type=Path, default=COCO80, metavar="TSV")
    add("--val-images", type=Path, default=ROOT / "docs/splits/coco-val.txt", metavar="TXT")
    add("--part", choices=PARTS, default="test")
    add("--lines", default=",".join(LINES), metavar="A,B", help=f"some of {', '.join(LINES)}")
    add("--limit", type=int, metavar="N", help="at most N images of each set")
    add("--no-kinds", action="store_true", help="look for each label as itself alone")
    add("--batch-size", type=int, default=64, metavar="N")
    add("--json", metavar="F")
    arguments = parser.parse_args(argv)
    for name, folder in FOLDERS.items():
        setattr(arguments, name, getattr(arguments, name) or arguments.data / folder)
    if unknown := set(arguments.lines.split(",")) - set(LINES):
        parser.error(f"unknown lines {', '.join(sorted(unknown))}; known: {', '.join(LINES)}")
    return arguments


def annotations(arguments: argparse.Namespace, folder: Path, split: str | None = None) -> Annotations | None:
    """A set's images of the part; None, and a word about it, where it is not."""
    file = folder / f"{split or ('test_gzsl' if arguments.part == 'test' else 'train')}.json"
    if not file.is_file():
        print(f"not measured: there is no {file}", file=sys.stderr)
        return None
    data = read_annotations(file)
    if folder == arguments.coco and (split or arguments.part == "validation"):
        held = set(read_lines(arguments.val_images))
        data = data.subset([i for i, r in enumerate(data) if (r.key in held) == (arguments.part == "validation")])
    return data.subset(range(min(len(data), arguments.limit or len(data))))


def rows(arguments: argparse.Namespace, runner: Runner) -> Iterator[Row]:
    lines, words = arguments.lines.split(","), read_words(arguments.words, arguments.part)
    coco = annotations(arguments, arguments.coco) if {"names", "hypernyms", "nonsense"} & {*lines} else None
    if coco is not None and "names" in lines:
        yield from names_and_synonyms(runner, coco, words)
    if coco is not None and "hypernyms" in lines:
        yield from hypernyms(runner, coco, words, "hypernyms")
    if coco is not None and "nonsense" in lines:
        yield from meaningless(runner, coco, arguments.part)
    if "calibration" in lines:
        sets = (("ucm-ov", arguments.ucm, None), ("peta-ov", arguments.peta, None), ("verbs", arguments.coco, "verbs"))
        for name, folder, split in sets:
            data = annotations(arguments, folder, split)
            if data is not None:
                yield from calibration(runner, name, data)
    if "free-tags" in lines or "hypernyms" in lines:
        yield from free_rows(arguments, runner, lines)


def free_rows(arguments: argparse.Namespace, runner: Runner, lines: list[str]) -> Iterator[Row]:
    """On images with all 80 names: kinds once more, with nothing unannotated, and tagging without a list."""
    file = arguments.free_tags / "free_tags.json"
    if not file.is_file():
        print(f"not measured: there is no {file}", file=sys.stderr)
        return
    free = read_free_tags(file, arguments.captions, arguments.part, arguments.limit)
    if "hypernyms" in lines:
        words = read_words(arguments.words, arguments.part)
        yield from hypernyms(runner, free.data, words, "hypernyms, all 80 names annotated")
    if "free-tags" in lines:
        yield from free_tags(runner, Judge(free.data.classes, read_words(arguments.words), Lexicon.read()), free)


def main(argv: list[str] | None = None) -> int:
    arguments, begun = arguments_of(argv), time.perf_counter()
    recognizer = Recognizer.from_pretrained(
        arguments.model, device=arguments.device, cache=BLOCK * arguments.batch_size, kinds=not arguments.no_kinds
    )
    if not recognizer.calibrated:
        note = "probabilities are relative to each vocabulary, so that recall at 0.5, false alarms and ECE say little"
        print(f"'{arguments.model}' is not calibrated: {note}", file=sys.stderr)
    runner = Runner(recognizer, ImageCache(), arguments.batch_size, progress=sys.stderr.isatty())
    about = {"model": str(arguments.model), "part": arguments.part, "device": str(recognizer.device)}
    about["kinds"] = "off" if arguments.no_kinds else "on"
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    found = []
    for entry in rows(arguments, runner):
        found.append({**entry.to_dict(), **about})
        print(line_of(entry), flush=True)
    print(f"{time.perf_counter() - begun:.0f} s")
    if arguments.json:
        write_json(arguments.json, {**about, "rows": found})
    return 0


def line_of(entry: Row) -> str:
    value = "-" if entry.value is None else f"{entry.value:.{1 if entry.unit == '%' else 3}f} {entry.unit}".strip()
    bar = "" if not entry.target else f"{entry.target} {'met' if entry.ok else 'not met'}"
    counts = ", ".join(f"{entry.more[key]:,} {key}" for key in ("images", "words") if key in entry.more)
    return "  ".join(part for part in (f"{entry.what:<66} {value:>9}", f"{bar:<16}", counts, entry.note) if part)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RamatchError as error:
        sys.exit(f"benchmarks.words: {error}")
