from __future__ import annotations

import json

import pytest

from ramatch.data.benchmarks import BENCHMARKS
from ramatch.errors import RamatchError
from ramatch.settings import parse_value
from ramatch.train.config import (
    FREE_ON_RESUME,
    DataConfig,
    ModelConfig,
    TrainConfig,
    differences,
    dump_config,
    list_recipes,
    load_recipe,
)


def test_every_benchmark_has_a_recipe_that_loads() -> None:
    recipes = list_recipes()
    assert set(BENCHMARKS) | {"coco-ov-smoke", "coco-ov-clip", "coco-ov-reference", "own-data", "compared"} == set(
        recipes
    )
    for name, about in recipes.items():
        config = load_recipe(name)
        assert about, f"{name} does not say what it is"
        assert config.data.path.startswith("data/")
        assert config.output == f"runs/{name}"


@pytest.mark.parametrize(
    ("name", "lr", "lambda2"),
    [
        ("coco", 5e-6, 0.05),
        ("nus-wide", 5e-6, 0.05),
        ("rap", 5e-5, 0.01),
        ("pa100k", 5e-5, 0.01),
        ("multiscene", 5e-5, 0.01),
        ("mlrsnet", 5e-5, 0.01),
    ],
)
def test_papers_hyper_parameters(name: str, lr: float, lambda2: float) -> None:
    config = load_recipe(name)
    ram = config.model.ram_config()
    assert (config.optim.lr, ram.lambda2, ram.lambda1) == (lr, lambda2, 0.1)
    assert (config.epochs, config.batch_size, config.optim.prompt_lr) == (6, 32, 1e-3)
    assert (ram.max_iter, ram.prompt_tokens, ram.adapted_layers) == (100, 4, 3)


def test_overrides_reach_every_level() -> None:
    config = load_recipe(
        "coco",
        [
            "optim.lr=1e-4",
            "epochs=2",
            "model.ram.lambda2=0.02",
            "data.validation=0",
            "optim.clip_norm=none",
            'model.ram.templates=["a {}."]',
            "data.path=/x y",
            "augment.enabled=false",
            "model.image_size=[128, 64]",
            "augment.crop=none",
            "model.ram.prompts=none",
        ],
    )
    assert (config.optim.lr, config.epochs, config.optim.clip_norm) == (1e-4, 2, None)
    assert config.model.ram_config().lambda2 == 0.02
    assert config.model.ram_config().lambda1 == 0.1, "the recipe's other settings stay"
    assert config.model.ram_config().templates == ("a {}.",)
    assert (config.data.path, config.data.validation) == ("/x y", 0)
    assert config.augment.enabled is False
    assert (config.augment.crop, config.model.ram_config().prompts) == ("none", "none"), "a word there, not nothing"
    assert config.model.image_size == (128, 64)


def test_validation_is_a_share_or_a_path() -> None:
    assert load_recipe("coco", ["data.validation=0.25"]).data.validation == 0.25
    assert load_recipe("coco", ["output=7"]).output == "7"
    assert load_recipe("coco", ["data.validation=val.json"]).data.validation == "val.json"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optim.learning_rate=1", "optim.lr"),
        ("speed=1", "batch_size"),
        ("model.ram.lambda3=1", "lambda2"),
        ("epochs=two", "whole number"),
        ("epochs=1.5", "whole number"),
        ("epochs=0", "at least 1"),
        ("optim.lr=fast", "number"),
        ("precision=fp8", "bf16"),
        ("loss=mse", "mmc"),
        ("augment.scale=0.5", "list of 2"),
        ("augment.flip=2", "augment.flip.*must lie in"),
        ("data.cache=gpu", "device"),
        ("epochs", "name=value"),
        ("epochs.x=1", "not a group"),
        ("model.preset=mine", "reference"),
        ("data.validation=1.5", "data.validation.*must lie in"),
    ],
)
def test_wrong_overrides_say_what_is_right(override: str, told: str) -> None:
    with pytest.raises(RamatchError, match=told):
        load_recipe("coco", [override])


def test_unknown_recipe_lists_the_known(tmp_path) -> None:
    with pytest.raises(RamatchError, match="coco-ov-smoke"):
        load_recipe("cocoo")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(RamatchError, match="not valid YAML"):
        load_recipe(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(RamatchError, match="named values"):
        load_recipe(tmp_path / "list.yaml")


def test_numbers_that_yaml_takes_for_text(tmp_path) -> None:
    """YAML 1.1 reads 5e-6, without a point, as text."""
    (tmp_path / "a.yaml").write_text("optim: {lr: 5e-6}")
    assert load_recipe(tmp_path / "a.yaml").optim.lr == 5e-6


def test_saved_config_comes_back(tmp_path) -> None:
    config = load_recipe("nus-wide", ['data.classes=["cat", "dog"]', "model.image_size=[64, 32]"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_recipe(tmp_path / "config.yaml") == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert load_recipe(tmp_path / "config.json") == config


def test_config_needs_no_yaml(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    config = TrainConfig(data=DataConfig(path="x"))
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert load_recipe(tmp_path / "config.yaml") == config
    with pytest.raises(RamatchError, match=r"ramatch\[train\]"):
        load_recipe("coco")


def test_differences_ignore_what_changes_nothing() -> None:
    a = TrainConfig()
    b = a.replace(**{"output": "elsewhere", "data.workers": 0, "checkpoint.keep": 9, "log_every": 3})
    assert differences(a.to_dict(), b.to_dict()) == []
    c = a.replace(**{"optim.lr": 1.0, "epochs": 9})
    assert [d.split(":")[0] for d in differences(a.to_dict(), c.to_dict())] == ["epochs", "optim.lr"]
    for name in FREE_ON_RESUME:
        part: object = a
        for step in name.split("."):
            part = getattr(part, step)  # a misspelt name would silently protect nothing


def test_values_from_the_command_line() -> None:
    assert [parse_value(v) for v in ("3", "0.5", "true", "None", "a,b", "[1]", "")] == [
        3,
        0.5,
        True,
        None,
        "a,b",
        [1],
        "",
    ]


def test_settings_of_ram_are_brought_to_their_types():
    assert ModelConfig(ram={"max_weight": 1, "templates": ["{}"]}).ram_config().templates == ("{}",)
    for wrong in ({"max_weight": "half"}, {"lpd": "perhaps"}, {"templates": 3}):
        with pytest.raises(RamatchError, match=next(iter(wrong))):
            ModelConfig(ram=wrong)
