"""SDL: learns; its scores and loss as loops."""

from __future__ import annotations

import pytest
import torch
from learning import TARGETS, at_length, features, learn, linear, mean_pairs, output, plain, small

from ramatch.methods.sdl import diversity


def test_learns():
    """From a random tower's class token, which says less than its patches do."""
    before, after, loss = learn(small("sdl"), 20, lr=2e-2)
    assert before < 0.6
    assert after > 0.7
    assert loss[-1] < 0.4 * loss[0]


def test_scores_and_loss_as_loops():
    model = plain("sdl", vectors=3, regularization=0.3)
    (image, _, labels), (found, where) = features(), output(model)
    assert where is None
    ranks, expected = mean_pairs(found.image, TARGETS, smooth=True), 0.0
    for b in range(3):
        rows = linear(model.embedding, at_length(image[b])).view(3, 32)
        for n, name in enumerate(labels.unit):
            assert found.image[b, n].item() == pytest.approx(max(float((row * name).sum()) for row in rows), rel=1e-9)
        shown = [labels.unit[n] for n in range(5) if TARGETS[b, n] == 1]
        weight = 1 + variance(shown)
        expected += (0.7 * weight * ranks[b] + 0.3 * variance(list(rows))) / 3
    assert model.criterion(found, TARGETS).item() == pytest.approx(expected, rel=1e-5)


def variance(vectors: list[torch.Tensor]) -> float:
    """Of each dimension over the vectors, summed."""
    if not vectors:
        return 0.0
    mean = sum(vectors) / len(vectors)
    return float(sum(((v - mean) ** 2).sum() for v in vectors) / len(vectors))


def test_diverse_images_weigh_more():
    names = torch.eye(3)
    one, two, same = torch.tensor([[1.0, 0, 0]]), torch.tensor([[1.0, 1, 0]]), torch.tensor([[1.0, 1, -1]])
    assert diversity(names, one).item() == 0
    assert diversity(names, two).item() == pytest.approx(0.5)
    assert diversity(names[[0, 0, 2]], same).item() == 0
