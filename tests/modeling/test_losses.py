"""Losses against their formulas written as loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ramatch.modeling import losses
from ramatch.modeling.losses import GATHERED, LOSSES, asl, mmc, mmc_image, ranking

LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.3, 1.7, -2.2]])
TARGETS = torch.tensor([[1, 0, 1], [0, 1, 0]])


def naive_mmc(logits, targets):
    """Eq. 13, pair by pair, in float64."""
    s, y = np.asarray(logits, np.float64), np.asarray(targets)
    everything = np.exp(s[y >= 0]).sum()
    return np.mean([-np.log(np.exp(s[b, i]) / everything) for b, i in np.argwhere(y > 0)])


def naive_mmc_image(logits, targets):
    """Eq. 21: for each image the mean over its positives, each against the image's own labels; summed over images."""
    total = 0.0
    for s, y in zip(np.asarray(logits, np.float64), np.asarray(targets), strict=True):
        own = np.exp(s[y >= 0]).sum()
        if (y > 0).any():
            total += sum(-np.log(np.exp(s[i]) / own) for i in np.flatnonzero(y > 0)) / (y > 0).sum()
    return total


def naive_ranking(logits, targets):
    """Eq. 20: hinges of all (positive, negative) pairs of an image, summed over images."""
    total = 0.0
    for s, y in zip(np.asarray(logits, np.float64), np.asarray(targets), strict=True):
        total += sum(max(1 + s[j] - s[i], 0) for i in np.flatnonzero(y > 0) for j in np.flatnonzero(y == 0))
    return total


NAIVE = {"mmc": naive_mmc, "mmc-image": naive_mmc_image, "ranking": naive_ranking}
CONTRASTIVE = [mmc, mmc_image]


@pytest.mark.parametrize("kind", NAIVE)
@pytest.mark.parametrize("targets", [TARGETS, torch.tensor([[1, -1, 0], [-1, 1, 1]])], ids=["known", "some unknown"])
def test_loss_of_the_paper(kind, targets):
    loss, naive = LOSSES[kind], NAIVE[kind]
    assert loss(LOGITS, targets).item() == pytest.approx(naive(LOGITS, targets), rel=1e-6)
    torch.manual_seed(5)
    logits, targets = 3 * torch.randn(7, 9), torch.randint(-1, 2, (7, 9))
    assert loss(logits, targets).item() == pytest.approx(naive(logits, targets), rel=1e-5)
    wide = logits.clone().requires_grad_()
    loss(wide, targets).backward()
    for b, i in np.ndindex(7, 9):  # gradient against differences of the plain formula
        step = np.zeros((7, 9))
        step[b, i] = 1e-6
        slope = (naive(logits.numpy() + step, targets) - naive(logits.numpy() - step, targets)) / 2e-6
        assert wide.grad[b, i].item() == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_mmc_by_hand():
    loss = mmc(torch.zeros(2, 3), TARGETS)
    assert loss.item() == pytest.approx(math.log(6))
    assert mmc_image(torch.zeros(2, 3), TARGETS).item() == pytest.approx(2 * math.log(3))  # log 3 of each image


@pytest.mark.parametrize("loss", CONTRASTIVE)
@pytest.mark.parametrize("value", [0, -1])
def test_mmc_without_positives_is_zero(loss, value):
    logits = LOGITS.clone().requires_grad_()
    found = loss(logits, torch.full((2, 3), value))
    found.backward()
    assert found.item() == 0
    assert torch.equal(logits.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("loss", CONTRASTIVE)
def test_mmc_with_an_image_of_unknown_labels(loss):
    targets = torch.tensor([[1, 0, 1], [-1, -1, -1]])
    logits = LOGITS.clone().requires_grad_()
    found = loss(logits, targets)
    found.backward()
    torch.testing.assert_close(found, loss(LOGITS[:1], targets[:1]))
    assert torch.equal(logits.grad[1], torch.zeros(3))


def test_mmc_in_half_precision_and_with_large_logits():
    torch.testing.assert_close(mmc((LOGITS * 400).bfloat16(), TARGETS), mmc((LOGITS * 400).bfloat16().float(), TARGETS))
    assert torch.isfinite(mmc(LOGITS * 1e4, TARGETS))


@pytest.mark.parametrize("kind", GATHERED)
def test_over_processes_equals_one_large_batch(kind):
    """Two processes of three images: the mean of their gradients (as DDP takes it) is that of six images at once."""
    function = LOSSES[kind]
    torch.manual_seed(3)
    logits, targets = torch.randn(6, 4), (torch.rand(6, 4) < 0.4).long()
    assert targets[:3].sum() != targets[3:].sum()  # unequal shares of positives
    whole = logits.clone().requires_grad_()
    loss = function(whole, targets)
    loss.backward()
    grads, losses = [], []
    for rank in range(2):
        parts = [logits[:3].clone(), logits[3:].clone()]
        parts[rank].requires_grad_()

        def gather(x, rank=rank, parts=parts):  # what an all-gather with gradient gives: our own part carries it twice
            if x.ndim == 1:
                counts = [(targets[:3] > 0).sum().float()[None], (targets[3:] > 0).sum().float()[None]]
                return torch.cat(counts), 2
            return torch.cat([x if r == rank else parts[r] for r in range(2)]), 2

        value = function(parts[rank], targets[3 * rank : 3 * rank + 3], gather=gather)
        losses.append(value.item())
        value.backward()
        grads.append(parts[rank].grad)
    assert sum(losses) / 2 == pytest.approx(loss.item(), rel=1e-5)
    if kind != "mmc":  # with the batch axis the other processes' share of the gradient arrives through the collective
        torch.testing.assert_close(torch.cat(grads) / 2, whole.grad)


@pytest.mark.parametrize(("plus", "minus", "clip"), [(0.0, 4.0, 0.05), (1.0, 2.0, 0.0), (0.0, 0.0, 0.0)])
def test_asl(plus, minus, clip):
    expected = 0.0
    for b in range(2):
        for i in range(3):
            p = 1 / (1 + math.exp(-LOGITS[b, i].item()))
            if TARGETS[b, i]:
                expected -= (1 - p) ** plus * math.log(p)
            else:
                q = max(p - clip, 0.0)
                expected -= q**minus * math.log(1 - q)
    found = asl(LOGITS, TARGETS, gamma_pos=plus, gamma_neg=minus, clip=clip)
    assert found.item() == pytest.approx(expected / 6, rel=1e-5)
    if plus == minus == clip == 0:
        torch.testing.assert_close(found, torch.nn.functional.binary_cross_entropy_with_logits(LOGITS, TARGETS.float()))


def test_asl_extremes_are_finite():
    logits = torch.tensor([[100.0, -100.0, 100.0]], requires_grad=True)
    loss = asl(logits, torch.tensor([[0, 1, 1]]), clip=0.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()


def test_asl_leaves_unknown_labels_out():
    logits = LOGITS.clone().requires_grad_()
    loss = asl(logits, torch.tensor([[1, -1, 0], [-1, -1, 1]]))
    loss.backward()
    picked = torch.stack([LOGITS[0, 0], LOGITS[0, 2], LOGITS[1, 2]])[None]
    torch.testing.assert_close(loss, asl(picked, torch.tensor([[1, 0, 1]])))
    assert (logits.grad[[0, 1, 1], [1, 0, 1]] == 0).all()


def test_ranking_without_pairs_is_zero():
    assert ranking(LOGITS, torch.zeros(2, 3)).item() == 0
    assert ranking(LOGITS, torch.tensor([[1, -1, 1], [-1, 1, -1]])).item() == 0


def cross_entropy(logits, targets, bias):
    known = targets >= 0
    return F.binary_cross_entropy_with_logits(logits[known] + bias, (targets[known] > 0).float(), reduction="sum")


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_sigmoid_is_cross_entropy_at_the_best_bias(scale):
    g = torch.Generator().manual_seed(3)
    logits = (torch.randn(6, 9, generator=g) * scale + 20).requires_grad_()
    targets = torch.randint(-1, 2, (6, 9), generator=g).float()
    found = losses.sigmoid(logits, targets)
    bias = torch.tensor(-20.0, requires_grad=True, dtype=torch.double)
    wide = logits.detach().double()
    search = torch.optim.LBFGS(
        [bias], max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def again():
        search.zero_grad()
        value = cross_entropy(wide, targets, bias)
        value.backward()
        return value

    search.step(again)
    wanted = cross_entropy(logits, targets, bias.detach().float()) / (targets > 0).sum()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(value, logits)[0] for value in (found, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert (ours[targets < 0] == 0).all()
    torch.testing.assert_close(losses.sigmoid(logits + 7, targets), found, rtol=1e-4, atol=1e-4)  # the bias takes it up


def test_sigmoid_without_positives_pushes_down():
    logits = torch.zeros(3, 4, requires_grad=True)
    value = losses.sigmoid(logits, torch.zeros(3, 4))
    value.backward()
    assert value.isfinite()
    assert (logits.grad > 0).all()


def test_smoothed_sigmoid_is_cross_entropy_with_soft_negatives():
    """Absent labels count as there with a probability of `smoothing`; at the best bias the derivative is zero."""
    torch.manual_seed(3)
    logits, targets = 2 * torch.randn(6, 9), (torch.rand(6, 9) < 0.2).long()
    targets[0, :3] = -1
    known, positive = targets >= 0, targets > 0
    soft = torch.where(positive, 1.0, 0.1)[known]
    found = losses.sigmoid(logits, targets, smoothing=0.1) * positive.sum()

    def entropy(bias: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits((logits + bias)[known], soft, reduction="sum")

    grid = torch.stack([entropy(b) for b in torch.linspace(-8, 8, 4001)])
    torch.testing.assert_close(found, grid.min(), rtol=1e-4, atol=1e-4)
    assert found > losses.sigmoid(logits, targets) * positive.sum()
    torch.testing.assert_close(
        LOSSES["sigmoid-smooth"](logits, targets), losses.sigmoid(logits, targets, smoothing=0.01)
    )
