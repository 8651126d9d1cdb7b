"""The open-vocabulary benchmarks as data: class lists, split rules, protocols; and how to prepare them.

A prepared benchmark is a folder with train.json, test_gzsl.json and test_zsl.json, each
`{"classes": [...], "images": [[path, [label, ...]], ...]}`. Training knows the seen classes only.
"""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from ramatch.data.annotations import Annotations
from ramatch.data.benchmarks import coco, mlrsnet, multiscene, nuswide, pa100k, rap
from ramatch.data.benchmarks.common import Owned, Pairs, by_hash
from ramatch.data.records import Paths, read_annotations, read_classes
from ramatch.data.sources import Locator
from ramatch.errors import RamatchError

SPLIT_SEED = 2025  # of the random splits of MultiScene and MLRSNet; theirs was not published


@dataclass(frozen=True)
class Protocol:
    """What is tested. zsl: unseen classes only; gzsl: seen and unseen together."""

    name: str
    split: str
    description: str


PROTOCOLS = {
    "zsl": Protocol("zsl", "test_zsl", "unseen classes only, on images that show at least one of them"),
    "gzsl": Protocol("gzsl", "test_gzsl", "seen and unseen classes together, on all test images with a label"),
}


@dataclass(frozen=True)
class Benchmark:
    """A named benchmark.

    seen, unseen: how many classes of each. lists: file(s) in `classes/` — seen and unseen, or all of them.
    split: where seen and unseen come from: the two lists, the frequency in the training set (the most frequent
        are seen), a seeded draw, or the prepared folder's own files.
    train_rule: which training images stay. `no unseen`: those that show no unseen class and some seen one, as in
        Bansal et al.; `any seen`: all that have a seen label. The paper states the first for none and we take it
        for all but NUS-WIDE, where only the second agrees with the paper's number of training images.
    expected: images in (train, test_gzsl, test_zsl) where known; of the paper, rounded to thousands.
    metrics: k of P@k, R@k, F1@k that the paper reports.
    """

    name: str
    title: str
    domain: str
    seen: int
    unseen: int
    lists: tuple[str, ...]
    split: Literal["lists", "frequency", "random", "folder"]
    train_rule: Literal["no unseen", "any seen"]
    page: str
    load: Callable[[Path], Owned] | None
    expected: dict[str, int] = field(default_factory=dict)
    metrics: tuple[int, ...] = (3, 5)

    @property
    def layout(self) -> str:
        """The files expected under the root, in words."""
        if self.load is None:
            return "train.json, test_gzsl.json, test_zsl.json and the images, in folders or *.tar"
        return (inspect.getdoc(inspect.getmodule(self.load)) or "").strip()


BENCHMARKS: dict[str, Benchmark] = {
    b.name: b
    for b in (
        Benchmark("nus-wide", "NUS-WIDE", "natural", 925, 81, ("nuswide_seen925", "nuswide_unseen81"), "lists",
                  "any seen", nuswide.PAGE, nuswide.load, {"train": 143_000, "test_gzsl": 59_000}),
        Benchmark("coco", "MS-COCO", "natural", 48, 17, ("coco_seen48", "coco_unseen17"), "lists",
                  "no unseen", coco.PAGE, coco.load, {"train": 44_000, "test_gzsl": 6_000}, (3,)),
        Benchmark("rap", "RAP-OV (RAPv1)", "pedestrian", 35, 16, ("rap_classes51",), "frequency",
                  "no unseen", rap.PAGE, rap.load, {"train": 25_000, "test_gzsl": 8_000}),
        Benchmark("pa100k", "PA100K-OV", "pedestrian", 16, 10, ("pa100k_classes26",), "frequency",
                  "no unseen", pa100k.PAGE, pa100k.load, {"train": 59_000, "test_gzsl": 10_000}),
        Benchmark("multiscene", "MultiScene-OV", "aerial", 20, 16, ("multiscene_classes36",), "random",
                  "no unseen", multiscene.PAGE, multiscene.load, {"train": 24_000, "test_gzsl": 7_000}),
        Benchmark("mlrsnet", "MLRSNet-OV", "aerial", 40, 20, ("mlrsnet_classes60",), "random",
                  "no unseen", mlrsnet.PAGE, mlrsnet.load, {"train": 11_000, "test_gzsl": 21_000}),
        Benchmark("coco-ov", "COCO-OV, a part of MS-COCO", "natural", 48, 17, ("coco_seen48", "coco_unseen17"),
                  "folder", "no unseen", coco.PAGE, None,
                  {"train": 20_565, "test_gzsl": 2_833, "test_zsl": 1_224}, (3,)),
        Benchmark("peta-ov", "PETA-OV", "pedestrian", 35, 16, (), "folder", "any seen",
                  "http://mmlab.ie.cuhk.edu.hk/projects/PETA.html", None,
                  {"train": 1_796, "test_gzsl": 1_268, "test_zsl": 654}),
        Benchmark("ucm-ov", "UC Merced multi-label OV", "aerial", 11, 6, (), "folder", "any seen",
                  "http://weegee.vision.ucmerced.edu/datasets/landuse.html", None,
                  {"train": 1_049, "test_gzsl": 1_051, "test_zsl": 293}),
    )
}  # fmt: skip


def get(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise RamatchError(f"unknown benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def class_list(name: str) -> tuple[str, ...]:
    """A class list of the package: coco_seen48, coco_unseen17, nuswide_seen925, ..., voc20."""
    path = files("ramatch.data") / "classes" / f"{name}.txt"
    if not path.is_file():
        known = sorted(p.name.removesuffix(".txt") for p in (files("ramatch.data") / "classes").iterdir())
        raise RamatchError(f"no class list {name!r}; there are {', '.join(known)}")
    return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


# ------------------------------------------------------------------------------------------ seen and unseen


def split_classes(benchmark: Benchmark, train: Pairs) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(seen, unseen), each in the order of the class list."""
    if len(benchmark.lists) == 2:
        return class_list(benchmark.lists[0]), class_list(benchmark.lists[1])
    classes = class_list(benchmark.lists[0])
    if benchmark.split == "frequency":
        counts = Counter(label for _, labels in train for label in labels)
        chosen = set(sorted(classes, key=lambda c: -counts[c])[: benchmark.seen])  # sorted keeps ties in order
    else:
        chosen = set(by_hash(classes, SPLIT_SEED)[benchmark.unseen :])
    return tuple(c for c in classes if c in chosen), tuple(c for c in classes if c not in chosen)


def apply_protocol(
    owned: Owned, seen: Sequence[str], unseen: Sequence[str], train_rule: str
) -> dict[str, tuple[list[str], Pairs]]:
    """The three splits of a benchmark: {split: (classes, [(path, labels), ...])}."""
    hidden = set(unseen)

    def only(pairs: Pairs, classes: Sequence[str]) -> Pairs:
        keep = set(classes)
        cut = [(path, [x for x in dict.fromkeys(labels) if x in keep]) for path, labels in pairs]
        return [(path, labels) for path, labels in cut if labels]

    train = owned.train
    if train_rule == "no unseen":
        train = [(path, labels) for path, labels in train if not hidden & set(labels)]
    both = [*seen, *unseen]
    return {
        "train": (list(seen), only(train, seen)),
        "test_gzsl": (both, only(owned.test, both)),
        "test_zsl": (list(unseen), only(owned.test, unseen)),
    }


# -------------------------------------------------------------------------------------------------- prepare


@dataclass
class Prepared:
    """What `prepare` wrote."""

    benchmark: str
    out: str
    seen: tuple[str, ...]
    unseen: tuple[str, ...]
    images: dict[str, int]
    expected: dict[str, int]
    missing_images: int = 0
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "seen": list(self.seen), "unseen": list(self.unseen)}

    def to_text(self) -> str:
        lines = [f"{self.benchmark}: {len(self.seen)} seen and {len(self.unseen)} unseen classes -> {self.out}"]
        for split, count in self.images.items():
            about = f" (expected: about {self.expected[split]:,})" if split in self.expected else ""
            lines.append(f"  {split}: {count:,} images{about}")
        lines += [f"  {note}" for note in self.notes]
        if self.missing_images:
            lines.append(f"  missing images: {self.missing_images:,}, left out")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_text()


def prepare(
    name: str,
    root: str | os.PathLike,
    out: str | os.PathLike | None = None,
    *,
    train_list: str | os.PathLike | None = None,
    test_list: str | os.PathLike | None = None,
    check_images: bool = True,
) -> Prepared:
    """Turn a data set as its owners distribute it into train.json, test_gzsl.json and test_zsl.json in `out`.

    root: the unpacked distribution; `BENCHMARKS[name].layout` says which files are expected. out: by default the
    root itself; elsewhere the files remember the root. train_list, test_list: text files of image names, to keep
    only those, for instance another paper's selection. check_images: leave out images that are not on disk.
    """
    benchmark = get(name)
    root = Path(os.path.expanduser(root)).absolute()
    if not root.is_dir():
        raise RamatchError(f"no such folder: {root}; get {benchmark.title} from {benchmark.page}")
    if benchmark.load is None:
        return _verify(benchmark, root)
    owned = benchmark.load(root)
    notes = list(owned.notes)
    owned.train = _keep(owned.train, train_list, notes)
    owned.test = _keep(owned.test, test_list, notes)
    missing = _drop_missing(owned, root, benchmark) if check_images else 0
    seen, unseen = split_classes(benchmark, owned.train)
    _check_labels(benchmark, owned, seen, unseen)
    notes.append(_split_note(benchmark, unseen))
    folder = Path(os.path.expanduser(out)).absolute() if out is not None else root
    folder.mkdir(parents=True, exist_ok=True)
    splits = apply_protocol(owned, seen, unseen, benchmark.train_rule)
    for split, (_, pairs) in splits.items():
        if not pairs:
            raise RamatchError(f"{root}: no image is left for {split} of {name}; is the distribution complete?")
    for split, (classes, pairs) in splits.items():
        content: dict[str, Any] = {"classes": classes, "images": [list(pair) for pair in pairs]}
        if folder != root:
            content["root"] = str(root)
        with open(folder / f"{split}.json", "w", encoding="utf-8") as stream:
            json.dump(content, stream, ensure_ascii=False, separators=(",", ":"))
    counts = {split: len(pairs) for split, (_, pairs) in splits.items()}
    return Prepared(name, str(folder), seen, unseen, counts, benchmark.expected, missing, notes)


def _verify(benchmark: Benchmark, root: Path) -> Prepared:
    """A benchmark that comes in our form only needs checking."""
    test = read_protocol(root, "gzsl")
    sizes = {split: read_annotations(root, split=split) for split in ("train", "test_gzsl", "test_zsl")}
    if (len(test.seen), len(test.unseen)) != (benchmark.seen, benchmark.unseen):
        raise RamatchError(
            f"{root}: {len(test.seen)} seen and {len(test.unseen)} unseen classes; {benchmark.name} has "
            f"{benchmark.seen} and {benchmark.unseen}"
        )
    missing = sum(a.summary.count("missing image") for a in sizes.values())
    counts = {split: len(a) for split, a in sizes.items()}
    notes = ["already in our form: nothing to do"]
    return Prepared(benchmark.name, str(root), test.seen, test.unseen, counts, benchmark.expected, missing, notes)


def _keep(pairs: Pairs, listing: str | os.PathLike | None, notes: list[str]) -> Pairs:
    """Only images named in a text file, by path or by bare name without extension."""
    if listing is None:
        return pairs
    wanted = {Path(line.split()[0].replace("\\", "/")).stem for line in read_classes(listing)}
    kept = [(path, labels) for path, labels in pairs if Path(path).stem in wanted]
    notes.append(f"{len(kept):,} of {len(pairs):,} images are in the list {os.fspath(listing)}")
    return kept


def _drop_missing(owned: Owned, root: Path, benchmark: Benchmark) -> int:
    before = len(owned.train) + len(owned.test)
    example = (owned.train or owned.test or [("nothing", [])])[0][0]
    locator = Locator([root])

    def present(pairs: Pairs) -> Pairs:
        return [(path, labels) for path, labels in pairs if locator.has(path)]

    owned.train, owned.test = present(owned.train), present(owned.test)
    missing = before - len(owned.train) - len(owned.test)
    if missing == before:
        raise RamatchError(f"{root}: none of the images is there, for example {example}; see {benchmark.page}")
    return missing


def _check_labels(benchmark: Benchmark, owned: Owned, seen: Sequence[str], unseen: Sequence[str]) -> None:
    """A class that no image of the distribution shows betrays a wrong or partial file."""
    present = {label for _, labels in [*owned.train, *owned.test] for label in labels}
    absent = [c for c in (*seen, *unseen) if c not in present]
    if len(absent) > (len(seen) + len(unseen)) // 2:
        raise RamatchError(
            f"{benchmark.title}: {len(absent)} of its {len(seen) + len(unseen)} classes occur in no image, for "
            f"example {', '.join(absent[:5])}; the annotation files are not the expected ones"
        )


def _split_note(benchmark: Benchmark, unseen: Sequence[str]) -> str:
    how = {
        "lists": "published split",
        "frequency": f"the {benchmark.seen} most frequent classes of the training set are seen",
        "random": f"our draw (seed {SPLIT_SEED}), as the paper's is not published",
        "folder": "split of the folder",
    }[benchmark.split]
    return f"{how}; unseen: {', '.join(unseen[:6])}{', ...' if len(unseen) > 6 else ''}"


# ------------------------------------------------------------------------------------------------- protocols


@dataclass
class Evaluation:
    """A test set under a protocol: annotations over its classes, and which of them are seen."""

    protocol: Protocol
    annotations: Annotations
    seen: tuple[str, ...]
    unseen: tuple[str, ...]


def read_protocol(path: str | os.PathLike, protocol: str = "gzsl", *, images_root: Paths | None = None) -> Evaluation:
    """The test images of a prepared benchmark folder under ZSL or GZSL.

    Seen classes are those of train.json, unseen the others of test_gzsl.json. Without a test_zsl.json the ZSL
    images are those of test_gzsl.json that show an unseen class.
    """
    if protocol not in PROTOCOLS:
        raise RamatchError(f"unknown protocol {protocol!r}; there are {', '.join(PROTOCOLS)}")
    folder = Path(os.path.expanduser(path))
    absent = [f"{s}.json" for s in ("train", "test_gzsl") if not (folder / f"{s}.json").is_file()]
    if absent:
        raise RamatchError(
            f"{folder}: not a benchmark folder: {', '.join(absent)} missing; the protocols need train.json for the "
            "seen classes and test_gzsl.json for all of them (ramatch data prepare writes both)"
        )
    whole = read_annotations(folder, split="test_gzsl", images_root=images_root)
    trained = read_annotations(folder, split="train", images_root=images_root, missing="keep")
    unseen = tuple(c for c in whole.classes if c not in set(trained.classes))
    seen = tuple(c for c in whole.classes if c in set(trained.classes))
    chosen = PROTOCOLS[protocol]
    if protocol == "gzsl":
        return Evaluation(chosen, whole, seen, unseen)
    if not unseen:
        raise RamatchError(f"{folder}: every class of test_gzsl.json is in train.json; nothing is unseen")
    if (folder / "test_zsl.json").is_file():
        zsl = read_annotations(folder, split="test_zsl", images_root=images_root)
    else:
        zsl = whole.restrict(unseen, drop_unlabelled=True)
    return Evaluation(chosen, zsl, (), tuple(zsl.classes))
