"""What a model learns of its user's own images: directions of labels, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from train_tiny import SEEN, UNSEEN, squares, tiny_backbone

from ramatch.config import preset
from ramatch.data.records import read_annotations
from ramatch.errors import RamatchError
from ramatch.evaluation.calibration import Calibrator, Words
from ramatch.evaluation.intervals import paired_change
from ramatch.evaluation.metrics import mean_ap
from ramatch.evaluation.models import FEATURES, collect_scores, load_model
from ramatch.library.features import encode_words
from ramatch.modeling.learned import Learned
from ramatch.modeling.ram import RAM
from ramatch.recognizer import Recognizer
from ramatch.train.assemble import build_ram
from ramatch.train.config import ModelConfig, OwnConfig, load_recipe
from ramatch.train.directions import PRIORS, choose, learn, look, misses, strictest
from ramatch.train.own import teach, train_own


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return squares(tmp_path_factory.mktemp("own") / "data", train=60, test=30)


@pytest.fixture(scope="module")
def model(data: Path) -> Path:
    """A calibrated model folder that stands alone."""
    torch.manual_seed(0)
    ram = RAM(tiny_backbone(), preset("aligned-best", adapted_layers=1, max_iter=20)).eval()
    ram.background = ("white", "photo")
    found = collect_scores(ram, read_annotations(data, split="train"), workers=0, progress=False)
    calibrator = Calibrator.fit(found.features, found.targets, names=FEATURES)
    Recognizer(ram, calibrator=calibrator).save_pretrained(data.parent / "model", with_backbone=True)
    return data.parent / "model"


def config(model: Path, data: Path, out: Path, **changes: object) -> OwnConfig:
    values = {"output": str(out), "model.backbone": str(model), "data.path": str(data), "device": "cpu"}
    return OwnConfig().replace(**values, **{"data.workers": 0}, **changes)


def part(data: Path, out: Path, count: int, shuffle: bool = False) -> Path:
    """The first images of the training set; with other images' labels, if they are to mean nothing."""
    content = json.loads((data / "train.json").read_text())
    images = content["images"][:count]
    if shuffle:
        order = np.random.default_rng(0).permutation(count)
        images = [[key, images[j][1]] for (key, _), j in zip(images, order, strict=True)]
    out.mkdir()
    (out / "images").symlink_to(data / "images")
    (out / "train.json").write_text(json.dumps({"classes": content["classes"], "images": images}))
    return out


def test_log_odds_are_linear_in_a_direction(model: Path, data: Path) -> None:
    recognizer = load_model(model, device="cpu")
    ram, labels = recognizer.ram, read_annotations(data, split="train").subset(range(5))
    pixels = torch.stack([ram.preprocess.resize(r.load()) for r in labels.records])
    sight = look(ram, recognizer.calibrator, pixels, labels.classes)
    found = collect_scores(ram, labels, workers=0, progress=False)
    np.testing.assert_allclose(sight.features, found.features, atol=1e-5)
    assert sight.slopes.shape == (2, 5, 4, 32)
    wanted = recognizer.calibrator.log_odds(torch.from_numpy(found.features))
    torch.testing.assert_close(sight.odds[0], wanted, atol=1e-3, rtol=1e-3)
    moved = sight.unit + 1e-3 * F.normalize(torch.randn(sight.unit.shape), dim=-1)  # so little that nothing else moves
    ram.learned = Learned(labels.classes, moved)
    after = recognizer.calibrator.log_odds(torch.from_numpy(collect_scores(ram, labels, workers=0).features))
    linear = torch.einsum("nkd,kd->nk", sight.slopes[0].float(), moved - sight.unit)
    torch.testing.assert_close(after - wanted, linear, atol=2e-3, rtol=0.1)


def test_directions_move_as_far_as_the_prior_lets_them(model: Path, data: Path) -> None:
    recognizer = load_model(model, device="cpu")
    labels = read_annotations(data, split="train")
    pixels = torch.stack([recognizer.ram.preprocess.resize(r.load()) for r in labels.records])
    sight, rows = look(recognizer.ram, recognizer.calibrator, pixels, labels.classes), range(len(labels))
    loss, moved = [], []
    for prior in PRIORS:
        unit = learn(sight, labels.targets(), rows, prior)
        torch.testing.assert_close(unit.norm(dim=-1), torch.ones(4))
        loss.append(misses(sight, labels.targets(), rows, unit).sum())
        moved.append(float((unit - sight.unit).norm()))
    assert loss == sorted(loss, reverse=True), "the weaker the prior, the better it fits"
    assert moved == sorted(moved)
    assert moved[0] == 0 < moved[1]
    folds = [list(range(i, len(labels), 3)) for i in range(3)]
    found = choose(sight, labels.targets(), folds)
    assert found.prior in PRIORS
    rest = sorted(set(rows) - set(folds[0]))
    fitting = [learn(sight, labels.targets(), rest, prior) for prior in PRIORS]
    assert any(torch.equal(found.directions[0], unit) for unit in fitting), "learned without its own images"


def test_the_strictest_prior_that_is_hardly_worse_is_taken() -> None:
    rng = np.random.default_rng(0)
    best = rng.random(100)
    noise = best + rng.normal(0, 0.5, 100)
    noise += best.mean() + 0.01 - noise.mean()  # a little worse, by much less than chance
    assert strictest(np.stack([best + 1 + 0.1 * rng.random(100), noise, best])) == 1
    assert strictest(np.stack([best, best + 0.1])) == 0


def test_a_model_that_learned_is_better_and_says_so(model: Path, data: Path, tmp_path: Path) -> None:
    result = train_own(config(model, data, tmp_path / "run"), progress=False)
    found = result.changes["mAP"]
    assert result.better
    assert result.kept
    assert 0 < found.low < found.change < found.high
    assert "better on images that were kept aside" in result.to_table()
    before, after = (load_model(folder, device="cpu") for folder in (model, tmp_path / "run"))
    test = read_annotations(data, split="test_gzsl")
    maps = []
    for recognizer in (before, after):
        scores = collect_scores(recognizer.ram, test.restrict(SEEN), workers=0, progress=False)
        maps.append(mean_ap(recognizer.calibrator(scores.features, scores.words), scores.targets))
    assert maps[1] > maps[0], "on other images too"
    picture = str(data / "images/test000.png")
    for recognizer in (before, after):
        recognizer.set_vocabulary(list(UNSEEN))
    same = [recognizer.predict(picture).probabilities for recognizer in (before, after)]
    np.testing.assert_array_equal(*same)  # words that were not taught
    report = json.loads((tmp_path / "run/eval.json").read_text())
    assert report["kept_aside"]["mAP"]["after"] == pytest.approx(100 * found.after, abs=0.01)
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "finished"
    again = train_own(load_recipe(tmp_path / "run/config.yaml", [f"output={tmp_path / 'again'}"]), progress=False)
    assert again.changes == result.changes, "the same run gives the same"


def test_a_fold_is_answered_by_what_was_learned_without_it(model: Path, data: Path) -> None:
    labels = read_annotations(data, split="train").subset(range(30))
    recognizer = load_model(model, device="cpu")
    found = teach(recognizer, labels, folds=3)
    assert recognizer.ram.learned is None, "the model itself is as it was"
    recognizer.ram.learned = found.learned
    known = collect_scores(recognizer.ram, labels, workers=0, progress=False)
    assert mean_ap(recognizer.calibrator(known.features, known.words), known.targets) > mean_ap(
        found.after, found.targets
    ), "images that were learned are known better than those kept aside"


def test_nothing_is_learned_of_labels_without_meaning(model: Path, data: Path, tmp_path: Path) -> None:
    noise = part(data, tmp_path / "noise", 40, shuffle=True)
    result = train_own(config(model, noise, tmp_path / "run"), progress=False)
    assert not result.better
    assert result.kept == (tmp_path / "run/model/learned.safetensors").exists()


def test_few_images_are_not_praised(model: Path, data: Path, tmp_path: Path) -> None:
    result = train_own(config(model, part(data, tmp_path / "eight", 8), tmp_path / "run"), progress=False)
    assert (result.better, result.changes) == (False, {})
    assert "8 images" in result.to_table()
    assert "better on images" not in result.to_table()
    with pytest.raises(RamatchError, match="at least 2"):
        train_own(config(model, part(data, tmp_path / "one", 1), tmp_path / "other"), progress=False)


def test_a_model_without_calibration_gets_one(data: Path, tmp_path: Path) -> None:
    ram = RAM(tiny_backbone(), preset("aligned-best", adapted_layers=1, max_iter=20)).eval()
    Recognizer(ram).save_pretrained(tmp_path / "plain", with_backbone=True)
    with pytest.raises(RamatchError, match="not calibrated"):
        teach(load_model(tmp_path / "plain", device="cpu"), read_annotations(data, split="train"))
    result = train_own(config(tmp_path / "plain", data, tmp_path / "run"), progress=False)
    assert "was not calibrated" in result.to_table()
    assert load_model(tmp_path / "run", device="cpu").calibrated


def test_a_run_is_not_overwritten_unless_it_is_gone_on_with(model: Path, data: Path, tmp_path: Path) -> None:
    eight = config(model, part(data, tmp_path / "eight", 8), tmp_path / "run")
    train_own(eight, progress=False)
    with pytest.raises(RamatchError, match=r"already holds a run.*--resume auto"):
        train_own(eight, progress=False)
    with pytest.raises(RamatchError, match="no such checkpoint"):
        train_own(eight, resume="x.pt", progress=False)
    assert train_own(eight, resume="auto", progress=False).images == 8
    with pytest.raises(RamatchError, match="choose another output folder"):
        train_own(eight.replace(**{"model.backbone": eight.output}), resume="auto", progress=False)
    assert (tmp_path / "run/model/config.json").is_file()


def test_a_model_goes_on_learning(model: Path, data: Path, tmp_path: Path) -> None:
    """Labels of an earlier teaching stay when others are taught; the same label is learned anew."""
    first = load_model(model, device="cpu")
    labels = read_annotations(data, split="train").subset(range(30))
    first.ram.learned = teach(first, labels.restrict(SEEN[:2])).learned
    second = teach(first, labels.restrict(SEEN[1:])).learned
    assert set(second.names) == set(SEEN)
    assert torch.equal(second.unit[second.names.index(SEEN[0])], first.ram.learned.unit[0])


def test_learned_labels_on_disk_and_in_a_vocabulary(model: Path, tmp_path: Path) -> None:
    recognizer = load_model(model, device="cpu")
    ram = recognizer.ram
    moved = F.normalize(torch.randn(1, 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    ram.learned = Learned(("Red",), moved)
    labels = ram.encode_labels(["blue", "red"])
    assert labels.learned.tolist() == [False, True]
    torch.testing.assert_close(labels.unit[1], moved[0])
    assert not torch.equal(labels.tss[1], moved[0]), "TSS looks at what the text tower says"
    directions, words = encode_words(recognizer, ["blue", "red"])
    torch.testing.assert_close(directions, labels.unit[:2])
    assert words.learned.tolist() == [False, True]
    recognizer.save_pretrained(tmp_path / "model", with_backbone=True)
    again = load_model(tmp_path / "model", device="cpu").ram.learned
    assert again.names == ("Red",)
    torch.testing.assert_close(again.unit, moved)
    ram.learned = Learned(("red",), torch.ones(1, 7))
    ram.learned.save(tmp_path / "model" / "learned.safetensors")
    (tmp_path / "model" / "SHA256SUMS.txt").unlink()
    with pytest.raises(RamatchError, match=r"7 numbers.*has 32"):
        load_model(tmp_path / "model", device="cpu")


def test_there_is_no_doubt_about_learned_labels() -> None:
    unit, features = torch.eye(3), np.full((1, 3, 1), 2.0)
    fitted = Calibrator(torch.ones(1), torch.zeros(()), torch.zeros(1), torch.ones(1), doubt=torch.zeros(4))
    plain, taught = Words(unit), Words(unit, None, torch.tensor([False, True, False]))
    sure = 1 / (1 + np.exp(-2.0))
    np.testing.assert_allclose(fitted(features, taught)[0], [1 / (1 + np.exp(-1.0)), sure, 1 / (1 + np.exp(-1.0))])
    assert fitted.trust(plain).tolist() == [0.5, 0.5, 0.5]
    assert fitted.trust(taught).tolist() == [0.5, 1.0, 0.5]


def test_an_interval_holds_what_chance_gives() -> None:
    rng = np.random.default_rng(0)
    targets = rng.random((200, 5)) < 0.3
    old, good = rng.random((200, 5)), rng.random((200, 5)) + targets
    better = paired_change(old, good, targets, mean_ap, resamples=200)
    assert 0 < better.low < better.change < better.high
    assert better.after == mean_ap(good, targets)
    same = paired_change(old, rng.random((200, 5)), targets, mean_ap, resamples=200)
    assert same.low < 0 < same.high
    assert paired_change(old, old, targets, mean_ap, resamples=20)[2:] == (0, 0)


def test_the_recipe_is_what_no_recipe_means() -> None:
    recipe = load_recipe("own-data", ["data.path=x"])
    assert isinstance(recipe, OwnConfig)
    assert recipe.model.backbone == "ramatch-mini"
    with pytest.raises(RamatchError, match="unknown setting 'epochs'"):
        load_recipe("own-data", ["epochs=3"])


def test_adapters_of_the_shipped_model_are_a_start_too() -> None:
    start = ModelConfig(backbone="ramatch-mini", preset="aligned", init="ramatch-mini")
    ram, shipped = build_ram(start, torch.device("cpu")), load_model("ramatch-mini", device="cpu", precision="fp32").ram
    for name, tensor in shipped.adapters().items():
        torch.testing.assert_close(ram.adapters()[name], tensor)
