"""A training step of systems that learn prompts or sentences is device work alone: tensors without data go through it,
which fails wherever the host would have to read one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import backbone, pixels

from ramatch.config import preset
from ramatch.methods import build_method

LABELS = ["dog", "cat", "red traffic light", "kite"]


def step(ram, stem, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return ram.loss(ram(stem, LABELS, targets), targets)


@pytest.mark.parametrize("name", ["coop", "dualcoop", "dualcoop-pp", "comc"])
def test_nothing_waits_for_the_host(name: str):
    settings = {"sentences": 32} if name == "comc" else {"context": 4}
    ram = build_method(backbone(), preset("ramatch"), {"name": name, "settings": settings}).train()
    stem = ram.region_set.stem(ram.backbone, pixels())
    targets = torch.tensor([[1, 0, -1, 0], [0, 1, 1, 0]]).float()
    assert step(ram, stem, targets).isfinite()  # the first steps are not recorded: what is kept is made here
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        kept, blank = stem.map(mode.from_tensor), mode.from_tensor(targets)
        ram.backbone.tokenizer = None  # nor are there words to fetch
        assert step(ram, kept, blank).shape == ()
        with pytest.raises(DataDependentOutputException):
            blank.sum().item()
