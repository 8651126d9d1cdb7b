"""DualCoOp++: the evidential context's weights for both branches, winner-take-all over the positive ones."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from small_problem import learn
from tiny_models import backbone, close, pixels

from ramatch.config import preset
from ramatch.methods import build_method
from ramatch.modeling.remembered import remembered

LABELS = ["dog", "cat", "red traffic light", "kite"]


def made(kind: str = "clip", **settings):
    torch.manual_seed(0)
    given = {"name": "dualcoop-pp", "settings": {"context": 4} | settings}
    ram = build_method(backbone(kind), preset("ramatch"), given)
    torch.nn.init.normal_(ram.label_set.prompts)
    return ram.eval()


def test_learns(tmp_path: Path):
    before, after = learn(tmp_path, "dualcoop-pp", {"context": 6}, optim__prompt_lr=0.1)
    assert after > before + 0.15


@pytest.mark.parametrize("kind", ["clip", "dual"])
def test_score_against_a_plain_rewrite(kind: str):
    ram, images = made(kind, winner_scale=30.0), pixels()
    with torch.no_grad():
        output, labels = ram(images, LABELS), ram.encode_labels(LABELS)
        _, regions = ram.features(ram.trunk(images), labels)
        positive, negative, evidence = F.normalize(ram.label_set(ram.backbone, LABELS).double(), dim=-1)
    unit = F.normalize(regions.double(), dim=-1)
    for b in range(len(images)):
        plus, minus, hints = ((unit[b] @ side.T).tolist() for side in (positive, negative, evidence))
        for m, row in enumerate(plus):
            best = max(row)
            powers = [math.exp(30.0 * best * s) for s in row]
            plus[m] = [s * power / sum(powers) for s, power in zip(row, powers, strict=True)]
        for n in range(len(LABELS)):
            weights = [math.exp(20.0 * row[n]) for row in hints]
            gaps = [20.0 * (p[n] - q[n]) for p, q in zip(plus, minus, strict=True)]
            wanted = sum(w * gap for w, gap in zip(weights, gaps, strict=True)) / sum(weights)
            assert output.image[b, n].item() == pytest.approx(wanted, rel=1e-3, abs=1e-4)
            close(output.match.plan[b, :, n], torch.tensor(weights) / sum(weights) / len(LABELS), 1e-4)


def test_a_clear_region_has_one_winner_and_an_unclear_one_none():
    found = made().winner(torch.tensor([[[0.35, 0.2, 0.18], [0.02, 0.01, 0.0]]]))[0]
    assert found[0, 0] > 0.99
    assert found[1].amax() < 0.36  # a third each: nobody's


def test_all_three_contexts_learn():
    ram = made()
    output = ram.train()(pixels(), LABELS)
    ram.loss(output, torch.eye(4)[:2]).backward()
    assert (ram.label_set.prompts.grad.abs().amax((1, 2)) > 0).all()
    assert ram.label_set.prompts.shape == (3, 4, 48)


def test_remembered_labels_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAMATCH_CACHE", str(tmp_path))
    ram = made()
    with torch.no_grad():
        plain = ram.encode_labels(LABELS)
        for _ in range(2):  # made, then read
            again = remembered(ram, LABELS)
            assert torch.equal(again.evidence, plain.evidence)
            assert torch.equal(again.negative, plain.negative)
        torch.nn.init.normal_(ram.label_set.prompts[2])
        assert not torch.equal(remembered(ram, LABELS).evidence, plain.evidence)
        other = replace(plain, evidence=plain.evidence.flip(0))
        trunk = ram.trunk(pixels())
        assert not torch.allclose(ram.recognize(trunk, plain).image, ram.recognize(trunk, other).image)
