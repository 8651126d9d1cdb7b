"""Studies: several settings and seeds on one data set, quickly, from kept stems (see `train/kept.py`), and several ways of
making one score of a model's two branches. The CLIP tables of docs/results.md are this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import preset
from ..data.annotations import Annotations
from ..errors import RamatchError
from ..evaluation.metrics import at_k, mean_ap
from ..evaluation.retrieval import stable_order
from ..modeling.ram import RAM, Output
from .align_run import load_pixels
from .assemble import find_data, load_frozen, read_split
from .distributed import pick_device
from .evaluation import read_test
from .kept import FitConfig, Kept, collect, fit, keep, with_mosaics


@dataclass(frozen=True)
class Variant:
    """A preset with changes, how it is trained, and how many views of each image are kept."""

    preset: str
    ram: dict[str, Any] = field(default_factory=dict)
    fit: FitConfig = field(default_factory=FitConfig)
    views: int = 3


_OURS = FitConfig(epochs=3, batch_size=256, lr=1e-3, lr_prompts=1e-2, lr_tau=5e-4, ema=0.99, loss="sigmoid", clip=1.0)
_MMC = replace(_OURS, loss="mmc", clip=0)
_ALIGNED = replace(_OURS, epochs=4, batch_size=64, lr=5e-4, lr_tau=2.5e-4, ema=0.995)
_HALF = {"max_weight": 0.5}  # what the ablation changes one thing of
_WHOLE = {"max_weight": 0.5, "tss_share": 1.0}
VARIANTS: dict[str, Variant] = {
    "reference": Variant("reference", {"pixels": "backbone"}, FitConfig(clip=0), views=2),
    "ramatch": Variant("ramatch", fit=_OURS),
    "half": Variant("ramatch", _HALF, _OURS),
    "kcot": Variant("ramatch", {"max_weight": 0.0}, _OURS),
    "reweight": Variant("ramatch", _HALF | {"matcher": "reweight"}, _OURS),
    "average": Variant("ramatch", {"matcher": "average", "max_weight": 0.0}, _OURS),
    "no-tkt": Variant("ramatch", _HALF | {"tkt": False}, _OURS),
    "no-ema": Variant("ramatch", _HALF, replace(_OURS, ema=0.0)),
    "smooth": Variant("ramatch", _HALF, replace(_OURS, loss="sigmoid-smooth")),
    "tau": Variant("ramatch", _HALF | {"tau_global": 0.02, "tau_region": 0.02}, _OURS),
    "unscaled": Variant(
        "ramatch", _HALF | {"plan_scale": "one", "tau_region": 2e-3, "best_share": 0.0, "score": "softmax"}, _OURS
    ),
    "mosaics": Variant("ramatch", _HALF, replace(_OURS, mosaics=0.5)),
    "mmc": Variant("ramatch", _WHOLE, _MMC),
    "mmc-6": Variant("ramatch", _WHOLE, replace(_MMC, epochs=6)),
    "mmc-reweight": Variant("ramatch", _WHOLE | {"matcher": "reweight", "max_weight": 0.0}, _MMC),
    "mmc-no-tkt": Variant("ramatch", _WHOLE | {"tkt": False}, _MMC),
    "aligned": Variant("aligned", fit=_ALIGNED),
    "aligned-kcot": Variant("aligned", {"max_weight": 0.0}, _ALIGNED),
    "aligned-reweight": Variant("aligned", {"matcher": "reweight"}, _ALIGNED),
    "aligned-average": Variant("aligned", {"matcher": "average", "max_weight": 0.0}, _ALIGNED),
    "aligned-no-ema": Variant("aligned", fit=replace(_ALIGNED, ema=0.0)),
    "aligned-unscaled": Variant(
        "aligned", {"plan_scale": "one", "tau_region": 3.3e-4, "best_share": 0.0, "score": "softmax"}, _ALIGNED
    ),
    "aligned-mmc": Variant("aligned", fit=replace(_ALIGNED, loss="mmc")),
}


def study(
    backbone: str,
    data: str | Path,
    *,
    label_features: str | Path | None = None,
    variants: Sequence[str] = ("reference", "ramatch"),
    seeds: Sequence[int] = (0, 1, 2),
    limit: int | None = None,
    test_limit: int | None = None,
    changes: dict[str, Any] | None = None,
    device: str | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Train each variant with each seed on a benchmark folder and test it: rows with {rule: {ZSL, GZSL mAP and F1@3}}.

    `limit`, `test_limit`: so many training and GZSL test images only (ZSL: those among them), chosen by their names.
    `changes`: fields of `FitConfig`, or `views`, for all variants.
    """
    changes = dict(changes or {})
    views = changes.pop("views", None)
    if views is not None and (not isinstance(views, int) or views < 1):
        raise RamatchError(f"views must be a whole number of at least 1, got {views!r}")
    if unknown := set(variants) - set(VARIANTS):
        raise RamatchError(f"unknown variant(s) {', '.join(sorted(unknown))}; known: {', '.join(VARIANTS)}")
    own = load_frozen(backbone, label_features=label_features).to(pick_device(device))
    place = find_data(data)
    train, tests = read_split(place, "train"), {p: read_test(place, p).annotations for p in ("zsl", "gzsl")}
    train = _some(train, limit)
    if test_limit is not None:
        tests["gzsl"] = _some(tests["gzsl"], test_limit)
        keys = {record.key for record in tests["gzsl"].records}
        tests["zsl"] = tests["zsl"].subset([i for i, r in enumerate(tests["zsl"].records) if r.key in keys])
        if not len(tests["zsl"]):
            raise RamatchError(f"none of the {test_limit} test images has an unseen label; take more")
    pixels = load_pixels(train.records, own.preprocess.size)
    pictures = {p: load_pixels(test.records, own.preprocess.size) for p, test in tests.items()}
    rows = []
    kept: dict[str, Kept] = {}  # of one kind of stem: tens of gigabytes on a real set
    targets = train.targets()
    stem: tuple[Any, ...] = ()
    for name in variants:
        variant = VARIANTS[name]
        settings, count = variant.fit.replace(**changes), views or variant.views
        config = preset(variant.preset, **variant.ram)
        fields = ("adapted_layers", "saa_layers", "tss", "tss_input", "pixels")
        wanted = (count, settings.mosaics, config.visual_prompts > 0, *(getattr(config, field) for field in fields))
        for seed in seeds:
            torch.manual_seed(seed)
            ram = RAM(own, config).to(own.device)
            if wanted != stem:  # variants that differ further up share their stems, and so do seeds
                kept.clear()
                share, size = settings.mosaics, own.preprocess.size
                shown, targets = with_mosaics(pixels, train.targets(), share, size, device=own.device)
                kept["train"] = keep(ram, shown, count)
                kept |= {protocol: keep(ram, found) for protocol, found in pictures.items()}
                stem = wanted
            log = fit(ram, kept["train"], targets, train.classes, settings, seed)
            row: dict[str, Any] = {"variant": name, "seed": seed, "seconds": log["seconds"], "scores": {}}
            for protocol, test in tests.items():
                found = collect(ram, kept[protocol], test.classes)
                truth = test.targets().numpy()
                rules = score_rules(found, ram.tau_global.item(), ram.tau_region.item())
                rules |= {"own": own_score(ram, found), "own-partial": own_score(ram, found, "partial")}
                for rule, scores in rules.items():
                    values = {
                        "mAP": 100 * mean_ap(scores.numpy(), truth),
                        "F1@3": 100 * at_k(scores.numpy(), truth, 3).f1,
                    }
                    row["scores"].setdefault(rule, {})[protocol] = {k: round(v, 2) for k, v in values.items()}
            rows.append(row)
            if report is not None:
                report(row)
    return rows


def _some(data: Annotations, count: int | None) -> Annotations:
    """`count` of the images, chosen by their names, in the data's order."""
    if count is None:
        return data
    return data.subset(sorted(stable_order([record.key for record in data.records], "ablation")[:count]))


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
