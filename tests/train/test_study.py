"""Studies: every variant trains and is tested under every score rule; the rules are what the model's own scores are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ramatch.cli import main
from ramatch.config import preset
from ramatch.data.decode import decode_all
from ramatch.errors import RamatchError
from ramatch.evaluation.models import collect_scores, read_test
from ramatch.modeling.ram import RAM
from ramatch.train import features
from ramatch.train import study as module
from ramatch.train.assemble import load_frozen
from ramatch.train.cached import collect_cached, fit_cached, ram_stem
from ramatch.train.config import CachedConfig
from ramatch.train.features import FeatureCache, Views, cache_features
from ramatch.train.study import VARIANTS, StudyData, Variant, own_score, score_rules, study

SMALL = {"prompt_layers": 1, "adapted_layers": 1, "saa_layers": 1}


def quick(epochs: int = 1) -> CachedConfig:
    return CachedConfig(epochs=epochs, batch_size=16, views=2).replace(**{"optim.lr": 0.01})


def arguments(tiny: Path, variant: str) -> list[str]:
    return ["study", "--model", str(tiny / "backbone"), "--data", str(tiny / "data"), "--variants", variant]


def keep(ram: RAM, pixels: torch.Tensor) -> FeatureCache:
    return cache_features(ram_stem(ram), pixels, Views())


def test_rules_are_the_scores_of_the_model(tiny: Path):
    backbone = load_frozen(str(tiny / "backbone"))
    test = read_test(tiny / "data", "gzsl").annotations
    pixels = decode_all(test.records, backbone.preprocess)
    for name, score, rule in (
        ("ramatch", "cosine", "g+r"),
        ("ramatch", "softmax", "softmax-mean"),
        ("paper", "softmax", "softmax-mean-1/N"),
    ):
        torch.manual_seed(0)
        ram = RAM(backbone, preset(name, score=score, region_share=0.5, best_share=0.0, **SMALL)).eval()
        found = score_rules(
            collect_cached(ram, keep(ram, pixels), test.classes), ram.tau_global.item(), ram.tau_region.item()
        )
        own = torch.as_tensor(collect_scores(ram, test, workers=0, progress=False).scores)
        torch.testing.assert_close(found[rule] / 2, own.to(found[rule].dtype), rtol=1e-4, atol=1e-5)
    for name, changes in (
        ("ramatch", {}),
        ("ramatch", {"score": "partial"}),
        ("paper", {}),
    ):  # whatever the model says itself
        torch.manual_seed(0)
        ram = RAM(backbone, preset(name, **changes, **SMALL)).eval()
        own = torch.as_tensor(collect_scores(ram, test, workers=0, progress=False).scores)
        found = own_score(ram, collect_cached(ram, keep(ram, pixels), test.classes))
        torch.testing.assert_close(found, own.to(found.dtype), rtol=1e-4, atol=1e-5)
        kept = collect_cached(ram, keep(ram, pixels), test.classes)
        same = own_score(ram, kept, ram.config.score)
        assert torch.equal(same, own_score(ram, kept))
        assert not torch.equal(own_score(ram, kept, "joint"), same)


def test_study_trains_and_compares(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path
):
    monkeypatch.setitem(VARIANTS, "small", Variant("ramatch", SMALL, quick(8)))
    rows = list(study(str(tiny / "backbone"), StudyData(tiny / "data"), variants=["small"], seeds=[0, 0], device="cpu"))
    assert rows[0]["scores"] == rows[1]["scores"], "a seed decides everything"
    assert set(rows[0]["scores"]["partial-r"]) == set(rows[0]["scores"]["own"]) == {"zsl", "gzsl"}
    options = ["--seeds", "0", "--device", "cpu", "--json", str(tmp_path / "rows.json")]
    assert main([*arguments(tiny, "small"), *options]) == 0
    assert "small, seed 0" in capsys.readouterr().out
    with pytest.raises(RamatchError, match="unknown variant"):
        next(study(str(tiny / "backbone"), StudyData(tiny / "data"), variants=["smal"]))


def test_published_variants_are_valid():
    for variant in VARIANTS.values():
        assert preset(variant.preset, **variant.ram).lambda1 == 0.1


def test_stems_are_made_once_for_variants_and_seeds_that_share_them(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(VARIANTS, "one", Variant("ramatch", SMALL, quick()))
    monkeypatch.setitem(VARIANTS, "two", Variant("ramatch", SMALL | {"matcher": "average"}, quick()))
    monkeypatch.setitem(VARIANTS, "above", Variant("ramatch", SMALL | {"tss_input": "before"}, quick()))
    monkeypatch.setitem(VARIANTS, "other", Variant("ramatch", SMALL | {"adapted_layers": 2}, quick()))
    made: list[int] = []
    monkeypatch.setattr(features, "cache_features", lambda *a: made.append(a[2].count) or cache_features(*a))
    backbone, data = str(tiny / "backbone"), StudyData(tiny / "data")
    rows = list(study(backbone, data, variants=("one", "two"), seeds=(0, 1)))
    assert made == [2, 1, 1]  # training images in two views, and two test sets
    alone = list(study(backbone, data, variants=("two",), seeds=(1,)))
    assert rows[-1]["scores"] == alone[0]["scores"]
    made.clear()
    list(
        study(backbone, data, variants=("one", "above", "other"), seeds=(0,))
    )  # TSS begins above where visual prompts do
    assert made == [2, 1, 1, 2, 1, 1]


def test_a_study_cut_short_leaves_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    row = {
        "variant": "ramatch",
        "seed": 0,
        "seconds": 1.0,
        "scores": {"g+r": {p: {"mAP": 1.0, "F1@3": 2.0} for p in ("zsl", "gzsl")}},
    }

    def cut(*_, **__):
        yield row
        yield row | {"seed": 1}
        raise RamatchError("out of memory")

    monkeypatch.setattr(module, "study", cut)
    assert main(["study", "--model", "m", "--data", "d", "--json", str(tmp_path / "rows.json")]) == 2
    assert [r["seed"] for r in json.loads((tmp_path / "rows.json").read_text())] == [0, 1]


def test_fewer_images_and_other_settings(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(VARIANTS, "one", Variant("ramatch", SMALL, quick(9)))
    seen: list[tuple] = []

    def spy(task):
        cache, config = task.cache, task.config
        seen.append(((cache.views, len(cache)), config.epochs, config.batch_size, config.optim.lr))
        return fit_cached(task)

    monkeypatch.setattr(module, "fit_cached", spy)
    whole = {p: len(read_test(tiny / "data", p).annotations) for p in ("zsl", "gzsl")}
    kept: list[int] = []
    monkeypatch.setattr(features, "cache_features", lambda *a: kept.append(len(a[1])) or cache_features(*a))
    given = [*arguments(tiny, "one"), "--seeds", "0"]
    fewer = ["--limit", "8", "--test-limit", str(whole["gzsl"] - 1)]
    assert main([*given, *fewer, "epochs=1", "batch_size=4", "views=1"]) == 0
    assert seen == [((1, 8), 1, 4, 0.01)]
    assert kept[0] == 8
    assert kept[1] in (whole["zsl"], whole["zsl"] - 1)
    assert kept[2] == whole["gzsl"] - 1
    for wrong, words in (("speed=3", "name=value"), ("views=0", "'views' must be"), ("epochs=0", "epochs")):
        assert main([*given, wrong]) == 2
        assert words in capsys.readouterr().err
