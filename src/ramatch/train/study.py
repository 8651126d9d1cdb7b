"""`ramatch study`: several settings and seeds on one data set, from cached features, and several ways of making one
score of a model's two branches. The CLIP tables of docs/results.md are this."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import RAMConfig, preset
from ..data.annotations import Annotations
from ..data.augment import with_mosaics
from ..data.decode import decode_all
from ..data.splits import find_data, hold_out, read_split
from ..errors import RamatchError
from ..evaluation.metrics import at_k, mean_ap
from ..evaluation.models import read_test
from ..modeling.ram import RAM, Output
from ..recognizer import pick_device
from .assemble import load_frozen
from .cached import CachedTask, collect_cached, fit_cached, ram_stem
from .config import CachedConfig
from .features import FeatureStore, Views


@dataclass(frozen=True)
class Variant:
    """A preset with changes, and how it is trained."""

    preset: str
    ram: dict[str, Any] = field(default_factory=dict)
    config: CachedConfig = field(default_factory=CachedConfig)


_OURS = CachedConfig(batch_size=256, loss="sigmoid").with_overrides(
    ["optim.lr=1e-3", "optim.prompt_lr=1e-2", "optim.temperature_lr=5e-4", "optim.ema_decay=0.99"]
)
_MMC = _OURS.with_overrides(["loss=mmc", "optim.clip_norm=none"])
_ALIGNED = _OURS.with_overrides(
    ["epochs=4", "batch_size=64", "optim.lr=5e-4", "optim.temperature_lr=2.5e-4", "optim.ema_decay=0.995"]
)
_REFERENCE = CachedConfig(views=2).with_overrides(["optim.clip_norm=none", "optim.decay_all=true"])
_NO_EMA = ["optim.ema_decay=0"]
_HALF = {"max_weight": 0.5}  # what the ablation changes one thing of
_WHOLE = {"max_weight": 0.5, "tss_share": 1.0}
_UNSCALED = {"plan_scale": "one", "best_share": 0.0, "score": "softmax"}
VARIANTS: dict[str, Variant] = {
    "reference": Variant("reference", {"pixels": "backbone"}, _REFERENCE),
    "ramatch": Variant("ramatch", {}, _OURS),
    "half": Variant("ramatch", _HALF, _OURS),
    "kcot": Variant("ramatch", {"max_weight": 0.0}, _OURS),
    "reweight": Variant("ramatch", _HALF | {"matcher": "reweight"}, _OURS),
    "average": Variant("ramatch", {"matcher": "average", "max_weight": 0.0}, _OURS),
    "no-tkt": Variant("ramatch", _HALF | {"tkt": False}, _OURS),
    "no-ema": Variant("ramatch", _HALF, _OURS.with_overrides(_NO_EMA)),
    "smooth": Variant("ramatch", _HALF, _OURS.replace(loss="sigmoid-smooth")),
    "tau": Variant("ramatch", _HALF | {"tau_global": 0.02, "tau_region": 0.02}, _OURS),
    "unscaled": Variant("ramatch", _HALF | _UNSCALED | {"tau_region": 2e-3}, _OURS),
    "mosaics": Variant("ramatch", _HALF, _OURS.replace(mosaics=0.5)),
    "mmc": Variant("ramatch", _WHOLE, _MMC),
    "mmc-6": Variant("ramatch", _WHOLE, _MMC.replace(epochs=6)),
    "mmc-reweight": Variant("ramatch", _WHOLE | {"matcher": "reweight", "max_weight": 0.0}, _MMC),
    "mmc-no-tkt": Variant("ramatch", _WHOLE | {"tkt": False}, _MMC),
    "aligned": Variant("aligned", {}, _ALIGNED),
    "aligned-kcot": Variant("aligned", {"max_weight": 0.0}, _ALIGNED),
    "aligned-reweight": Variant("aligned", {"matcher": "reweight"}, _ALIGNED),
    "aligned-average": Variant("aligned", {"matcher": "average", "max_weight": 0.0}, _ALIGNED),
    "aligned-no-ema": Variant("aligned", {}, _ALIGNED.with_overrides(_NO_EMA)),
    "aligned-unscaled": Variant("aligned", _UNSCALED | {"tau_region": 3.3e-4}, _ALIGNED),
    "aligned-mmc": Variant("aligned", {}, _ALIGNED.replace(loss="mmc")),
}


@dataclass(frozen=True)
class StudyData:
    """A benchmark folder. `limit`, `test_limit`: so many training and GZSL test images (ZSL: those among them), chosen
    by their names."""

    path: str | Path
    limit: int | None = None
    test_limit: int | None = None

    def read(self) -> tuple[Annotations, dict[str, Annotations]]:
        """Training data, and tests by protocol."""
        place = find_data(self.path)
        train, tests = read_split(place, "train"), {p: read_test(place, p).annotations for p in ("zsl", "gzsl")}
        if self.test_limit is not None:
            tests["gzsl"] = _some(tests["gzsl"], self.test_limit)
            keys = {record.key for record in tests["gzsl"].records}
            tests["zsl"] = tests["zsl"].subset([i for i, r in enumerate(tests["zsl"].records) if r.key in keys])
            if not len(tests["zsl"]):
                raise RamatchError(f"none of the {self.test_limit} test images has an unseen label; take more")
        return _some(train, self.limit), tests


def study(
    backbone: str,
    data: StudyData,
    *,
    label_features: str | Path | None = None,
    variants: Sequence[str] = ("reference", "ramatch"),
    seeds: Sequence[int] = (0, 1, 2),
    changes: dict[str, Any] | None = None,
    device: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Train each variant with each seed and test it: rows with {rule: {ZSL, GZSL mAP and F1@3}}, each when it is known.
    `changes`: settings of `CachedConfig`, for all variants."""
    if unknown := set(variants) - set(VARIANTS):
        raise RamatchError(f"unknown variant(s) {', '.join(sorted(unknown))}; known: {', '.join(VARIANTS)}")
    chosen = {name: VARIANTS[name].config.replace(**changes or {}) for name in variants}
    own = load_frozen(backbone, label_features=label_features).to(pick_device(device))
    bench = Bench(own, *data.read())
    for name, config in chosen.items():
        ram_config = preset(VARIANTS[name].preset, **VARIANTS[name].ram)
        for seed in seeds:
            yield {"variant": name, "seed": seed} | bench.measure(ram_config, config.replace(seed=seed))


class Bench:
    """Images of a training set and its tests, and their features, which variants that differ further up share."""

    def __init__(self, backbone: Any, train: Annotations, tests: dict[str, Annotations]) -> None:
        self.backbone, self.train, self.tests = backbone, train, tests
        self.store = FeatureStore()
        self._pictures: dict[Any, tuple[Tensor, Tensor]] = {}

    def pictures(self, data: Annotations, ram: RAM, share: float = 0.0) -> tuple[Tensor, Tensor]:
        """Decoded images and their targets, with so many mosaics; the last of each set are kept."""
        size, key = ram.preprocess.size, (id(data), share, ram.preprocess.interpolation)
        if key not in self._pictures:
            self._pictures = {k: v for k, v in self._pictures.items() if k[0] != key[0]}
            pixels = decode_all(data.records, ram.preprocess)
            self._pictures[key] = with_mosaics(pixels, data.targets(), share, size, device=self.backbone.device)
        return self._pictures[key]

    def measure(self, ram_config: RAMConfig, config: CachedConfig) -> dict[str, Any]:
        """Train once, test under every protocol and rule."""
        torch.manual_seed(config.seed)
        device = self.backbone.device
        ram = RAM(self.backbone, ram_config).to(device)
        pictures, targets = self.pictures(self.train, ram, config.mosaics)
        stem = ram_stem(ram, config.dtype(device))
        cache = self.store.get("train", stem, pictures, Views(config.views))
        log = fit_cached(CachedTask(ram, cache, targets, self.train.classes, config))
        row: dict[str, Any] = {"seconds": log["seconds"], "scores": {}}
        for protocol, test in self.tests.items():
            shown, truth = self.pictures(test, ram)
            found = collect_cached(ram, self.store.get(protocol, stem, shown, Views()), test.classes)
            rules = score_rules(found, *log["tau"])
            rules |= {"own": own_score(ram, found), "own-partial": own_score(ram, found, "partial")}
            for rule, scores in rules.items():
                values = {"mAP": mean_ap(scores, truth), "F1@3": at_k(scores, truth, 3).f1}
                row["scores"].setdefault(rule, {})[protocol] = {k: round(100 * v, 2) for k, v in values.items()}
        return row


def _some(data: Annotations, count: int | None) -> Annotations:
    """`count` of the images, chosen by their names, in the data's order."""
    return data if count is None else data.subset(hold_out([record.key for record in data.records], count, "ablation"))


def own_score(ram: RAM, features: Tensor, score: str | None = None) -> Tensor:
    """The score (n, N) that the model's own settings (with another `score`) make of features (n, N, 3)."""
    image, region, best = features.unbind(-1)
    if ram.config.plan_scale == "one":
        region = region / region.shape[1]
    with torch.no_grad():
        return ram.score(Output(region, image, best), score).cpu()


def score_rules(features: Tensor, tau_g: float, tau_r: float) -> dict[str, Tensor]:
    """Ways to make one score of s_G, s_R (column mass 1) and the best region (n, N, 3): see docs/results.md."""
    g, r, m = features.unbind(-1)
    n = g.shape[1]

    def partial(s: Tensor) -> Tensor:
        return 50 * s - 0.5 * (50 * s).logsumexp(-1, keepdim=True)

    return {
        "global": g,
        "region": r,
        "max": m,
        "softmax-mean": (g / tau_g).softmax(-1) + (r / tau_r).softmax(-1),
        "softmax-mean-1/N": (g / tau_g).softmax(-1) + (r / (n * tau_r)).softmax(-1),
        "g+r": g + r,
        "g+m": g + m,
        "g+r+m": g + (r + m) / 2,
        "2g+3r": 2 * g + 3 * r,
        "2g+3m": 2 * g + 3 * m,
        "joint-r": (100 * (g + r) / 2).softmax(-1),
        "joint-m": (100 * (g + m) / 2).softmax(-1),
        "partial-r": partial(g + r),
        "partial-m": partial(g + m),
        "partial-rm": partial(g + (r + m) / 2),
    }
