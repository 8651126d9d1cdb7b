"""Every compared system works on any backbone, in half precision, with any number of labels, inside a CUDA graph."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import backbone

from ramatch import Recognizer
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
    ram.train(METHODS[name].learns)  # what a loss looks at is made in training alone
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output = ram.recognize(ram.trunk(mode.from_tensor(images)), labels.map(mode.from_tensor))
        assert output.image.shape == (3, 4)
    if not METHODS[name].learns:
        return
    ram.train()
    ram.loss(ram(images, LABELS, targets), targets)  # what a step keeps for the next ones is there before a recording
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        known = mode.from_tensor(targets)
        assert ram.loss(ram(mode.from_tensor(images), LABELS, known), known).shape == ()


@pytest.mark.parametrize(("kind", "settings", "text"), [("clip", "ramatch", False), ("dual", "aligned", True)])
@pytest.mark.parametrize("name", METHODS)
def test_on_any_backbone(name: str, kind: str, settings: str, text: bool) -> None:
    """A CLIP's image tower with given label features, and a DINOv2 with a sentence encoder, both in bf16."""
    if METHODS[name].needs_text and not text:
        pytest.skip("it learns through a text tower")
    torch.manual_seed(0)
    own = backbone(kind, text=text)
    if not text:
        own.given_labels = dict(zip(LABELS, F.normalize(torch.randn(4, own.dim), dim=-1), strict=True))
    ram = build_method(own, preset(settings), {"name": name}).eval()
    ram.backbone.to(torch.bfloat16)
    ram.region_set.to(torch.bfloat16)
    images = torch.randint(0, 256, (3, 3, *ram.preprocess.size), dtype=torch.uint8)
    if METHODS[name].needs_images:
        with torch.no_grad():
            ram.prepare([ram.trunk(images)], LABELS)
    found = Recognizer(ram)
    for labels in (LABELS[:1], LABELS):
        found.set_vocabulary(labels)
        for prediction in found.predict([image.permute(1, 2, 0).numpy() for image in images], maps=True, masks=True):
            assert np.isfinite(prediction.scores).all()
            assert prediction.values.sum() == pytest.approx(1, abs=1e-3)
