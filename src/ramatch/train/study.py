"""`ramatch study`: variants and seeds on benchmarks, from cached features; what is known already is not run again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.annotations import Annotations, Record
from ..data.augment import with_mosaics
from ..data.decode import decode_all
from ..data.images import ImageError
from ..data.splits import find_data, hold_out, read_split, stable_order
from ..errors import RamatchError
from ..evaluation.models import read_test
from ..evaluation.protocol import evaluate_scores
from ..methods import Method, build_method
from ..modeling.backbone import Backbone
from ..modeling.ram import RAM
from ..prediction import Prediction
from ..recognizer import Recognizer, pick_device
from .assemble import load_frozen, read_data
from .cached import CachedTask, fit_cached, ram_stem, recognize_cached
from .config import CachedConfig, DataConfig
from .features import FeatureCache, FeatureStore, Views, fingerprint
from .step_cost import step_cost
from .study_choice import SUFFIX, VALIDATION, Choices, with_points
from .study_rows import Row, RowFile, make_row, row_name, settings_text
from .study_spec import Job, Point, Study, kind_of

SMOKE = {"limit": 16, "test_limit": 64, "seeds": (0,), "cost": 2}
SMOKE_TRAIN = {"epochs": 1, "batch_size": 8, "views": 1, "mosaics": 0.0}


@dataclass(frozen=True)
class Options:
    """How a study is run. `limit`, `test_limit`: so many training and GZSL test images (ZSL: those among them), chosen
    by their names. `changes`: settings of `CachedConfig`, for all variants."""

    seeds: Sequence[int] = (0, 1, 2)
    limit: int | None = None
    test_limit: int | None = None
    changes: Point = field(default_factory=dict)
    validate: bool = False  # on training images kept aside, every point of the grids
    choices: Choices | None = None  # points that validation chose
    picture: bool = False  # keep a prediction of each variant, for a picture of maps
    cost: int | None = None  # images at once where cost is measured, instead of the study's
    command: str = ""

    def smoke(self) -> Options:
        """The same, of a few images and one epoch: shows that it works, not what it can do."""
        return replace(self, **SMOKE, changes={**SMOKE_TRAIN, **self.changes})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Missing:
    """A variant that cannot be had on this backbone or data, and why."""

    variant: str
    data: str
    reason: str


@dataclass(frozen=True)
class Planned:
    """A job with its seed, and settings of its rows by variant: its own, and those of the same weights."""

    job: Job
    data: str
    backbone: str
    seed: int
    settings: dict[str, Point]

    @property
    def rows(self) -> dict[str, str]:
        """Their names in the file, by variant."""
        place = self.data, self.backbone, self.seed
        return {name: row_name(name, *place, settings) for name, settings in self.settings.items()}


class Place:
    """A backbone, and the last data set on it: what studies that are run one after the other share."""

    def __init__(self, backbone: str, device: str | None = None, label_features: str | None = None) -> None:
        self.backbone = load_frozen(backbone, label_features=label_features).to(pick_device(device))
        self.name = Path(backbone).name
        self._bench: tuple[Any, Bench] | None = None

    def bench(self, path: str | Path, options: Options) -> Bench:
        """Images of a data set, decoded and put through the frozen layers when they are first asked for."""
        key = str(path), options.limit, options.test_limit, options.validate
        if self._bench is None or self._bench[0] != key:
            self._bench = None  # before the next: its features take tens of gigabytes on a real set
            self._bench = key, Bench(self.backbone, *read_parts(path, options))
        return self._bench[1]


class Runner:
    """A study on one backbone: what is to be done, what is there, and the doing of it."""

    def __init__(
        self, name: str, study: Study, place: Place, options: Options, file: RowFile, kind: str | None = None
    ) -> None:
        """`kind`: of the base, where the backbone's own guess is wrong."""
        self.place, self.kind = place, kind or kind_of(place.backbone)
        self.study, self.options, self.file = study, options, file
        self.name, self.table = name, name + (SUFFIX if options.validate else "")
        self.predictions: dict[str, Prediction] = {}  # of one picture, by variant
        self.pictured: Record | None = None

    def plan(self, data: str) -> list[Planned]:
        """Everything that the study wants of one data set, in the order of its variants."""
        options, found = self.options, []
        amounts = {"limit": options.limit, "test_limit": options.test_limit}
        fixed = {name: value for name, value in amounts.items() if value is not None}
        for variant in self.study.variants:
            for point in with_points(self.study, variant, options, (self.name, data, self.place.name)):
                job = Job(self.study, variant, self.kind, point, options.changes)
                settings = {**job.settings, **fixed}
                for seed in options.seeds if job.looks else options.seeds[:1]:
                    shown = {variant.name: settings}
                    if not options.validate:
                        shown |= {name: {**settings, "test": also} for name, also in variant.also.items()}
                    found.append(Planned(job, data, self.place.name, seed, shown))
        return found

    def rows(self, data: str) -> list[Row]:
        """Those of the plan that are in the file, each once."""
        wanted = {name for planned in self.plan(data) for name in planned.rows.values()}
        found = {row["row"]: row for row in self.file.rows() if row["table"] == self.table and row["row"] in wanted}
        return list(found.values())

    def run(self, path: str | Path) -> Iterator[Row | Missing]:
        """Train and test what is not in the file yet; each row is written before it is handed on."""
        data = Path(path).name
        there = {row["row"] for row in self.rows(data)}
        todo = [planned for planned in self.plan(data) if not set(planned.rows.values()) <= there]
        reasons = {id(planned.job): self._impossible(planned.job) for planned in todo}
        told = {planned.job.variant.name: reasons[id(planned.job)] for planned in todo}
        told |= self._unchosen(data)
        yield from (Missing(name, data, reason) for name, reason in told.items() if reason)
        for planned in self._ordered(one for one in todo if not reasons[id(one.job)]):
            bench = self.place.bench(path, self.options)
            try:
                rows = self._measure(bench, planned)
            except ImageError:
                raise
            except (RamatchError, torch.cuda.OutOfMemoryError) as error:  # the others are worth having all the same
                yield Missing(planned.job.variant.name, data, f"seed {planned.seed}: {error}")
                continue
            for row in rows:
                if row["row"] not in there:
                    self.file.append(row)
                    yield row

    def _unchosen(self, data: str) -> dict[str, str]:
        """Variants for which validation was asked to choose and did not, with the reason."""
        choices, where, found = self.options.choices, (self.name, data, self.place.name), dict[str, str]()
        if choices is None:
            return found
        for variant in self.study.variants:
            if self.study.points(variant) and choices.get(where, variant.name) is None:
                reason = self._impossible(Job(self.study, variant, self.kind))
                found[variant.name] = reason or f"no settings in {choices.where} for it; --validate chooses them"
        return found

    def _impossible(self, job: Job) -> str | None:
        if job.variant.needs_text and self.place.backbone.text is None:
            return f"needs a text tower, and '{self.place.name}' has none"
        try:
            self._build(job)
        except RamatchError as error:  # settings were checked before: it is the backbone
            return str(error).replace(self.place.backbone.name, self.place.name)
        return None

    def _build(self, job: Job, backbone: Backbone | None = None) -> RAM:
        backbone = backbone or self.place.backbone
        return build_method(backbone, job.ram_config(), job.method).to(backbone.device)

    def _ordered(self, todo: Iterable[Planned]) -> list[Planned]:
        """Those with the same cache beside each other: it holds one for training and one for tests."""
        groups: dict[Any, list[Planned]] = {}
        seen: dict[int, Any] = {}
        for planned in todo:
            job, config = planned.job, planned.job.train_config()
            if id(job) not in seen:
                stem = ram_stem(self._build(job), config.dtype(self.place.backbone.device))
                seen[id(job)] = fingerprint(stem), stem.preprocess, config.views, config.mosaics
            groups.setdefault(seen[id(job)], []).append(planned)
        return [planned for group in groups.values() for planned in group]

    def _measure(self, bench: Bench, planned: Planned) -> list[Row]:
        job, variant, config = planned.job, planned.job.variant, planned.job.train_config(planned.seed)
        torch.manual_seed(config.seed)
        ram = self._build(job)
        spent = bench.fit(ram, config, job)
        first = planned.seed == self.options.seeds[0] and not self.options.validate
        if self.study.cost and first and not (isinstance(ram, Method) and ram.needs_images):
            labels, batch = bench.train.classes, self.options.cost or self.study.cost
            spent |= step_cost(self.place.backbone, partial(self._build, job), labels, config, batch)
        shown = self.study.figure.variants or (variant.name,)
        if self.options.picture and variant.name in shown and variant.name not in self.predictions:
            self.pictured = bench.sample()
            self.predictions[variant.name] = predict(ram, self.pictured, bench.tests["gzsl"][0].classes)
        rows = []
        for name, row in planned.rows.items():
            changes = variant.also.get(name)
            model = ram if changes is None else ram.with_config(ram.config.replace(**changes))
            facts: dict[str, Any] = {
                "table": self.table,
                "row": row,
                "variant": name,
                "method": variant.method,
                "data": planned.data,
            }
            facts |= {
                "backbone": self.place.name,
                "seed": planned.seed,
                "settings": settings_text(planned.settings[name]),
            }
            facts |= {"command": self.options.command, "note": self._note(bench)}
            rows.append(make_row(facts, bench.test(model, config) | spent, self.place.backbone.device))
        return rows

    def _note(self, bench: Bench) -> str:
        told = f"{len(bench.train):,} training and {len(bench.tests['gzsl'][1]):,} test images"
        if self.options.validate:
            told += f", training images kept aside; {len(bench.unseen)} seen labels held out as unseen ones"
        return told


def read_parts(path: str | Path, options: Options) -> tuple[Annotations, dict[str, Annotations], tuple[str, ...]]:
    """Training data, tests by protocol, and the labels that training does not know."""
    place = find_data(path)
    if options.validate:
        found = read_data(DataConfig(str(place), validation=VALIDATION, holdout_classes=pseudo_unseen(place)))
        assert found.validation is not None
        train, gzsl, unseen = found.train, found.validation, found.unseen
        zsl = gzsl.restrict(unseen, drop_unlabelled=True)
    else:
        both = {protocol: read_test(place, protocol) for protocol in ("zsl", "gzsl")}
        train, unseen = read_split(place, "train"), both["gzsl"].unseen
        zsl, gzsl = both["zsl"].annotations, both["gzsl"].annotations
    limit = options.test_limit or (MOST if options.validate else None)
    if limit is not None and limit < len(gzsl):
        gzsl = _some(gzsl, limit)
        keys = {record.key for record in gzsl.records}
        zsl = zsl.subset([i for i, record in enumerate(zsl.records) if record.key in keys])
        if not len(zsl):
            raise RamatchError(f"none of the {limit} test images has an unseen label; take more")
    return _some(train, options.limit), {"zsl": zsl, "gzsl": gzsl}, unseen


MOST = 2500  # validation images


def pseudo_unseen(place: Path, share: float = 0.2, most: float = 1 / 3) -> tuple[str, ...]:
    """Seen labels to hold out: about a fifth, in an order by their names, rare ones first, as long as a third of the
    images at most shows one, since training loses those; the rarest in any case."""
    train = read_split(place, "train")
    shown = {label: {r.key for r in train.records if label in r.labels} for label in train.classes}
    want, room = max(2, round(share * len(shown))), most * len(train)
    order = [train.classes[i] for i in stable_order(train.classes, "pseudo-unseen")]
    rare = [label for label in order if len(shown[label]) <= room / want]
    held, gone = list[str](), set[str]()
    for label in [*rare, *sorted(set(order) - set(rare), key=lambda label: (len(shown[label]), label))]:
        if shown[label] and len(gone | shown[label]) <= room and len(held) < want:
            held.append(label)
            gone |= shown[label]
    held = held or [min(order, key=lambda label: len(shown[label]))]
    return tuple(label for label in train.classes if label in held)


def _some(data: Annotations, count: int | None) -> Annotations:
    """`count` of the images, chosen by their names, in the data's order."""
    return data if count is None else data.subset(hold_out([record.key for record in data.records], count, "ablation"))


class Bench:
    """Images of a training set and its tests, and their features, which variants that differ further up share."""

    def __init__(
        self, backbone: Backbone, train: Annotations, tests: Mapping[str, Annotations], unseen: Sequence[str]
    ) -> None:
        self.backbone, self.train, self.unseen = backbone, train, tuple(unseen)
        # the images of all protocols are decoded and kept once; each protocol has its rows
        self.records = list({record.key: record for test in tests.values() for record in test.records}.values())
        place = {record.key: i for i, record in enumerate(self.records)}
        self.tests = {p: (test, torch.tensor([place[r.key] for r in test.records])) for p, test in tests.items()}
        self.store = FeatureStore()
        self._pictures: dict[Any, tuple[Tensor, Tensor]] = {}

    def pictures(self, part: str, ram: RAM, share: float = 0.0) -> tuple[Tensor, Tensor]:
        """Decoded images of "train" (and targets; with so many mosaics) or "test"; the last of each are kept."""
        key = (part, share, ram.preprocess.interpolation, ram.preprocess.size)
        if key not in self._pictures:
            self._pictures = {k: v for k, v in self._pictures.items() if k[0] != part}
            pixels = decode_all(self.train.records if part == "train" else self.records, ram.preprocess)
            targets = self.train.targets() if part == "train" else torch.empty(0)
            found = with_mosaics(pixels, targets, share, ram.preprocess.size, device=self.backbone.device)
            self._pictures[key] = found
        return self._pictures[key]

    def features(self, part: str, ram: RAM, config: CachedConfig, views: int = 1) -> FeatureCache:
        shown, _ = self.pictures(part, ram, config.mosaics if part == "train" else 0.0)
        return self.store.get(part, ram_stem(ram, config.dtype(self.backbone.device)), shown, Views(views))

    def fit(self, ram: RAM, config: CachedConfig, job: Job) -> dict[str, float]:
        """Let it learn, or look at the training images, if it does either; what that took."""
        if not job.looks:
            return {}
        cache = self.features("train", ram, config, config.views if job.learns else 1)
        device = self.backbone.device
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        targets = self.pictures("train", ram, config.mosaics)[1]
        log = fit_cached(CachedTask(ram, cache, targets, self.train.classes, config))
        if not job.learns:
            return {}
        found = {"seconds": log["seconds"], "images_per_s": log["images_per_second"]}
        if device.type == "cuda":
            found["memory_gb"] = (torch.cuda.max_memory_allocated(device) - before) / 1e9
        return found

    def test(self, ram: RAM, config: CachedConfig) -> dict[str, float]:
        """Figures by the columns' names, in percent."""
        cache, found = self.features("test", ram, config), dict[str, float]()
        for protocol, (test, rows) in self.tests.items():
            kept = rows.to(self.backbone.device)
            part = FeatureCache(cache.streams.map(lambda t, kept=kept: t[:, kept]))  # type: ignore[misc]
            with torch.no_grad():
                outputs = recognize_cached(ram, part, test.classes)
                scores = torch.cat([ram.score(output).float().cpu() for output in outputs])
            values = evaluate_scores(scores, test.targets(), test.classes)
            names = {"p3": "P@3", "r3": "R@3", "f1": "F1@3", "f1_5": "F1@5", "map": "mAP"}
            found |= {f"{protocol}_{name}": values[key] for name, key in names.items()}
        return found

    def sample(self) -> Record:
        """The record of the picture: a test image that shows several labels, chosen by its name."""
        records = self.tests["gzsl"][0].records
        several = max((min(len(r.labels), 3) for r in records), default=0)
        order = stable_order([r.key for r in records], "picture")
        return next(records[i] for i in order if several <= len(records[i].labels) <= several + 2)


def predict(ram: RAM, record: Record, labels: Sequence[str]) -> Prediction:
    """What a model says of a picture, with maps."""
    recognizer = Recognizer(ram, fast=False, kinds=False)
    recognizer.set_vocabulary(labels)
    return recognizer.predict(record.load(), maps=True)
