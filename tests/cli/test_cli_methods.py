"""Systems that RAM is compared with, on the command line: listed, used as they are, prepared, trained, resumed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from train_tiny import COLOURS, tiny_values, tiny_world

from ramatch.config import METHODS as NAMES
from ramatch.data.records import read_annotations
from ramatch.methods import METHODS
from ramatch.methods.base import Method, MethodOutput
from ramatch.modeling.losses import LOSSES
from ramatch.modeling.ram import Labels, Trunk
from ramatch.recognizer import Recognizer
from ramatch.train import train
from ramatch.train.cached import CachedTask, fit_cached, ram_stem
from ramatch.train.config import CachedConfig, TrainConfig
from ramatch.train.features import Views, cache_features

CPU = ("--device", "cpu", "--workers", 0)
WORDS = ",".join(COLOURS)


class Centered(Method):
    """Cosines of centered features, whose mean it has seen, in a learned space."""

    name = "clip"  # in its place: the lists of names are fixed
    needs_images = True
    mean: Tensor

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.register_buffer("mean", torch.zeros(self.backbone.dim))
        self.map = nn.Linear(self.backbone.dim, self.backbone.dim)
        nn.init.eye_(self.map.weight)

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        return self.similarity(self.map(image - self.mean), labels).float() * 10 - 1, None, ()

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        return LOSSES["asl"](output.image, targets)

    def prepare(self, trunks: Iterable[Trunk], labels: Sequence[str]) -> None:
        assert not self.training
        assert not torch.is_autocast_enabled("cpu")
        self.mean.copy_(torch.cat([trunk.image.float() for trunk in trunks]).mean(0))


class Looking(Centered):
    """The same without anything that learns."""

    learns = False

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.map.requires_grad_(False)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "clip", Centered)


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "clip", Looking)


def config_of(world: Path, out: Path, **changes: object) -> TrainConfig:
    values = tiny_values(world, output=str(out), model__method="clip", **changes)
    return TrainConfig.from_dict(values)


def mean_feature(world: Path, keys: Sequence[str]) -> Tensor:
    found = Recognizer.from_pretrained(world / "backbone", device="cpu")
    data = {r.key: r for r in read_annotations(world / "data", split="train").records}
    pixels = torch.stack([found.ram.preprocess.resize(data[key].load()) for key in keys])
    with torch.no_grad():
        return found.ram.trunk(pixels).image.mean(0)


# ------------------------------------------------------------------------------------------------------ the list


def test_methods_are_listed(ramatch, tmp_path):
    result = ramatch("methods")
    assert result.code == 0
    rows = {line.split()[0]: line for line in result.out.splitlines()[1:] if line}
    for name, citation in NAMES.items():
        assert citation in rows[name]
    told = json.loads(ramatch("methods", "--json").out)
    assert [row["name"] for row in told] == list(NAMES)
    by_name = {row["name"]: row for row in told}
    assert (by_name["ram"]["training"], by_name["ram"]["needs"]) == (True, "labelled images")
    assert (by_name["clip"]["training"], by_name["clip"]["needs"]) == (False, "nothing")
    for name, kind in METHODS.items():
        assert by_name[name]["text_tower"] == kind.needs_text
    assert ramatch("methods", "--json", tmp_path / "methods.json").out == ""
    assert json.loads((tmp_path / "methods.json").read_text()) == told


@pytest.mark.parametrize("verb", ["train", "eval", "tag", "explain"])
def test_unknown_names_are_told_the_known(ramatch, verb):
    ramatch(verb, *{"tag": ["a.png"], "explain": ["a.png"]}.get(verb, []), "--method", "foo").refused("foo", *NAMES)


# ---------------------------------------------------------------------------------------------- as they are


def test_clip_as_it_is(ramatch, world, tmp_path):
    """On a plain backbone, and instead of a trained model on its own: the same cosines of the global feature."""
    picture = world / "data" / "images" / "test000.png"
    options = ("--labels", WORDS, "--device", "cpu", "--format", "json")
    result = ramatch("tag", picture, "--model", world / "backbone", "--method", "clip", *options)
    assert result.code == 0
    plain = Recognizer.from_pretrained(world / "backbone", device="cpu")
    plain.set_vocabulary(list(COLOURS))
    output = plain.ram(plain.load(picture)[0][None], list(COLOURS))
    best = list(COLOURS)[int(output.image[0].argmax())]
    tags = json.loads(result.out)[0]["labels"]
    assert tags[0]["label"] == best
    assert tags[0]["relative"] == pytest.approx(float((20 * output.image[0]).softmax(-1).max()), abs=1e-4)
    test = ("--data", world / "data", "--method", "clip", *CPU)
    measured = ramatch("eval", "--model", world / "backbone", *test)
    assert (measured.code, measured.err) == (0, "")
    plain.save_pretrained(tmp_path / "model", with_backbone=True)
    assert ramatch("eval", "--model", tmp_path / "model", *test).out == measured.out
    for change in (("--matcher", "ot"), ("score=partial",)):
        ramatch("eval", "--model", world / "backbone", *test, *change).refused("clip", "of its own")
    result = ramatch(
        *("explain", picture, "--model", world / "backbone", "--method", "clip", "--labels", WORDS),
        *("--device", "cpu", "--out", tmp_path / "why.png"),
    )
    assert result.code == 0, result.err
    assert (tmp_path / "why.png").stat().st_size > 1000
    plain.save_pretrained(tmp_path / "adapters")
    ramatch("eval", "--model", tmp_path / "adapters", *test).refused("trained 'ram'", "backbone")


def test_what_cannot_be_used_as_it_is(ramatch, world, learned, monkeypatch):
    call = ("eval", "--data", world / "data", "--model", world / "backbone", "--method", "clip", *CPU)
    ramatch(*call).refused("clip", "learns", "ramatch train --method clip")
    monkeypatch.setitem(METHODS, "clip", Looking)
    ramatch(*call).refused("clip", "unlabelled images", "ramatch train --method clip")


def test_nothing_to_train(ramatch, world, tmp_path):
    call = (
        "train",
        "--method",
        "clip",
        "--data",
        world / "data",
        "--model",
        world / "backbone",
        "--out",
        tmp_path / "r",
    )
    ramatch(*call).refused("clip", "nothing to train", "ramatch eval --method clip")
    assert not (tmp_path / "r").exists()


# ---------------------------------------------------------------------------------------------- prepared, trained


def test_train_and_use(ramatch, world, tmp_path, learned):
    """One run folder: trained by the one trainer after a look at the images, then used by every verb."""
    run, picture = tmp_path / "run", world / "data" / "images" / "test000.png"
    changes = ("epochs=15", "batch_size=16", "data.workers=0", "data.validation=0.2", "optim.lr=0.02")
    changes = (*changes, "optim.ema_decay=0.9", "tensorboard=false", "model.preset=ramatch")
    changes = (*changes, "model.ram.saa_layers=1", "model.ram.adapted_layers=1")
    call = ("train", "--method", "clip", "--data", world / "data", "--model", world / "backbone", "--device", "cpu")
    result = ramatch(*call, "--out", run, *changes)
    assert result.code == 0, result.err
    kept = json.loads((run / "model" / "config.json").read_text())
    assert kept["method"] == {"name": "clip", "settings": {}}
    found = Recognizer.from_pretrained(run, device="cpu")
    assert isinstance(found.ram, Centered)
    held = set(json.loads((run / "validation.json").read_text()))
    rows = [r.key for r in read_annotations(world / "data", split="train").records if r.key not in held]
    assert torch.allclose(found.ram.mean, mean_feature(world, rows), atol=1e-5)  # images that training saw, no others
    before = config_of(world, tmp_path / "none", epochs=1, optim__lr=0.0, optim__ema_decay=0.0)
    start = train(before, progress=False).reports["validation"]["mAP"]
    assert json.loads((run / "eval.json").read_text())["validation"]["mAP"] > start + 10
    test = ("--model", run, "--data", world / "data", *CPU)
    measured = ramatch("eval", *test)
    assert measured.code == 0
    assert ramatch("eval", *test, "--method", "clip").out == measured.out  # it knows which it is
    result = ramatch("tag", picture, "--model", run, "--labels", WORDS, "--device", "cpu", "--format", "json")
    assert len(json.loads(result.out)[0]["labels"]) == 5
    options = ("--labels", WORDS, "--device", "cpu", "--out", tmp_path / "why.png")
    assert ramatch("explain", picture, "--model", run, *options).code == 0
    ramatch("explain", picture, "--model", run, *options, "--matchers", "ot").refused("clip", "matching")
    calibrated = ramatch("calibrate", run, "--data", world / "data", *CPU)
    assert calibrated.code == 0, calibrated.err
    numbers = json.loads((run / "model" / "calibration.json").read_text())["tensors"]
    assert sum(numbers["weights"]) > 0  # its three features are one
    result = ramatch("tag", picture, "--model", run, "--labels", WORDS, "--device", "cpu", "--format", "json")
    assert json.loads(result.out)[0]["labels"][0]["calibrated"]


def test_resumed_as_if_never_stopped(world, tmp_path, learned, monkeypatch):
    changes = {"epochs": 2, "checkpoint__keep": 9, "data__cache": "device"}
    whole = train(config_of(world, tmp_path / "whole", **changes), progress=False)
    half = config_of(world, tmp_path / "half", **changes)
    train(half, progress=False)
    for file in sorted((tmp_path / "half" / "checkpoints").glob("step-*.pt"))[1:]:
        file.unlink()

    def refuse(*_: object) -> None:
        raise AssertionError("what it saw is in the checkpoint")

    monkeypatch.setattr(Centered, "prepare", refuse)
    again = train(half, resume="auto", progress=False)
    assert again.steps == whole.steps
    one, other = (
        Recognizer.from_pretrained(tmp_path / name, device="cpu").ram.adapters() for name in ("whole", "half")
    )
    assert one["mean"].abs().sum() > 0
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("cache", ["none", "device"])
def test_only_prepared(ramatch, world, tmp_path, looking, cache):
    run = tmp_path / "run"
    result = train(config_of(world, run, data__cache=cache), progress=False)
    assert (result.steps, result.best, set(result.reports)) == (0, None, {"validation"})
    found = Recognizer.from_pretrained(run, device="cpu")
    held = set(json.loads((run / "validation.json").read_text()))
    rows = [r.key for r in read_annotations(world / "data", split="train").records if r.key not in held]
    assert torch.allclose(found.ram.mean, mean_feature(world, rows), atol=1e-5)
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert ramatch("eval", "--model", run, "--data", world / "data", *CPU).code == 0
    call = ("train", "--method", "clip", "--data", world / "data", "--model", world / "backbone", "--out", run)
    ramatch(*call, "--device", "cpu", "data.workers=0").refused("already holds a run")


def test_cached_features(world, looking):
    """`fit_cached` of a system that does not learn leaves it as its look at the images left it."""
    ram = Recognizer.from_pretrained(world / "backbone", device="cpu").ram
    made = Looking(ram.backbone, ram.config, METHODS["clip"].settings_type())
    pixels = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    cache = cache_features(ram_stem(made), pixels, Views(2))
    told = fit_cached(CachedTask(made, cache, torch.zeros(40, 2), ["red", "blue"], CachedConfig()))
    assert told["loss"] == []
    with torch.no_grad():
        assert torch.allclose(made.mean, made.trunk(pixels).image.mean(0), atol=1e-5)  # the first view: no mirror


# ------------------------------------------------------------------------------ the systems that are not trained


@pytest.mark.parametrize("name", ["sparc", "piaa"])
def test_those_that_look_at_images(ramatch, world, tmp_path, name):
    run, picture = tmp_path / "run", world / "data" / "images" / "test000.png"
    call = ("train", "--method", name, "--data", world / "data", "--model", world / "backbone", "--out", run)
    changes = ("data.workers=0", "data.validation=0.2", "model.preset=ramatch", "tensorboard=false")
    changes = (*changes, "model.ram.saa_layers=1", "model.ram.adapted_layers=1")
    sizes = {"sparc": ("model.settings.bank=64", "model.settings.partners=3"), "piaa": ("model.settings.patches=500",)}
    result = ramatch(*call, "--device", "cpu", *changes, *sizes[name])
    assert result.code == 0, result.err
    assert "0 steps" in result.out
    found = Recognizer.from_pretrained(run, device="cpu")
    assert int(found.ram.count) == {"sparc": 64, "piaa": 500}[name]
    test = ("--model", run, "--data", world / "data", *CPU)
    before = ramatch("eval", *test, "--protocol", "zsl")
    assert before.code == 0
    options = ("--labels", WORDS, "--device", "cpu")
    assert ramatch("tag", picture, "--model", run, *options).code == 0
    assert ramatch("explain", picture, "--model", run, *options, "--out", tmp_path / "why.png").code == 0
    calibrated = ramatch("calibrate", run, "--data", world / "data", *CPU)
    assert calibrated.code == 0, calibrated.err
    result = ramatch("tag", picture, "--model", run, *options, "--format", "json")
    assert json.loads(result.out)[0]["labels"][0]["calibrated"]
    config = json.loads((run / "model" / "config.json").read_text())
    assert config["method"]["name"] == name


def test_tagclip_as_it_is(ramatch, world, tmp_path):
    picture = world / "data" / "images" / "test000.png"
    common = ("--model", world / "backbone", "--method", "tagclip", "--device", "cpu")
    assert ramatch("tag", picture, *common, "--labels", WORDS).code == 0
    ramatch("tag", picture, *common, "--labels", WORDS, "--matcher", "kcot").refused("tagclip", "matchers are RAM's")
    assert ramatch("explain", picture, *common, "--labels", WORDS, "--out", tmp_path / "why.png").code == 0
    assert ramatch("eval", *common, "--data", world / "data", "--workers", 0).code == 0
    call = ("train", "--method", "tagclip", "--data", world / "data", "--model", world / "backbone")
    ramatch(*call, "--out", tmp_path / "r").refused("tagclip", "nothing to train")
