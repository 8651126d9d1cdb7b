"""The open-vocabulary benchmarks as data: class lists, split rules, protocols; and how to prepare them.

A prepared benchmark is a folder with train.json, test_gzsl.json and test_zsl.json, each
`{"classes": [...], "images": [[path, [label, ...]], ...]}`. Training knows the seen classes only.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ramatch.config import PROTOCOLS
from ramatch.data.annotations import Annotations
from ramatch.data.benchmarks.aerial import load_mlrsnet, load_multiscene
from ramatch.data.benchmarks.common import Distribution, Owned, Pairs
from ramatch.data.benchmarks.pedestrians import load_pa100k, load_rap
from ramatch.data.benchmarks.photos import load_coco, load_nuswide
from ramatch.data.classes import class_list
from ramatch.data.formats import lists
from ramatch.data.records import Paths, read_annotations, read_classes
from ramatch.data.sources import Locator
from ramatch.data.splits import hold_out
from ramatch.errors import RamatchError

SPLITS = ("train", "test_gzsl", "test_zsl")
SPLIT_SEED = 2025  # of the random splits of MultiScene and MLRSNet; theirs was not published


@dataclass(frozen=True)
class Benchmark:
    """A named benchmark.

    seen, unseen: how many classes of each. counts: images of train, test_gzsl, test_zsl where known; those of the
    paper are rounded to thousands. load: reads the data set as its owners distribute it; None for one that comes in
    our form. lists: class lists, of seen and unseen, or one of all, of which `unseen_are` says how it is split.
    train_rule: which training images stay. `no unseen`: those that show no unseen class and some seen one, as in
        Bansal et al.; `any seen`: all that have a seen label. The paper states the first for none and we take it
        for all but NUS-WIDE, where only the second agrees with the paper's number of training images.
    """

    name: str
    title: str
    seen: int
    unseen: int
    page: str
    counts: tuple[int, ...]
    load: Callable[[Distribution], Owned] | None = None
    lists: tuple[str, ...] = ()
    unseen_are: Literal["listed", "rare", "drawn"] = "listed"
    train_rule: Literal["no unseen", "any seen"] = "no unseen"

    @property
    def expected(self) -> dict[str, int]:
        return dict(zip(SPLITS, self.counts, strict=False))

    @property
    def layout(self) -> str:
        """The files expected under the root, in words."""
        ours = "train.json, test_gzsl.json, test_zsl.json and the images, in folders or *.tar"
        return ours if self.load is None else inspect.getdoc(self.load) or ""


COCO = "https://cocodataset.org/#download"
NUS = "https://lms.comp.nus.edu.sg/wp-content/uploads/2019/research/nuswide/NUS-WIDE.html"
RAP = "https://www.rapdataset.com"
PA100K = "https://github.com/xh-liu/HydraPlus-Net"
MULTISCENE = "https://gitlab.lrz.de/ai4eo/reasoning/multiscene"
MLRSNET = "https://data.mendeley.com/datasets/7j9bv9vwsx"
PETA = "http://mmlab.ie.cuhk.edu.hk/projects/PETA.html"
UCM = "http://weegee.vision.ucmerced.edu/datasets/landuse.html"
NUS_LISTS, COCO_LISTS = ("nuswide_seen925", "nuswide_unseen81"), ("coco_seen48", "coco_unseen17")
RAP_LIST, PA100K_LIST = ("rap_classes51",), ("pa100k_classes26",)
SCENES, AERIAL = ("multiscene_classes36",), ("mlrsnet_classes60",)

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "nus-wide", "NUS-WIDE", 925, 81, NUS, (143_000, 59_000), load_nuswide, NUS_LISTS, train_rule="any seen"
        ),
        Benchmark("coco", "MS-COCO", 48, 17, COCO, (44_000, 6_392, 2_729), load_coco, COCO_LISTS),
        Benchmark("rap", "RAP-OV (RAPv1)", 35, 16, RAP, (25_000, 8_000), load_rap, RAP_LIST, "rare"),
        Benchmark("pa100k", "PA100K-OV", 16, 10, PA100K, (59_000, 10_000), load_pa100k, PA100K_LIST, "rare"),
        Benchmark("multiscene", "MultiScene-OV", 20, 16, MULTISCENE, (24_000, 7_000), load_multiscene, SCENES, "drawn"),
        Benchmark("mlrsnet", "MLRSNet-OV", 40, 20, MLRSNET, (11_000, 21_000), load_mlrsnet, AERIAL, "drawn"),
        Benchmark("coco-ov", "COCO-OV, a part of MS-COCO", 48, 17, COCO, (20_565, 2_833, 1_224)),
        Benchmark("peta-ov", "PETA-OV", 35, 16, PETA, (1_796, 1_268, 654)),
        Benchmark("ucm-ov", "UC Merced multi-label OV", 11, 6, UCM, (1_049, 1_051, 293)),
    )
}


def split_classes(benchmark: Benchmark, train: Pairs) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(seen, unseen), each in the order of the class list.

    They come from two lists, from the frequency in the training set (the most frequent are seen), or from a draw.
    """
    if len(benchmark.lists) == 2:
        return class_list(benchmark.lists[0]), class_list(benchmark.lists[1])
    classes = class_list(*benchmark.lists)
    if benchmark.unseen_are == "rare":
        counts = Counter(label for _, labels in train for label in labels)
        unseen = sorted(classes, key=lambda c: -counts[c])[benchmark.seen :]  # sorted keeps ties in order
    else:
        unseen = [classes[i] for i in hold_out(classes, benchmark.unseen, f"{SPLIT_SEED}:")]
    return tuple(c for c in classes if c not in unseen), tuple(c for c in classes if c in unseen)


def apply_protocol(
    owned: Owned, seen: Sequence[str], unseen: Sequence[str], train_rule: str
) -> dict[str, tuple[list[str], Pairs]]:
    """The three splits of a benchmark: {split: (classes, [(path, labels), ...])}."""

    def only(pairs: Pairs, classes: Sequence[str]) -> tuple[list[str], Pairs]:
        keep = set(classes)
        cut = [(path, [x for x in dict.fromkeys(labels) if x in keep]) for path, labels in pairs]
        return list(classes), [(path, labels) for path, labels in cut if labels]

    hidden = set(unseen) if train_rule == "no unseen" else set()
    train = [(path, labels) for path, labels in owned.train if hidden.isdisjoint(labels)]
    both = only(owned.test, [*seen, *unseen])
    return {"train": only(train, seen), "test_gzsl": both, "test_zsl": only(owned.test, unseen)}


@dataclass
class Prepared:
    """What `prepare` wrote."""

    benchmark: Benchmark
    out: str
    seen: tuple[str, ...]
    unseen: tuple[str, ...]
    images: dict[str, int]
    missing_images: int = 0
    notes: list[str] = field(default_factory=list)

    def to_text(self) -> str:
        name, expected = self.benchmark.name, self.benchmark.expected
        lines = [f"{name}: {len(self.seen)} seen and {len(self.unseen)} unseen classes -> {self.out}"]
        for split, count in self.images.items():
            about = f" (expected: about {expected[split]:,})" if split in expected else ""
            lines.append(f"  {split}: {count:,} images{about}")
        lines += [f"  {note}" for note in self.notes]
        if self.missing_images:
            lines.append(f"  missing images: {self.missing_images:,}, left out")
        return "\n".join(lines)

    __str__ = to_text


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
    if name not in BENCHMARKS:
        raise RamatchError(f"unknown benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    root = Path(os.path.expanduser(root)).absolute()
    if not root.is_dir():
        raise RamatchError(f"no such folder: {root}; get {benchmark.title} from {benchmark.page}")
    if benchmark.load is None:
        return _verify(benchmark, root)
    owned = benchmark.load(Distribution(root, benchmark.page))
    if owned.warning and test_list is None:
        owned.notes.append(f"warning: {owned.warning}")
    owned.train = _keep(owned.train, train_list, owned.notes)
    owned.test = _keep(owned.test, test_list, owned.notes)
    missing = _drop_missing(owned, root, benchmark.page) if check_images else 0
    seen, unseen = split_classes(benchmark, owned.train)
    _check_labels(benchmark, owned, seen, unseen)
    owned.notes.append(_split_note(benchmark, unseen))
    splits = apply_protocol(owned, seen, unseen, benchmark.train_rule)
    counts = {split: len(pairs) for split, (_, pairs) in splits.items()}
    for split, count in counts.items():
        if not count:
            raise RamatchError(f"{root}: no image is left for {split} of {name}; is the distribution complete?")
    folder = root if out is None else Path(os.path.expanduser(out)).absolute()
    for split, (classes, pairs) in splits.items():
        lists.write(folder / f"{split}.json", classes, pairs, root=_link(folder, root) if folder != root else None)
    return Prepared(benchmark, str(folder), seen, unseen, counts, missing, owned.notes)


def _link(folder: Path, root: Path) -> Path:
    """A link in `folder` to where the images lie, so that the lists name nothing outside their own folder."""
    link = folder / "images"
    if not link.exists():
        folder.mkdir(parents=True, exist_ok=True)
        link.symlink_to(root, target_is_directory=True)
    return link


def _verify(benchmark: Benchmark, root: Path) -> Prepared:
    """A benchmark that comes in our form only needs checking."""
    test = read_protocol(root, "gzsl")
    if (len(test.seen), len(test.unseen)) != (benchmark.seen, benchmark.unseen):
        found, known = f"{len(test.seen)} seen and {len(test.unseen)}", f"{benchmark.seen} and {benchmark.unseen}"
        raise RamatchError(f"{root}: {found} unseen classes; {benchmark.name} has {known}")
    parts = {split: read_annotations(root, split=split) for split in SPLITS}
    missing = sum(part.summary.count("missing image") for part in parts.values())
    counts = {split: len(part) for split, part in parts.items()}
    notes = ["already in our form: nothing to do"]
    return Prepared(benchmark, str(root), test.seen, test.unseen, counts, missing, notes)


def _keep(pairs: Pairs, listing: str | os.PathLike | None, notes: list[str]) -> Pairs:
    """Only images named in a text file, by path or by bare name without extension."""
    if listing is None:
        return pairs
    wanted = {Path(line.split()[0].replace("\\", "/")).stem for line in read_classes(listing)}
    kept = [(path, labels) for path, labels in pairs if Path(path).stem in wanted]
    notes.append(f"{len(kept):,} of {len(pairs):,} images are in the list {os.fspath(listing)}")
    return kept


def _drop_missing(owned: Owned, root: Path, page: str) -> int:
    before = [*owned.train, *owned.test]
    locator = Locator([root])
    owned.train = [pair for pair in owned.train if locator.exact(pair[0])]
    owned.test = [pair for pair in owned.test if locator.exact(pair[0])]
    if not owned.train and not owned.test:
        example = before[0][0] if before else "nothing"
        raise RamatchError(f"{root}: none of the images is there, for example {example}; see {page}")
    return len(before) - len(owned.train) - len(owned.test)


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
        "listed": "published split",
        "rare": f"the {benchmark.seen} most frequent classes of the training set are seen",
        "drawn": f"our draw (seed {SPLIT_SEED}), as the paper's is not published",
    }[benchmark.unseen_are]
    return f"{how}; unseen: {', '.join(unseen[:6])}{', ...' if len(unseen) > 6 else ''}"


@dataclass
class Evaluation:
    """A test set under a protocol: annotations over its classes, and which of them are seen."""

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
    absent = [name for name in ("train.json", "test_gzsl.json") if not (folder / name).is_file()]
    if absent:
        raise RamatchError(
            f"{folder}: not a benchmark folder: {', '.join(absent)} missing; the protocols need train.json for the "
            "seen classes and test_gzsl.json for all of them (ramatch data prepare writes both)"
        )
    whole = read_annotations(folder, split="test_gzsl", images_root=images_root)
    trained = read_annotations(folder, split="train", images_root=images_root, missing="keep")
    unseen = tuple(c for c in whole.classes if c not in trained.classes)
    if protocol == "gzsl":
        seen = tuple(c for c in whole.classes if c not in unseen)
        return Evaluation(whole, seen, unseen)
    if not unseen:
        raise RamatchError(f"{folder}: every class of test_gzsl.json is in train.json; nothing is unseen")
    if (folder / "test_zsl.json").is_file():
        zsl = read_annotations(folder, split="test_zsl", images_root=images_root)
    else:
        zsl = whole.restrict(unseen, drop_unlabelled=True)
    return Evaluation(zsl, (), zsl.classes)
