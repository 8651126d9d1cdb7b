"""Rows whose weights need not hold: against POT's unbalanced solver, and what the two ends of `relax` are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramatch.errors import RamatchError
from ramatch.ot import match_scores, solve_batch

pot = pytest.importorskip("ot", reason="POT is not installed")


def problem(n: int, m: int, seed: int, spread: float = 1.0, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(seed)
    cost = spread * torch.rand(2, n, m, generator=g, dtype=dtype)
    a, b = (torch.rand(2, k, generator=g, dtype=dtype) + 0.1 for k in (n, m))
    return cost, a / a.sum(1, keepdim=True), b / b.sum(1, keepdim=True)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 999), st.floats(0.1, 2), st.floats(0.05, 5))
def test_equals_pot(n, m, seed, reg, relax):
    cost, a, b = problem(n, m, seed, spread=2.0)
    for method in ("exp", "log"):
        ours = solve_batch(cost, reg, a, b, relax=relax, max_iter=20_000, tol=1e-13, method=method)
        for i in range(2):
            options = {"reg_type": "entropy", "numItermax": 20_000, "stopThr": 1e-15}
            theirs = pot.unbalanced.sinkhorn_unbalanced(a[i], b[i], cost[i], reg, (relax, float("inf")), **options)
            torch.testing.assert_close(ours.plan[i], theirs, atol=1e-7, rtol=1e-5)
        again = (ours.potentials[0].unsqueeze(2) + ours.potentials[1].unsqueeze(1) - cost / reg).exp()
        torch.testing.assert_close(again, ours.plan, atol=1e-9, rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 999), st.floats(0.05, 20), st.floats(1, 300))
def test_columns_hold_whatever_is_asked(n, m, seed, relax, spread):
    cost, a, b = problem(n, m, seed, spread, torch.float32)
    found = solve_batch(cost, 1.0, a, b, relax=relax, max_iter=500, tol=1e-6)
    torch.testing.assert_close(found.plan.sum(1), b, atol=1e-5, rtol=1e-4)
    assert found.plan.isfinite().all()


def test_the_two_ends():
    """A heavy weight holds the rows; a light one leaves each column its own softmax."""
    cost, a, b = problem(6, 4, 3)
    hard = solve_batch(cost, 0.5, a, b, max_iter=5000, tol=1e-12).plan
    torch.testing.assert_close(
        solve_batch(cost, 0.5, a, b, relax=1e5, max_iter=5000, tol=1e-12).plan, hard, atol=1e-5, rtol=0
    )
    free = (-cost / 0.5).softmax(1) * b.unsqueeze(1)
    torch.testing.assert_close(solve_batch(cost, 0.5, a, b, relax=1e-7, max_iter=50).plan, free, atol=1e-6, rtol=0)


def test_a_common_cost_of_a_row_counts():
    """It does not where rows hold; here a region that fits nothing gives its mass up."""
    cost, a, b = problem(5, 3, 1)
    dear = cost.clone()
    dear[:, 0] += 3
    options = {"max_iter": 2000, "tol": 1e-12}
    before, after = (solve_batch(c, 1.0, a, b, relax=1.0, **options).plan.sum(2) for c in (cost, dear))
    assert (after[:, 0] < before[:, 0] / 2).all()
    held = [solve_batch(c, 1.0, a, b, **options).plan for c in (cost, dear)]
    torch.testing.assert_close(held[0], held[1])


def test_few_iterations_are_enough():
    cost, a, b = problem(30, 20, 2, 20.0)
    found = solve_batch(cost, 1.0, a, b, relax=1.0, tol=1e-4, check_every=1)
    assert found.converged.all()
    assert found.n_iter.max() <= 20
    exact = solve_batch(cost, 1.0, a, b, relax=1.0, tol=1e-13, max_iter=1000).plan
    assert (found.plan - exact).abs().sum((1, 2)).max() < 1e-3


@pytest.mark.parametrize("wrong", [{"relax": 0.0}, {"relax": -1.0}, {"relax": 1.0, "stop": "scaling"}])
def test_refusals(wrong):
    with pytest.raises(RamatchError, match="relax must be positive"):
        solve_batch(torch.rand(2, 3, 3), 0.1, **wrong)


@pytest.mark.parametrize("relax", [None, 0.7])
@pytest.mark.parametrize("labels", [7, 2100])
def test_scores_of_a_cosine_cost_are_those_of_its_plan(relax, labels):
    sim = torch.rand(3, 20, labels, generator=torch.Generator().manual_seed(0)) * 0.6 - 0.1
    options = {"max_iter": 300, "tol": 1e-6, "relax": relax}
    found = match_scores(sim, logit_scale=40.0, tau_u=0.1, eps=1.0, cost="cosine", **options)
    u = (sim.amax(2) / 0.1).softmax(1).double()
    plan = solve_batch((1 - sim.double()) * 40, 1.0, u, max_iter=5000, tol=1e-12, relax=relax).plan
    torch.testing.assert_close(found.scores.double(), (plan * sim).sum(1) * labels, atol=2e-4, rtol=0)
    assert found.converged.all()
