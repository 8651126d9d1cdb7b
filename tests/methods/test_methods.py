"""Every compared system: RAM's interface, files, errors. Each system's own equations are tested in its own file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import backbone

from ramatch import Recognizer
from ramatch.config import METHODS as NAMES
from ramatch.config import preset
from ramatch.errors import RamatchError
from ramatch.methods import METHODS, build_method
from ramatch.modeling.checkpoints.folder import load_ram, save_ram

LABELS = ["dog", "cat", "red car", "boat"]


def made(name: str):
    torch.manual_seed(0)
    return build_method(backbone(), preset("ramatch"), {"name": name})


def test_the_lists_agree():
    assert ["ram", *METHODS] == list(NAMES)
    assert all(kind.name == name for name, kind in METHODS.items())


@pytest.mark.parametrize("name", METHODS)
def test_interface_and_files(name: str, tmp_path: Path):
    ram = made(name).eval()
    images = torch.randint(0, 256, (3, 3, *ram.preprocess.size), dtype=torch.uint8)
    if METHODS[name].needs_images:
        with torch.no_grad():
            ram.prepare([ram.trunk(images)], LABELS)
    with torch.no_grad():
        output = ram(images, LABELS)
    assert output.image.shape == (3, 4)
    assert output.image.isfinite().all()
    assert output.sim.shape == output.match.plan.shape
    assert torch.allclose(output.match.plan.sum(1), torch.full((3, 4), 1 / 4), atol=1e-5)  # a column has 1/N
    save_ram(ram, tmp_path, with_backbone=True)
    again = load_ram(tmp_path, build=build_method)
    assert type(again) is type(ram)
    with torch.no_grad():
        assert torch.equal(again(images, LABELS).image, output.image)
    found = Recognizer.from_pretrained(tmp_path)
    found.set_vocabulary(LABELS)
    prediction = found.predict(images[0].permute(1, 2, 0).numpy(), maps=True)
    assert not prediction.calibrated
    assert len(prediction.top(4)) == 4


def test_unknown_names_and_settings():
    with pytest.raises(RamatchError, match="unknown method 'foo'; known: ram, clip"):
        made("foo")
    with pytest.raises(RamatchError, match="shade"):
        build_method(backbone(), preset("ramatch"), {"name": "clip", "settings": {"shade": 1}})
