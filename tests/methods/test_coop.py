"""CoOp: learns contexts by the ranking loss; its score is the plain cosine of the global feature."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from small_problem import learn
from tiny_models import backbone, close, pixels

from ramatch.config import preset
from ramatch.errors import RamatchError
from ramatch.methods import build_method
from ramatch.methods.base import MethodOutput

LABELS = ["dog", "cat", "red traffic light"]


def made(kind: str = "clip", **settings):
    torch.manual_seed(0)
    return build_method(backbone(kind), preset("ramatch"), {"name": "coop", "settings": settings}).eval()


def test_learns(tmp_path: Path):
    before, after = learn(tmp_path, "coop", {"context": 6}, optim__prompt_lr=0.1)
    assert after > before + 0.15


def test_learns_nothing_where_nothing_is_known(tmp_path: Path):
    before, after = learn(tmp_path, "coop", {"context": 6}, lambda t: torch.full_like(t, -1), optim__prompt_lr=0.1)
    assert after == before


@pytest.mark.parametrize("kind", ["clip", "dual"])
def test_score_is_the_scaled_cosine_of_each_labels_sentence(kind: str):
    ram, images = made(kind, context=5), pixels()
    assert ram.label_set.prompts.shape == (1, 5, 48)
    with torch.no_grad():
        found = ram(images, LABELS).image
        feature = ram.backbone.encode_image(images)[0].double()
        for n, label in enumerate(LABELS):
            alone = ram.label_set(ram.backbone, [label])[0].double()
            for b in range(len(images)):
                cosine = feature[b] @ alone / feature[b].norm() / alone.norm()
                close(found[b, n].double(), 20 * cosine, 1e-4)


def test_loss_compares_present_labels_with_absent_ones():
    logits, targets = torch.randn(4, 5) * 2, torch.tensor([[1, 0, 0, -1, 1]] * 3 + [[0, 0, -1, 0, 0]]).float()
    wanted = 0.0
    for row, known in zip(logits.tolist(), targets.tolist(), strict=True):
        for i, here in enumerate(known):
            for j, there in enumerate(known):
                if here == 1 and there == 0:
                    wanted += max(0.0, 0.5 + row[j] - row[i])
    ram = made(margin=0.5)
    found = ram.loss(MethodOutput(logits, logits, logits), targets)
    assert found.item() == pytest.approx(wanted, rel=1e-5)


def test_needs_a_text_tower():
    with pytest.raises(RamatchError, match="method 'coop' learns through a text tower"):
        build_method(backbone(text=False), preset("ramatch"), {"name": "coop"})
