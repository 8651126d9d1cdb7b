"""DualCoOp: regions without the last attention, two contexts, weights of the regions from the positive one."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from small_problem import learn
from tiny_models import backbone, close, pixels

from ramatch.config import preset
from ramatch.methods import build_method
from ramatch.methods.base import MethodOutput

LABELS = ["dog", "cat", "red traffic light", "kite"]


def made(kind: str = "clip", saa_layers: int = 3, **settings):
    torch.manual_seed(0)
    config = preset("ramatch", saa_layers=saa_layers)
    ram = build_method(backbone(kind), config, {"name": "dualcoop", "settings": {"context": 4} | settings})
    torch.nn.init.normal_(ram.label_set.prompts)
    return ram.eval()


def test_learns(tmp_path: Path):
    before, after = learn(tmp_path, "dualcoop", {"context": 6}, optim__prompt_lr=0.1)
    assert after > before + 0.15


def test_learns_from_half_of_the_labels(tmp_path: Path):
    torch.manual_seed(0)
    half = lambda targets: torch.where(torch.rand_like(targets) < 0.5, targets, -1.0)  # noqa: E731
    before, after = learn(tmp_path, "dualcoop", {"context": 6}, half, optim__prompt_lr=0.1)
    assert after > before + 0.1


def test_learns_nothing_where_nothing_is_known(tmp_path: Path):
    unknown = lambda targets: torch.full_like(targets, -1)  # noqa: E731
    before, after = learn(tmp_path, "dualcoop", {"context": 6}, unknown, optim__prompt_lr=0.1)
    assert after == before


@pytest.mark.parametrize("kind", ["clip", "dual"])
def test_each_region_is_its_own_value(kind: str):
    ram, images = made(kind), pixels()
    model = ram.backbone
    with torch.no_grad():
        trunk = ram.trunk(images)
        x = model.vision.embed(images)
        for block in model.vision.blocks[:-1]:
            x = block(x)
        block = model.vision.blocks[-1]
        for b in range(len(images)):
            for m in range(16):
                patch = x[b, 1 + m]
                value = block.qkv(block.ln1(patch))[2 * 64 :]
                added = block.out(value)
                patch = patch + (added if block.scale1 is None else added * block.scale1)
                added = block.fc2(block.act(block.fc1(block.ln2(patch))))
                patch = patch + (added if block.scale2 is None else added * block.scale2)
                close(trunk.local[b, m], patch, 1e-5)
        close(trunk.image, model.encode_image(images)[0])


def test_final_patches_where_the_preset_reads_those():
    ram, images = made("dual", saa_layers=0), pixels()
    with torch.no_grad():
        _, patches = ram.backbone.encode_image(images)
        _, regions = ram.features(ram.trunk(images), ram.encode_labels(LABELS))
    close(regions, patches)


@pytest.mark.parametrize("spatial", [None, 7.0])
def test_score_against_a_plain_rewrite(spatial: float | None):
    ram, images = made(spatial_scale=spatial), pixels()
    with torch.no_grad():
        output, labels = ram(images, LABELS), ram.encode_labels(LABELS)
        _, regions = ram.features(ram.trunk(images), labels)
        raw = F.normalize(ram.label_set(ram.backbone, LABELS).double(), dim=-1)
    unit = F.normalize(regions.double(), dim=-1)
    for b in range(len(images)):
        for n in range(len(LABELS)):
            plus = [float(region @ raw[0, n]) for region in unit[b]]
            minus = [float(region @ raw[1, n]) for region in unit[b]]
            weights = [math.exp((spatial or 20.0) * s) for s in plus]
            total = sum(weights)
            s_plus = sum(w * 20 * s for w, s in zip(weights, plus, strict=True)) / total
            s_minus = sum(w * 20 * s for w, s in zip(weights, minus, strict=True)) / total
            p = math.exp(s_plus) / (math.exp(s_plus) + math.exp(s_minus))
            assert output.image[b, n].sigmoid().item() == pytest.approx(p, rel=1e-4)
            share = torch.tensor(weights) / total / len(LABELS)
            close(output.match.plan[b, :, n], share, 1e-4)


def test_loss_is_the_sum_of_the_asymmetric_one():
    ram = made(gamma_pos=1.0, gamma_neg=2.0, clip=0.05)
    logits, targets = torch.randn(3, 4), torch.tensor([[1, 0, -1, 0], [0, 0, 0, 1], [-1, -1, 1, 0]]).float()
    wanted = 0.0
    for p, y in zip(logits.double().sigmoid().flatten().tolist(), targets.flatten().tolist(), strict=True):
        shifted = max(p - 0.05, 0.0)
        if y == 1:
            wanted -= (1 - p) * math.log(p)
        elif y == 0:
            wanted -= shifted**2 * math.log(1 - shifted)
    assert ram.loss(MethodOutput(logits, logits, logits), targets).item() == pytest.approx(wanted, rel=1e-5)
