"""Every compared system runs inside a CUDA graph: its pass and its loss depend on no number on the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import backbone

from ramatch.config import preset
from ramatch.methods import METHODS, build_method

LABELS = ["dog", "cat", "red car", "boat"]


@pytest.mark.parametrize("name", METHODS)
def test_nothing_waits_for_the_device(name: str) -> None:
    """Tensors without content stand in for those of a GPU: whoever asks for a number, or for a shape that depends on
    one, gets an error."""
    torch.manual_seed(0)
    ram = build_method(backbone(), preset("ramatch"), {"name": name}).eval()
    images = torch.randn(3, 3, *ram.preprocess.size)
    targets = torch.tensor([[1, 0, 0, -1], [0, 1, 1, 0], [-1, 0, 0, 1]]).float()
    with torch.no_grad():
        if METHODS[name].needs_images:
            ram.prepare([ram.trunk(images)], LABELS)
        labels = ram.encode_labels(LABELS)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(images)
        output = ram.recognize(ram.trunk(fake), labels.map(mode.from_tensor))
        assert output.image.shape == (3, 4)
        if METHODS[name].learns:
            assert ram.loss(output, mode.from_tensor(targets)).shape == ()
