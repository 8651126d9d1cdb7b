"""Deep0Tag: learns; its scores, poolings and loss as loops; what it shows is what moves its score."""

from __future__ import annotations

import math

import pytest
import torch
from learning import TARGETS, at_length, features, learn, linear, mean_pairs, output, plain, small

from ramatch.methods.deep0tag import POOLINGS


def test_learns():
    before, after, loss = learn(small("deep0tag", hidden=64), 8)
    assert before < 0.6
    assert after > 0.9
    assert loss[-1] < 0.4 * loss[0]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_scores_and_loss_as_loops(pooling):
    model = plain("deep0tag", hidden=8, pooling=pooling, sharpness=2.0)
    (image, regions, labels), (found, _) = features(), output(model)
    first, _, second = model.semantic
    for b in range(3):
        bag = [linear(second, linear(first, at_length(row)).clamp(min=0)) for row in (image[b], *regions[b])]
        for n, name in enumerate(labels.unit):
            scores = [float((row * name).sum()) for row in bag]
            mean, best = sum(scores) / 7, max(scores)
            soft = math.log(sum(math.exp(2 * s) for s in scores) / 7) / 2
            expected = {"mean": mean, "max": best, "mix": (mean + best) / 2, "lse": soft}[pooling]
            assert found.image[b, n].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    rank = sum(mean_pairs(found.image, TARGETS, smooth=True)) / 3
    assert model.criterion(found, TARGETS).item() == pytest.approx(rank, rel=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_shares_are_derivatives(pooling):
    model = plain("deep0tag", hidden=8, pooling=pooling)
    scores = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(8), requires_grad=True)
    model.pool(scores).sum().backward()
    assert torch.allclose(model.shares(scores.detach()), scores.grad, atol=1e-6)
