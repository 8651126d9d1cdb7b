"""Weights in fewer bits on disk: how far they may be off, and what is said of damaged files."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import close, pixels, tiny_ram

from ramatch.cli import main
from ramatch.config import WEIGHTS
from ramatch.errors import RamatchError
from ramatch.modeling.checkpoints.folder import convert, load_ram, load_saved_backbone, save_ram
from ramatch.modeling.checkpoints.hashes import LIST
from ramatch.modeling.checkpoints.packing import MOST_LOST, SHORTEST, pack, quantize, unpack
from ramatch.modeling.known import LEAST, Known

NAMES = ["cat", "red traffic light", "kite"]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(3, 16), (1, 40), (5, 4, 2, 2), (2, 3, 3, 3)]),
    size=st.floats(-18, 18),
    spread=st.floats(0, 6),
    seed=st.integers(0, 1000),
)
def test_no_number_is_off_by_more_than_half_a_step_of_its_channel(shape, size, spread, seed):
    g = torch.Generator().manual_seed(seed)
    ranges = 10 ** (size + spread * torch.rand(shape[0], *[1] * (len(shape) - 1), generator=g))
    weight = torch.randn(shape, generator=g) * ranges
    steps, scale = quantize(weight, "a.weight")
    assert steps.dtype == torch.int8
    assert scale.shape == (shape[0], *[1] * (len(shape) - 1))
    largest = weight.abs().amax(tuple(range(1, len(shape))), keepdim=True)
    close(scale / (largest / 127).clamp(min=1e-30), torch.ones_like(scale), 1e-5)
    again = unpack({"a.weight.int8": steps, "a.weight.scale": scale}, "there")["a.weight"]
    assert ((again - weight).abs() <= 0.50001 * scale).all()
    assert torch.equal(unpack(pack({"a.weight": again}, "int8"), "there")["a.weight"], again)  # rounded once


def test_which_tensors_take_how_many_bits():
    wide = torch.ones(4, SHORTEST)
    tensors = {
        "a.weight": wide,
        "text.tokens.weight": wide,
        "positions": wide,  # not a weight: each row is a place of its own
        "mask.weight": torch.ones(2, 1, 3, 3),
        "norm.weight": torch.ones(64),
        "none": torch.zeros(0, 0, 8),
        "count": torch.tensor(3),
        "tau": torch.tensor(0.5),
    }
    half, full = torch.float16, torch.float32
    common = {"norm.weight": full, "none": full, "count": torch.int64, "tau": full}
    expected = {
        "fp32": dict.fromkeys(("a.weight", "text.tokens.weight", "positions", "mask.weight"), full),
        "fp16": dict.fromkeys(("a.weight", "positions", "mask.weight"), half),
        "int8": dict.fromkeys(("positions", "mask.weight"), half),
    }
    for name in ("a.weight", "text.tokens.weight"):
        for weights in ("fp16", "int8") if name.startswith("text") else ("int8",):
            expected[weights] |= {f"{name}.int8": torch.int8, f"{name}.scale": full}
    for weights in WEIGHTS:
        packed = pack(tensors, weights)
        assert {name: t.dtype for name, t in packed.items()} == expected[weights] | common
        read = unpack(packed, "there")
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(read[name].float(), tensor.float())
    with pytest.raises(RamatchError, match=r"weights 'int4' are not known; choose one of fp32, fp16, int8"):
        pack(tensors, "int4")
    for bad in (float("nan"), float("inf")):
        with pytest.raises(RamatchError, match=r"'a\.weight' holds numbers that are not finite"):
            pack({"a.weight": torch.full((2, SHORTEST), bad)}, "int8")


def test_tensors_with_outliers_stay_halves():
    """One number of each channel that is much larger than the rest would leave these hardly a bit."""
    weight = torch.randn(8, 256)
    even = unpack(pack({"a.weight": weight}, "int8"), "there")["a.weight"]
    assert 0 < (even - weight).norm() <= MOST_LOST * weight.norm()
    weight[:, 0] = 100
    packed = pack({"a.weight": weight, "text.tokens.weight": weight}, "int8")
    assert packed["a.weight"].dtype == torch.float16
    assert "text.tokens.weight.int8" in packed  # words are large, and looked up one at a time


def test_a_row_of_zeros_stays_one():
    weight = torch.randn(3, 32)
    weight[1] = 0
    again = unpack(pack({"a.weight": weight}, "int8"), "there")["a.weight"]
    assert torch.equal(again[1], weight[1])


def test_a_damaged_scale_is_named(tmp_path):
    save_ram(tiny_ram(), tmp_path, with_backbone=True, weights="int8")
    (tmp_path / LIST).unlink()
    file = tmp_path / "backbone" / "model-text.safetensors"
    good = load_file(file)
    name = "text.blocks.1.fc1.weight"

    def attempt(says, tensors):
        save_file(tensors, file)
        with pytest.raises(RamatchError, match=rf"model-text\.safetensors: tensor '{name}\.scale' {says}"):
            load_ram(tmp_path)

    scale = good[f"{name}.scale"]
    attempt("is missing, without which", {k: v for k, v in good.items() if k != f"{name}.scale"})
    attempt(r"is \(3, 1\), expected \(96, 1\)", good | {f"{name}.scale": scale[:3].clone()})
    attempt(r"is \(1, 96\), expected \(96, 1\)", good | {f"{name}.scale": scale.T.contiguous()})
    for value in (float("nan"), float("inf"), -1.0):
        attempt("is damaged", good | {f"{name}.scale": torch.full_like(scale, value)})
    save_file(good | {f"{name}.int8": good[f"{name}.int8"][:5].clone(), f"{name}.scale": scale[:5].clone()}, file)
    with pytest.raises(RamatchError, match=rf"'{name}' is \(5, 48\), expected \(96, 48\)"):
        load_ram(tmp_path)
    save_file({k: v for k, v in good.items() if not k.startswith(name)}, file)
    with pytest.raises(RamatchError, match=rf"tensor '{name}' is missing"):
        load_ram(tmp_path)


def test_halves_as_they_were_written_before(tmp_path):
    """Folders of earlier versions have their scales in halves, and words without one where all are zero."""
    ram = tiny_ram()
    save_ram(ram, tmp_path, with_backbone=True, weights="fp16")
    (tmp_path / LIST).unlink()
    file = tmp_path / "backbone" / "model-text.safetensors"
    tensors = load_file(file)
    scale = tensors["text.tokens.weight.scale"].half()
    scale[3] = 0
    save_file(tensors | {"text.tokens.weight.scale": scale}, file)
    words = load_ram(tmp_path).backbone.text.tokens.weight
    assert words.dtype == torch.float32
    assert not words[3].any()
    step = ram.backbone.text.tokens.weight.abs().amax(1, keepdim=True) / 127
    kept = torch.arange(len(words)) != 3
    assert ((words - ram.backbone.text.tokens.weight).abs() <= 0.6 * step)[kept].all()


def read_folder(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_is_converted_with_all_that_lies_in_it(tmp_path, capsys):
    ram = tiny_ram()
    ram.known = Known(torch.randn(LEAST, ram.backbone.dim), torch.ones(4))
    save_ram(ram, tmp_path / "run" / "model", with_backbone=True)
    for name, text in {"README.md": "# card", "calibration.json": "{}"}.items():
        (tmp_path / "run" / "model" / name).write_text(text)
    before = read_folder(tmp_path / "run" / "model")
    small = tmp_path / "small"
    assert main(["convert", str(tmp_path / "run"), str(small), "--weights", "int8"]) == 0
    assert capsys.readouterr().out.strip() == str(small)
    after = read_folder(small)
    assert after.keys() == before.keys()
    for name in before.keys() - {LIST}:  # `load_ram` below reads the new one
        if name.endswith(".safetensors") and name != "known.safetensors":  # which is in int8 already
            assert len(after[name]) < 0.45 * len(before[name])  # the tensors are tiny: names take some
        else:
            assert after[name] == before[name]
    save_ram(ram, tmp_path / "direct", with_backbone=True, weights="int8")
    for part in ("ram.safetensors", "backbone/model-text.safetensors", "backbone/model-vision.safetensors"):
        one, other = load_file(small / part), load_file(tmp_path / "direct" / part)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    again = load_ram(small)
    with torch.no_grad():
        close(again(pixels(), NAMES).region, ram(pixels(), NAMES).region, 2e-2)
    # back to float32: what int8 holds, to the last bit
    whole = load_ram(convert(small, tmp_path / "whole", "fp32"))
    for (name, one), other in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    backbone = load_saved_backbone(convert(small / "backbone", tmp_path / "backbone", "fp16"))
    assert backbone.fingerprint() == again.backbone.fingerprint()


def test_only_folders_of_ours_are_converted(tmp_path):
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "config.json").write_text(json.dumps({"model_type": "clip"}))
    for name in (tmp_path / "clip", tmp_path / "none"):
        with pytest.raises(RamatchError, match="is not a folder that ramatch wrote"):
            convert(name, tmp_path / "out", "int8")
    save_ram(tiny_ram(), tmp_path / "model")
    with pytest.raises(RamatchError, match="exists and is not an empty folder"):
        convert(tmp_path / "model", tmp_path / "clip", "int8")
