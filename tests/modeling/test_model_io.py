"""Saving and loading: adapters apart from their backbone, by name and fingerprint."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import backbone, close, pixels, tiny_ram

from ramatch import Recognizer
from ramatch.errors import RamatchError
from ramatch.modeling.checkpoints.files import read_weights
from ramatch.modeling.checkpoints.folder import is_model_folder, load_ram, save_backbone, save_ram
from ramatch.modeling.checkpoints.hashes import LIST, check_hashes
from ramatch.modeling.checkpoints.loading import bundled_model, load_backbone
from ramatch.modeling.ram import RAM

NAMES = ["cat", "red traffic light", "kite"]


@pytest.mark.parametrize("name", ["paper", "reference", "ramatch"])
@pytest.mark.parametrize("kind", ["clip", "dual"])
def test_adapters_alone(tmp_path, name, kind):
    ram = tiny_ram(name, kind)
    with torch.no_grad():
        ram.tau_region.mul_(3)
        for layer in ram.region_set.tss:
            layer.point[1].running_mean.normal_()
        expected = ram(pixels(), NAMES)
    save_ram(ram, tmp_path / "m")
    assert is_model_folder(tmp_path / "m")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["SHA256SUMS.txt", "config.json", "ram.safetensors"]
    assert not any(k.startswith("backbone") for k in load_file(tmp_path / "m" / "ram.safetensors"))
    again = load_ram(tmp_path / "m", backbone=backbone(kind))
    with torch.no_grad():
        output = again(pixels(), NAMES)
    close(output.region, expected.region, 0)
    close(again.score(output), ram.score(expected), 0)
    assert again.config == ram.config
    assert not again.training


def test_folder_that_stands_alone(tmp_path):
    ram = tiny_ram("ramatch", "dual")
    ram.backbone.preprocess = type(ram.backbone.preprocess)((64, 32), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    save_ram(ram, tmp_path, with_backbone=True)
    again = load_ram(tmp_path)
    with torch.no_grad():
        close(again(pixels(1, 64, 32), NAMES).region, ram(pixels(1, 64, 32), NAMES).region, 0)
    assert again.preprocess == ram.preprocess
    assert again.backbone.name == "tiny-dual"


def test_half_precision_on_disk(tmp_path):
    ram = tiny_ram()
    save_ram(ram, tmp_path / "full", with_backbone=True)
    save_ram(ram, tmp_path / "half", with_backbone=True, weights="fp16")
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).rglob("*.safetensors")) for n in ("full", "half")]
    assert sizes[1] < 0.6 * sizes[0]
    again = load_ram(tmp_path / "half")
    save_ram(again, tmp_path / "twice", with_backbone=True, weights="fp16")
    assert (
        load_ram(tmp_path / "twice").backbone.fingerprint() == again.backbone.fingerprint()
    )  # rounded once, not again
    words, rounded = ram.backbone.text.tokens.weight, again.backbone.text.tokens.weight
    assert (words - rounded).abs().max() <= words.abs().max() / 127  # int8 with a scale per row
    with torch.no_grad():
        close(again(pixels(), NAMES).region, ram(pixels(), NAMES).region, 1e-2)


def test_backbone_found_by_its_name(tmp_path):
    ram = tiny_ram()
    save_backbone(ram.backbone, tmp_path / "clip")
    ram.backbone.name = str(tmp_path / "clip")
    save_ram(ram, tmp_path / "m")
    with torch.no_grad():
        close(load_ram(tmp_path / "m")(pixels(), NAMES).region, ram(pixels(), NAMES).region, 0)


def test_another_backbone_is_refused(tmp_path):
    save_ram(tiny_ram(), tmp_path)
    with pytest.raises(RamatchError, match=r"belong to backbone 'tiny-clip' with fingerprint .* its weights differ"):
        load_ram(tmp_path, backbone=backbone(seed=1))


def test_given_label_features_travel_along(tmp_path):
    alone = backbone(text=False)
    features = {name: torch.nn.functional.normalize(torch.randn(32), dim=0) for name in NAMES}
    alone.given_labels = dict(features)
    ram = RAM(alone, tiny_ram().config)
    ram.eval()
    save_ram(ram, tmp_path, with_backbone=True)
    again = load_ram(tmp_path)
    with torch.no_grad():
        close(again(pixels(), NAMES[::-1]).image, ram(pixels(), NAMES[::-1]).image)
    with pytest.raises(RamatchError, match="no label feature is given for 'zebra'"):
        again(pixels(), ["zebra"])


def test_damaged_folders_are_named(tmp_path):
    save_ram(tiny_ram(), tmp_path)
    (tmp_path / LIST).unlink()  # which would notice every change before
    config = json.loads((tmp_path / "config.json").read_text())
    good = load_file(tmp_path / "ram.safetensors")

    def attempt(says, *, tensors=None, **changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        save_file(good if tensors is None else tensors, tmp_path / "ram.safetensors")
        with pytest.raises(RamatchError, match=says):
            load_ram(tmp_path, backbone=backbone())

    attempt("is not a ramatch model folder", format="other")
    attempt("written by a newer ramatch", version=99)
    attempt("unknown setting", ram=config["ram"] | {"future": 1})
    attempt("'tau_region' is missing", tensors={k: v for k, v in good.items() if k != "tau_region"})
    attempt("'extra' is unexpected", tensors=good | {"extra": torch.zeros(1)})
    attempt(
        r"'label_set.prompts' is \(1, 2, 3\), expected \(2, 4, 48\)",
        tensors=good | {"label_set.prompts": torch.zeros(1, 2, 3)},
    )
    (tmp_path / "ram.safetensors").write_bytes(b"xx")
    with pytest.raises(RamatchError, match="not a readable safetensors file"):
        load_ram(tmp_path, backbone=backbone())
    (tmp_path / "ram.safetensors").unlink()
    with pytest.raises(RamatchError, match=r"ram\.safetensors"):
        load_ram(tmp_path, backbone=backbone())
    with pytest.raises(RamatchError, match=r"config\.json"):
        load_ram(tmp_path / "none")
    assert not is_model_folder(tmp_path / "none")


def test_a_flipped_bit_is_noticed(tmp_path):
    save_ram(tiny_ram(), tmp_path, with_backbone=True)
    listed = [line.split("  ")[1] for line in (tmp_path / LIST).read_text().splitlines()]
    assert {"config.json", "ram.safetensors", "backbone/config.json", "backbone/model-vision.safetensors"} <= set(
        listed
    )
    load_ram(tmp_path)
    for name in listed:
        good = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
        for load in (load_ram, load_backbone):
            with pytest.raises(RamatchError, match=rf"{name} is not the file that was saved .* copy the folder again"):
                load(tmp_path)
        (tmp_path / name).write_bytes(good)
    (tmp_path / LIST).write_text("00  ../outside\n")
    with pytest.raises(RamatchError, match="no line of a list of hashes"):
        load_ram(tmp_path)
    (tmp_path / LIST).unlink()
    load_ram(tmp_path)  # folders from before have none


@pytest.mark.parametrize("config", ["{", "[]", "{}", '{"format": "rbmatch"}', '{"model_type": "clip"}'])
def test_a_damaged_config_does_not_make_it_another_model(tmp_path, config):
    save_ram(tiny_ram(), tmp_path, with_backbone=True)
    (tmp_path / LIST).unlink()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(RamatchError, match=r"config\.json"):
        Recognizer.from_pretrained(tmp_path, device="cpu")


def test_the_bundled_model_is_the_one_that_was_saved():
    folder = bundled_model("ramatch-mini")
    assert (folder / LIST).is_file()
    check_hashes(folder)


def test_an_index_names_weights_in_its_own_folder_only(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "away.safetensors")
    (tmp_path / "model").mkdir()
    index = tmp_path / "model" / "model.safetensors.index.json"
    for away in ("../away.safetensors", str(tmp_path / "away.safetensors"), 3):
        index.write_text(json.dumps({"weight_map": {"a": away}}))
        with pytest.raises(RamatchError, match=r"outside its folder|safetensors|3"):
            read_weights(tmp_path / "model")
    index.write_text('{"weight_map": []}')
    with pytest.raises(RamatchError, match="weight_map"):
        read_weights(tmp_path / "model")
