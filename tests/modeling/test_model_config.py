"""Settings: every row of the table of differences between paper and program, validation, and copies."""

from __future__ import annotations

import json

import pytest
from tiny_models import CHOICES

from ramatch.config import PRESETS, RAMConfig, preset
from ramatch.errors import RamatchError

PAPER, REFERENCE, OURS = PRESETS["paper"], PRESETS["reference"], PRESETS["ramatch"]

ROWS = {
    "saa_layers": (3, -1),  # last three; all, from the patch embedding on
    "combine": ("mean", "sum"),
    "tss_input": ("before", "after"),
    "tau_u": (None, 0.1),  # None: CLIP's own temperature
    "teacher": ("labels", "regions"),
    "teacher_floor": ("image", "batch"),
    "mask_conv": ("depthwise", "full"),
    "mask_kernel": (3, 3),
    "prompt_layers": (3, 3),
    "tau_global": (None, None),  # None: 1 / logit_scale
    "tau_region": (2e-3, 2e-3),
    "pixels": ("backbone", "half"),
    "stop": ("marginal", "scaling"),
    "plan_scale": ("one", "one"),
    "score": ("softmax", "softmax"),
    # hyper-parameters both share
    "adapted_layers": (3, 3),
    "visual_prompts": (8, 8),
    "prompts": ("deep", "deep"),
    "prompt_tokens": (4, 4),
    "templates": (("A photo of a {}.",), ("A photo of a {}.",)),
    "matcher": ("kcot", "kcot"),
    "lambda1": (0.1, 0.1),
    "lambda2": (0.05, 0.05),
    "max_iter": (100, 100),
    "lpd": (True, True),
    "tkt": (True, True),
    "tss": (True, True),
    "max_weight": (0.0, 0.0),
    "tss_share": (1.0, 1.0),
    "region_share": (0.5, 0.5),
    "best_share": (0.0, 0.0),
}


@pytest.mark.parametrize("setting", ROWS)
def test_table_of_differences(setting):
    assert (getattr(PAPER, setting), getattr(REFERENCE, setting)) == ROWS[setting]


def test_reference_stops_at_a_thousandth():
    assert REFERENCE.tol == 1e-3


def test_ours_does_not_depend_on_the_vocabulary():
    assert (OURS.plan_scale, OURS.matcher) == ("labels", "kcot")
    assert OURS.score != "softmax"


def test_nus_settings_are_changes_of_the_preset():
    nus = preset("reference", prompt_layers=6, tau_region=2e-4)
    assert (nus.prompt_layers, nus.tau_region, nus.saa_layers) == (6, 2e-4, -1)
    assert REFERENCE.prompt_layers == 3  # presets are not changed


@pytest.mark.parametrize("name", list(CHOICES))
def test_each_choice_is_checked(name):
    with pytest.raises(RamatchError, match=f"setting '{name}' must be one of"):
        preset("paper", **{name: "nonsense"})
    for value in CHOICES[name]:
        assert getattr(preset("paper", **{name: value}), name) == value


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lambda1": 0}, "'lambda1' must be positive"),
        ({"tol": -1.0}, "'tol' must be positive"),
        ({"tau_region": 0.0}, "'tau_region' must be positive"),
        ({"lambda1": float("nan")}, "'lambda1' must be a number"),
        ({"lambda2": -0.1}, "'lambda2' must not be negative"),
        ({"visual_prompts": -1}, "'visual_prompts' must not be negative"),
        ({"adapted_layers": -1}, "'adapted_layers' must not be negative"),
        ({"mask_kernel": 4}, "'mask_kernel' must be odd"),
        ({"max_iter": 0}, "'max_iter' must be at least 1"),
        ({"saa_layers": -2}, "'saa_layers' must be at least -1"),
        ({"max_weight": 1.5}, "'max_weight' must lie in"),
        ({"tss_share": -0.1}, "'tss_share' must lie in"),
        ({"region_share": 1.1}, "'region_share' must lie in"),
        ({"best_share": 0.5}, "best_share needs plan_scale 'labels'"),
        ({"templates": ("no place",)}, "must contain {} exactly once"),
        ({"templates": ("{} and {}",)}, "must contain {} exactly once"),
        ({"templates": "A photo of a {}."}, "template"),
        ({"lamda1": 0.1}, "unknown setting"),
    ],
    ids=str,
)
def test_bad_settings_are_named(change, says):
    with pytest.raises(RamatchError, match=says):
        preset("paper", **change)


def test_unknown_preset():
    with pytest.raises(RamatchError, match="unknown preset 'papre'; known: ramatch, aligned, aligned-best"):
        preset("papre")


@pytest.mark.parametrize("name", list(PRESETS))
def test_dictionaries_round_trip(name):
    config = PRESETS[name].replace(templates=["a {}", "the {}"])
    assert RAMConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(RamatchError, match="unknown setting"):
        RAMConfig.from_dict({"something": 1})
