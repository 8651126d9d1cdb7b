"""ML-Decoder: learns; its decoder and loss as loops."""

from __future__ import annotations

import math

import pytest
import torch
from learning import TARGETS, at_length, features, heads, learn, linear, output, plain, small

from ramatch.errors import RamatchError


def test_learns():
    before, after, loss = learn(small("ml-decoder", width=64, hidden=64), 8)
    assert before < 0.6
    assert after > 0.9
    assert loss[-1] < 0.6 * loss[0]


def test_scores_and_loss_as_loops():
    model = plain("ml-decoder", width=8, heads=2, hidden=6, dropout=0.0, gamma_pos=1.0, gamma_neg=2.0, clip=0.1)
    (_, regions, labels), (found, _) = features(), output(model)
    attention, (first, _, _, second) = model.attention, model.feed
    layers = [torch.nn.Linear(8, 8).double() for _ in range(3)]
    parts = attention.in_proj_weight.detach().chunk(3), attention.in_proj_bias.detach().chunk(3)
    for layer, weight, bias in zip(layers, *parts, strict=True):
        layer.weight.data, layer.bias.data = weight, bias
    ask, keys_of, values_of = layers
    for b in range(3):
        patches = [linear(model.patches, at_length(row)).clamp(min=0) for row in regions[b]]
        keys = torch.stack([linear(keys_of, p) for p in patches])
        values = torch.stack([linear(values_of, p) for p in patches])
        for n, name in enumerate(labels.unit):
            x = linear(model.queries, at_length(name))
            x = model.norms[0](2 * x)
            x = model.norms[1](x + linear(attention.out_proj, heads(linear(ask, x), keys, values, 2)))
            x = model.norms[2](x + linear(second, linear(first, x).clamp(min=0)))
            expected = linear(model.group, x).item()
            assert found.image[b, n].item() == pytest.approx(expected, rel=1e-5)
    total, known = 0.0, 0
    for s, y in zip(found.image.flatten().tolist(), TARGETS.flatten().tolist(), strict=True):
        p = 1 / (1 + math.exp(-s))
        if y == 1:
            total -= (1 - p) * math.log(p)
        elif y == 0:
            p = max(p - 0.1, 0)
            total -= p**2 * math.log(1 - p)
        known += y >= 0
    assert model.criterion(found, TARGETS).item() == pytest.approx(total / known, rel=1e-5)


def test_attention_is_shown_and_does_not_change_scores():
    model = plain("ml-decoder", width=8, heads=2, hidden=6, dropout=0.0)
    learning, nothing = output(model)
    shown, where = output(model.eval())
    assert nothing is None
    assert torch.allclose(shown.image, learning.image)
    assert where.shape == (3, 6, 5)
    assert torch.allclose(where.sum(1), torch.ones(3, 5).double())


def test_heads_must_fit():
    with pytest.raises(RamatchError, match="'heads' must divide the width of what attends, 768; got 7"):
        small("ml-decoder", heads=7)
    with pytest.raises(RamatchError, match="'heads' must divide the width of what attends, 32; got 5"):
        small("mkt", heads=5)
