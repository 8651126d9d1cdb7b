"""BiAM: learns; its attention module, scores and loss as loops."""

from __future__ import annotations

import pytest
import torch
from learning import TARGETS, at_length, features, heads, learn, linear, mean_pairs, output, plain, small


def leaky(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 0.2 * x)


def test_learns():
    before, after, loss = learn(small("biam"), 6)
    assert before < 0.6
    assert after > 0.9
    assert loss[-1] < 0.3 * loss[0]


def test_scores_and_loss_as_loops():
    model = plain("biam", heads=4, top_k=2)
    (_, regions, labels), (found, where) = features(), output(model)
    for b in range(3):
        x = [at_length(row) for row in regions[b]]
        qkv = [linear(model.qkv, row) for row in x]
        keys, values = torch.stack([r[32:64] for r in qkv]), torch.stack([r[64:] for r in qkv])
        mean = sum(x) / 6
        gate = linear(model.scene[2], leaky(linear(model.scene[0], mean)))
        gate = 1 / (1 + (-gate).exp())
        enriched = []
        for row, q in zip(x, qkv, strict=True):
            near = row + linear(model.merge, heads(q[:32], keys, values, 4))
            near = near + linear(model.region[2], leaky(linear(model.region[0], near)))
            enriched.append(linear(model.semantic, linear(model.join, torch.cat([near, row + row * gate]))))
        for n, name in enumerate(labels.unit):
            scores = [float((row * name).sum()) for row in enriched]
            best = sorted(range(6), key=scores.__getitem__)[-2:]
            assert found.image[b, n].item() == pytest.approx(sum(scores[k] for k in best) / 2, rel=1e-9)
            assert where[b, :, n].tolist() == [0.5 * (k in best) for k in range(6)]
    assert model.criterion(found, TARGETS).item() == pytest.approx(sum(mean_pairs(found.image, TARGETS)) / 3, rel=1e-5)


def test_few_regions():
    """A grid of fewer regions than k: all of them count."""
    model = plain("biam", top_k=10)
    image, regions, labels = features()
    scores, where, _ = model.logits(image, regions[:, :3], labels)
    assert scores.shape == (3, 5)
    assert torch.allclose(where, torch.full((3, 3, 5), 1 / 3).double())
