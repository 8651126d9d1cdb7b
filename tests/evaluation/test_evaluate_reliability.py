"""Calibration errors against torchmetrics, scikit-learn and cases small enough for paper and pencil."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn import metrics as sk
from torchmetrics.functional.classification import binary_calibration_error

from ramatch.errors import RamatchError
from ramatch.evaluation import reliability


@pytest.mark.parametrize("bins", [5, 15])
def test_ece_equals_torchmetrics(bins):
    rng = np.random.default_rng(0)
    p = rng.beta(0.4, 1.5, size=(400, 6)).astype(np.float32)
    t = rng.random(p.shape) < p**1.5
    want = binary_calibration_error(torch.tensor(p).flatten(), torch.tensor(t).flatten().long(), n_bins=bins, norm="l1")
    assert reliability.ece(p, t, bins) == pytest.approx(want.item(), abs=1e-6)
    assert reliability.ece(p, t, bins) > 0.02


def test_table_by_hand():
    p = np.array([0.1, 0.2, 0.5, 0.9, 1.0])
    t = np.array([0, 1, 1, 1, 0])
    rows = reliability.reliability_table(p, t, bins=2)
    assert [(r.low, r.high, r.count) for r in rows] == [(0.0, 0.5, 2), (0.5, 1.0, 3)]
    assert rows[0].probability == pytest.approx(0.15)
    assert rows[1].frequency == pytest.approx(2 / 3)
    assert reliability.ece(p, t, bins=2) == pytest.approx((2 * 0.35 + 3 * (0.8 - 2 / 3)) / 5)


def test_equal_mass_bins_hold_equal_counts_and_keep_ties_together():
    p = np.linspace(0, 0.1, 40) ** 2  # all in one bin of equal width
    rows = reliability.reliability_table(p, np.zeros(40), bins=8, mass=True)
    assert [r.count for r in rows] == [5] * 8
    tied = np.array([0.2] * 6 + [0.7, 0.8])
    rows = reliability.reliability_table(tied, np.ones(8), bins=4, mass=True)
    assert [(r.low, r.high, r.count) for r in rows] == [(0.2, 0.2, 6), (0.7, 0.8, 2)]


@given(
    hnp.arrays(np.float64, 12, elements=st.sampled_from([0.0, 0.2, 0.3, 0.9, 1.0])),
    hnp.arrays(bool, 12),
    st.permutations(range(12)),
)
@settings(max_examples=60, deadline=None)
def test_order_does_not_matter_and_errors_are_in_range(p, t, order):
    for mass in (False, True):
        value = reliability.ece(p, t, 4, mass=mass)
        assert 0 <= value <= 1
        assert reliability.ece(p[order], t[order], 4, mass=mass) == pytest.approx(value)


GRID = np.float32([-3.0, 0.1, 0.3, 0.30001, 0.9]).tolist()


@given(hnp.arrays(np.float32, 15, elements=st.sampled_from(GRID)), hnp.arrays(bool, 15))
@settings(max_examples=100, deadline=None)
def test_best_f1_threshold_is_the_best_there_is(scores, targets):
    threshold, f1 = reliability.best_f1(scores, targets)
    candidates = [sk.f1_score(targets, scores >= c, zero_division=0) for c in np.unique(scores)]
    assert f1 == pytest.approx(max(candidates), abs=1e-12)
    assert sk.f1_score(targets, scores.astype(np.float64) >= threshold, zero_division=0) == pytest.approx(f1, abs=1e-12)


def test_brier_and_log_loss_equal_scikit_learn():
    rng = np.random.default_rng(2)
    p, t = rng.random((50, 3)), rng.random((50, 3)) < 0.4
    assert reliability.brier(p, t) == pytest.approx(sk.brier_score_loss(t.ravel(), p.ravel()))
    assert reliability.log_loss(p, t) == pytest.approx(sk.log_loss(t.ravel(), p.ravel()))
    assert np.isfinite(reliability.log_loss(np.array([0.0, 1.0]), np.array([1, 0])))


def test_classwise_ece_sees_errors_that_cancel():
    p = np.full((100, 2), 0.5)
    t = np.stack([np.ones(100), np.zeros(100)], axis=1)
    assert reliability.ece(p, t) == pytest.approx(0.0)
    assert reliability.classwise_ece(p, t) == pytest.approx(0.5)
    assert reliability.classwise_ece(p[:, :0], t[:, :0]) == 0.0


def test_empty_and_bad_input():
    assert reliability.ece([], []) == reliability.brier([], []) == reliability.log_loss([], []) == 0.0
    assert reliability.best_f1([], []) == (0.5, 0.0)
    with pytest.raises(RamatchError, match=r"\[0, 1\], got 0 to 1.5"):
        reliability.ece([0.0, 1.5], [0, 1])
    with pytest.raises(RamatchError, match="lie in"):
        reliability.brier([np.nan], [1])
