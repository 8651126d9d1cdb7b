"""Metrics against scikit-learn, torchmetrics and a slow reading of their definitions."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn import metrics as sk
from torchmetrics.functional.classification import multilabel_average_precision

from ramatch.errors import RamatchError
from ramatch.evaluation import metrics


@st.composite
def problems(draw):
    """Scores on a coarse grid (many ties), targets with empty and full classes."""
    shape = draw(st.tuples(st.integers(1, 12), st.integers(1, 7)))
    grid = np.float32([-1.0, 0.0, 0.25, 0.5, 0.5001, 2.0]).tolist()
    scores = draw(hnp.arrays(np.float32, shape, elements=st.sampled_from(grid)))
    targets = draw(hnp.arrays(bool, shape))
    return scores, targets


@given(problems())
@settings(max_examples=150, deadline=None)
def test_average_precision_equals_scikit_learn(problem):
    scores, targets = problem
    ap = metrics.average_precision(scores, targets)
    for j in range(scores.shape[1]):
        want = sk.average_precision_score(targets[:, j], scores[:, j]) if targets[:, j].any() else 0.0
        assert ap[j] == pytest.approx(want, abs=1e-12)
    if targets.any():
        want = sk.average_precision_score(targets.ravel(), scores.ravel())
        assert metrics.mean_aps(scores, targets)["mAP_micro"] == pytest.approx(want, abs=1e-12)
        keep = targets.any(0)
        want = sk.average_precision_score(targets[:, keep], scores[:, keep], average="macro")
        assert metrics.mean_ap(scores, targets) == pytest.approx(want, abs=1e-12)
        tagged = targets.any(1)
        want = np.mean([sk.average_precision_score(t, s) for s, t in zip(scores[tagged], targets[tagged], strict=True)])
        assert metrics.mean_aps(scores, targets)["mAP_images"] == pytest.approx(want, abs=1e-12)


@given(problems(), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_top_k_is_a_stable_sort_and_micro(problem, k):
    scores, targets = problem
    predicted = np.zeros_like(targets)
    for i, row in enumerate(scores):
        predicted[i, np.argsort(-row, kind="stable")[:k]] = True
    assert (metrics.topk_mask(scores, k) == predicted).all()
    got = metrics.at_k(scores, targets, k)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = sk.precision_recall_fscore_support(targets.ravel(), predicted.ravel(), average="binary", zero_division=0)
    if targets.any():
        assert (got.precision, got.recall, got.f1) == pytest.approx(want[:3], abs=1e-12)
    else:
        assert got == metrics.PRF(0.0, 0.0, 0.0)


@given(problems())
@settings(max_examples=80, deadline=None)
def test_threshold_metrics_equal_scikit_learn(problem):
    scores, targets = problem
    got = metrics.at_threshold(scores, targets, 0.5)
    has = targets.any(0)
    if not has.any():
        assert set(got.values()) == {0.0}
        return
    predicted = scores >= 0.5
    columns = [  # one by one: scikit-learn reads a single column as a two-class problem
        sk.precision_recall_fscore_support(t, q, average="binary", zero_division=0)[:3]
        for t, q in zip(targets[:, has].T, predicted[:, has].T, strict=True)
    ]
    p, r, f = np.array(columns).T
    assert got["CP"] == pytest.approx(p.mean())
    assert got["CR"] == pytest.approx(r.mean())
    assert got["macro_F1"] == pytest.approx(f.mean())
    assert got["CF1"] == pytest.approx(metrics.harmonic_mean(p.mean(), r.mean()))
    want = sk.f1_score(targets.ravel(), predicted.ravel(), zero_division=0)
    assert got["OF1"] == pytest.approx(want)


def test_equals_torchmetrics_and_takes_tensors():
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(300, 12, generator=generator)
    targets = (torch.rand(300, 12, generator=generator) < 0.2).long()
    want = multilabel_average_precision(scores, targets, num_labels=12, average="none")
    np.testing.assert_allclose(metrics.average_precision(scores, targets), want.numpy(), atol=1e-5)
    want = multilabel_average_precision(scores, targets, num_labels=12, average="macro")
    assert metrics.mean_ap(scores, targets) == pytest.approx(want.item(), abs=1e-5)
    assert metrics.mean_ap(scores.bfloat16(), targets) == metrics.mean_ap(scores.bfloat16().float(), targets)


def test_chunks_do_not_change_the_answer(monkeypatch):
    rng = np.random.default_rng(0)
    scores, targets = rng.random((40, 9)).round(1), rng.random((40, 9)) < 0.3
    whole = metrics.average_precision(scores, targets), metrics.topk_mask(scores, 3)
    monkeypatch.setattr(metrics, "_CHUNK", 25)
    assert (metrics.average_precision(scores, targets) == whole[0]).all()
    assert (metrics.topk_mask(scores, 3) == whole[1]).all()


def test_the_readings_of_map_differ_as_named():
    scores = np.array([[0.9, 0.1, 0.3], [0.8, 0.7, 0.2], [0.95, 0.6, 0.1]])
    targets = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0]])  # third class empty, third image untagged
    assert metrics.mean_ap(scores, targets) == pytest.approx((1 / 2 + 1) / 2)
    assert metrics.mean_aps(scores, targets)["mAP_tagged"] == pytest.approx(1.0)
    assert metrics.mean_aps(scores, targets)["mAP_empty_zero"] == pytest.approx((1 / 2 + 1) / 3)
    assert metrics.mean_aps(scores, targets)["mAP_images"] == pytest.approx((1 + 1 / 2) / 2)
    assert metrics.mean_aps(scores, targets)["mAP_micro"] == pytest.approx((1 / 2 + 2 / 4) / 2)
    assert metrics.at_k(scores, targets, 1).precision == pytest.approx(1 / 3)


def test_nothing_to_count_is_zero():
    scores, targets = np.zeros((4, 3)), np.zeros((4, 3))
    assert list(metrics.mean_aps(scores, targets).values()) == [0.0] * 5
    assert metrics.at_k(scores[:0], targets[:0], 2) == metrics.PRF(0.0, 0.0, 0.0)
    assert metrics.mean_ap(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0
    assert metrics.harmonic_mean(0.0, 0.7) == 0.0
    assert metrics.harmonic_mean(0.5, 1.0) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("scores", "targets", "message"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), "alike"),
        (np.full((2, 3), np.nan), np.zeros((2, 3)), "6 of 6 scores are NaN"),
        (np.zeros((2, 3)), -np.ones((2, 3)), "0 or 1"),
    ],
)
def test_bad_input_is_named(scores, targets, message):
    with pytest.raises(RamatchError, match=message):
        metrics.mean_ap(scores, targets)


def test_a_zero_k_is_refused():
    with pytest.raises(RamatchError, match="at least 1"):
        metrics.topk_mask(np.zeros((1, 2)), 0)
