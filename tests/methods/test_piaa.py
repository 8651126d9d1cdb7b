"""PIAA: its closed form against a plain rewrite; a gap between text and patches that plain cosines fall for."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import DIM, backbone

from ramatch.config import preset
from ramatch.errors import RamatchError
from ramatch.evaluation.metrics import mean_ap
from ramatch.methods import build_method
from ramatch.methods.piaa import PIAA, PIAASettings, classifier
from ramatch.modeling.ram import Trunk

NAMES = [f"thing {i}" for i in range(6)]


def made(**settings: object) -> PIAA:
    torch.manual_seed(0)
    ram = build_method(backbone(text=False), preset("ramatch"), {"name": "piaa", "settings": settings}).eval()
    assert isinstance(ram, PIAA)
    features = torch.linalg.qr(torch.randn(DIM, 6)).Q.T
    ram.backbone.given_labels = dict(zip(NAMES, features, strict=True))
    return ram


def gda(groups: list[list[tuple[float, np.ndarray]]]) -> tuple[np.ndarray, np.ndarray]:
    """Weighted patches of each label → w_c and b_c, loop by loop."""
    means = [sum(q * x for q, x in group) / sum(q for q, _ in group) for group in groups]
    total = sum(q for group in groups for q, _ in group)
    sigma = sum(q * np.outer(x - m, x - m) for group, m in zip(groups, means, strict=True) for q, x in group) / total
    count, size = sum(map(len, groups)), len(sigma)
    inverse = size * np.linalg.inv((count - 1) * sigma + np.trace(sigma) * np.eye(size))
    return np.array([inverse @ m for m in means]), np.array([-0.5 * m @ inverse @ m for m in means])


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_the_three_stages() -> None:
    g = torch.Generator().manual_seed(0)
    patches = F.normalize(torch.randn(120, 6, generator=g).double(), dim=-1)
    text = F.normalize(torch.randn(4, 6, generator=g).double(), dim=-1)
    text[3] = -patches.mean(0) - 5 * text[:3].mean(0)  # a label that no patch prefers
    text = F.normalize(text, dim=-1)
    probabilities = (8 * patches @ text.T).softmax(-1)
    weight, bias = classifier(patches, probabilities, PIAASettings(anchors=40))

    x, p = patches.numpy(), probabilities.numpy()
    entropy = [-(row * np.log(row)).sum() for row in p]
    chosen = []
    for c in range(4):
        mine = [i for i in range(120) if p[i].argmax() == c] or [int(p[:, c].argmax())]
        chosen.append(sorted(mine, key=lambda i: entropy[i])[:40])
    assert any(len([i for i in range(120) if p[i].argmax() == c]) > 40 for c in range(4))
    w, b = gda([[(1.0, x[i]) for i in rows] for rows in chosen])
    q = np.array([softmax(w @ row + b) for row in x])
    groups, lost = [], 0
    for c, rows in enumerate(chosen):
        limit = q[:, c].mean() + q[:, c].std()
        pure = [i for i in rows if q[i, c] >= limit] or rows
        lost += len(rows) - len(pure)
        groups.append([(q[i, c], x[i]) for i in pure])
    assert lost > 0
    w, b = gda(groups)
    assert np.allclose(weight.numpy(), w, rtol=1e-4, atol=1e-5)
    assert np.allclose(bias.numpy(), b, rtol=1e-4, atol=1e-5)


def test_score_of_an_image() -> None:
    ram = made(share=0.7, anchors=20)
    g = torch.Generator().manual_seed(1)
    ram.bank[:500] = F.normalize(torch.randn(500, DIM, generator=g), dim=-1)
    ram.count.fill_(500)
    image, regions = torch.randn(3, DIM, generator=g), torch.randn(3, 5, DIM, generator=g)
    labels = ram.encode_labels(NAMES)
    found, places, _ = ram.logits(image, regions, labels)
    w, b, text = (x.double().numpy() for x in (labels.weight, labels.bias, labels.unit))
    for row in range(3):
        patches = [r / np.linalg.norm(r) for r in regions[row].double().numpy()]
        largest = np.max([softmax(w @ r + b) for r in patches], axis=0)
        global_feature = image[row].double().numpy() / np.linalg.norm(image[row].numpy())
        score = 0.7 * softmax(largest) + 0.3 * softmax(20 * text @ global_feature)
        assert np.allclose(torch.sigmoid(found[row].double()).numpy(), score, atol=1e-5)
        assert np.allclose(places[row].sum(-1).numpy(), 1, atol=1e-5)


def world(count: int, own: torch.Tensor, noise: torch.Tensor, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 3 patches, and what they show: a patch shows one of two things, and varies along a direction in which
    it means nothing."""
    shown, regions = torch.zeros(count, 6), torch.zeros(count, 3, DIM)
    for i in range(count):
        which = torch.randperm(6, generator=g)[:2][torch.randint(2, (3,), generator=g)]
        shown[i, which] = 1
        regions[i] = own[which] + 0.8 * torch.randn(3, 1, generator=g) * noise
        regions[i] += 0.05 * torch.randn(3, DIM, generator=g)
    return regions, shown


def test_right_where_plain_cosines_are_wrong() -> None:
    """Text shares the direction in which patches only vary: some labels' with one sign, some with the other."""
    ram, g = made(), torch.Generator().manual_seed(3)
    own = torch.linalg.qr(torch.randn(DIM, 7, generator=g)).Q.T
    own, noise = own[:6], own[6]
    text = F.normalize(own + 1.3 * torch.tensor([1, -1, 1, -1, 1, -1])[:, None] * noise, dim=-1)
    ram.backbone.given_labels = dict(zip(NAMES, text, strict=True))
    seen, _ = world(600, own, noise, g)
    test, shown = world(150, own, noise, g)
    ram.bank[: 600 * 3] = F.normalize(seen.flatten(0, 1), dim=-1)
    ram.count.fill_(600 * 3)
    labels = ram.encode_labels(NAMES)
    found, places, _ = ram.logits(test.mean(1), test, labels)
    cosines = ram.similarity(test, labels)
    right = [float(shown.gather(1, best).mean()) for best in (cosines.argmax(-1), places.argmax(-1))]
    assert right[0] < 0.85
    assert right[1] > 0.95
    assert mean_ap(cosines.amax(1), shown) < 0.9
    assert mean_ap(ram.similarity(test.mean(1), labels), shown) < 0.8
    assert mean_ap(found, shown) > 0.95


def test_a_fair_sample_of_the_patches() -> None:
    ram = made(patches=400)
    with pytest.raises(RamatchError, match="has not seen any images"):
        ram.logits(torch.randn(1, DIM), torch.randn(1, 4, DIM), ram.encode_labels(NAMES))
    trunks = [Trunk(torch.zeros(8, DIM), torch.randn(8, 16, 64), (), (4, 4)) for _ in range(25)]
    ram.prepare(iter(trunks), NAMES)
    assert int(ram.count) == 400
    every = [F.normalize(ram.features(t, ram.encode_labels(NAMES))[1], dim=-1).flatten(0, 1) for t in trunks]
    counts = torch.tensor([int((torch.cdist(part, ram.bank) < 1e-3).any(1).sum()) for part in every])
    assert counts.sum() == 400  # of 3,200, each once
    assert counts.min() > 4
    assert counts.max() < 32  # 16 expected of each batch
    few = made(patches=10_000)
    few.prepare(iter(trunks), NAMES)
    assert int(few.count) == 3200
    assert torch.allclose(few.bank[:3200].norm(dim=1), torch.ones(3200))
    assert few.bank[3200:].abs().sum() == 0
