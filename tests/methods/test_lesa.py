"""LESA: learns; its scores and its four losses as loops."""

from __future__ import annotations

import math

import pytest
import torch
from learning import TARGETS, at_length, features, learn, linear, mean_pairs, output, plain, small

from ramatch.methods.lesa import distribution, diversity, relevance


def test_learns():
    before, after, loss = learn(small("lesa"), 8)
    assert before < 0.6
    assert after > 0.9
    assert loss[-1] < 0.4 * loss[0]


def attentions(model, regions: torch.Tensor) -> list[torch.Tensor]:
    """The maps over one image's regions (M, D), already scaled."""
    first, _, second = model.attend
    logits = torch.stack([linear(second, linear(first, row).tanh()) for row in regions])
    return [column.exp() / column.exp().sum() for column in logits.T]


def test_scores_and_losses_as_loops():
    weights = {"diversity": 0.7, "relevance": 0.5, "distribution": 0.3}
    model = plain("lesa", attentions=3, hidden=4, **weights)
    (_, regions, labels), (found, where) = features(), output(model)
    names = [linear(model.semantic, name) for name in labels.unit]
    similar, below, choice, count = 0.0, 0.0, [0.0] * 3, 0
    for b in range(3):
        x = torch.stack([at_length(row) for row in regions[b]])
        maps = attentions(model, x)
        scores = [[float(((a[:, None] * x).sum(0) * name).sum()) for name in names] for a in maps]
        plain_scores = [float((x.mean(0) * name).sum()) for name in names]
        for n in range(5):
            column = [scores[m][n] for m in range(3)]
            assert found.image[b, n].item() == pytest.approx(max(column), rel=1e-9)
            assert torch.allclose(where[b, :, n], maps[column.index(max(column))])
            if TARGETS[b, n] == 1:
                count += 1
                total = sum(map(math.exp, column))
                choice = [c + math.exp(s) / total for c, s in zip(choice, column, strict=True)]
        for m in range(3):
            for k in range(3):
                if m != k:
                    cosine = (maps[m] * maps[k]).sum() / (maps[m].norm() * maps[k].norm())
                    similar += float(cosine) / (3 * 2 * 3)
            present = [scores[m][n] - plain_scores[n] for n in range(5) if TARGETS[b, n] == 1]
            below += max(-max(present), 0.0) / 9 if present else 0.0
    uneven = 3 * sum((c / count) ** 2 for c in choice) - 1
    rank = sum(mean_pairs(found.image, TARGETS)) / 3
    attention, scores, mean = found.extra
    assert diversity(attention).item() == pytest.approx(similar, rel=1e-5)
    assert relevance(scores, mean, TARGETS).item() == pytest.approx(below, rel=1e-5)
    assert below > 0
    assert distribution(scores, TARGETS).item() == pytest.approx(uneven, rel=1e-5)
    expected = rank + 0.7 * similar + 0.5 * below + 0.3 * uneven
    assert model.criterion(found, TARGETS).item() == pytest.approx(expected, rel=1e-5)


def test_what_the_losses_want():
    """Their ends: attentions that are the same or apart, one that takes every label or all that share them."""
    same, apart = torch.ones(1, 4, 4) / 4, torch.eye(4)[None]
    assert diversity(same).item() == pytest.approx(1)
    assert diversity(apart).item() == 0
    present = torch.ones(1, 4)
    assert distribution(torch.tensor([[50.0] * 4] + [[0.0] * 4] * 3)[None], present).item() == pytest.approx(3)
    assert distribution(50 * torch.eye(4)[None], present).item() == pytest.approx(0, abs=1e-6)
    assert distribution(torch.randn(1, 4, 4), torch.zeros(1, 4)).item() == 0
