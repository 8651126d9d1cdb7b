"""match_scores in torch: against its definition, POT, and the dense problem where columns are merged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import ramatch.ot.fused as fused
from ramatch.errors import RamatchError
from ramatch.ot import match_scores, solve_batch

sys.path.insert(0, str(Path(__file__).parent))
from cases import features, similarities


def definition(sim, *, logit_scale=100.0, tau_u=0.01, eps=0.1, tol=1e-9, max_iter=3000):
    """Scores (B, N) written out, in float64."""
    sim = sim.double()
    cost = 1 - torch.softmax(sim * logit_scale, dim=2)
    u = None if tau_u is None else torch.softmax(sim.amax(2) / tau_u, dim=1)
    plan = solve_batch(cost, eps, u, tol=tol, max_iter=max_iter).plan
    return (plan * sim).sum(1) * sim.shape[2]


@pytest.mark.parametrize(("m", "n"), [(196, 17), (196, 65), (40, 200), (12, 1), (1, 12), (1, 1)])
@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 0.05, "tau_u": 0.1}, {"tau_u": None}, {"logit_scale": 10.0}],
    ids=["paper", "warm", "uniform", "soft"],
)
def test_equals_the_definition(m, n, options):
    sim = similarities(3, m, n)
    res = match_scores(sim, tol=3e-6, max_iter=1000, **options)
    torch.testing.assert_close(res.scores.double(), definition(sim, **options), atol=1e-4, rtol=0)
    torch.testing.assert_close(res.marginal.sum(1), torch.ones(3))
    assert res.converged.all()
    assert res.scores.dtype == torch.float32


def test_equals_pot():
    pot = pytest.importorskip("ot", reason="POT is not installed")
    sim = similarities(3, 30, 9).double()
    cost, u = 1 - torch.softmax(100 * sim, 2), torch.softmax(sim.amax(2) / 0.01, 1)
    plan = pot.solve_batch(cost, 0.1, u, max_iter=2001, tol=1e-12).plan
    res = match_scores(sim, tol=1e-6, max_iter=1000)
    torch.testing.assert_close(res.scores.double(), 9 * (plan * sim).sum(1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kept", [63, 15, 3])
@pytest.mark.parametrize("logit_scale", [100.0, 20.0, 1.0])
def test_merging_labels_does_not_change_the_answer(kept, logit_scale, monkeypatch):
    """Whatever the merged problem got wrong, the result satisfies the marginals of the whole one."""
    sim = similarities(2, 49, 300)
    exact = definition(sim, logit_scale=logit_scale)
    monkeypatch.setattr(fused, "DENSE_LABELS", 100)
    monkeypatch.setattr(fused, "KEPT_COLUMNS", kept)
    monkeypatch.setattr(fused, "WHOLE_TOL", 1e-6)
    res = match_scores(sim, logit_scale=logit_scale, tol=1e-6, max_iter=300)
    assert res.converged.all()
    torch.testing.assert_close(res.scores.double(), exact, atol=1e-4, rtol=0)


def test_twenty_thousand_labels_within_a_thousandth():
    sim = similarities(1, 49, 20_000, seed=3)
    res = match_scores(sim)
    assert res.converged.all()
    torch.testing.assert_close(res.scores.double(), definition(sim, tol=1e-7), atol=1e-3, rtol=0)
    assert res.n_iter.max() < 100


def test_merging_is_used_and_saves_iterations_over_all_columns(monkeypatch):
    sim = similarities(2, 49, 4000)
    calls = []
    passes = fused.column_sums
    monkeypatch.setattr(fused, "column_sums", lambda K, r: calls.append(K.shape) or passes(K, r))
    res = match_scores(sim)
    assert calls
    assert len(calls) < res.n_iter.sum()  # a plain solution would pass over all columns every time


def test_tiny_eps_uses_the_log_domain():
    sim = similarities(2, 20, 12)
    res = match_scores(sim, eps=1e-3, max_iter=2000)
    torch.testing.assert_close(res.scores.double(), definition(sim, eps=1e-3, tol=1e-6), atol=1e-3, rtol=0)


@pytest.mark.parametrize("n", [12, 3000])
def test_features_and_groups_of_images(n):
    regions, labels = features(5, 20, n)
    whole = match_scores(regions @ labels.T)
    for workspace_mb in (1024, 1, 0):
        res = match_scores(regions=regions, labels=labels, workspace_mb=workspace_mb)
        torch.testing.assert_close(res.scores, whole.scores, atol=1e-5, rtol=1e-4)
        assert torch.equal(res.n_iter, whole.n_iter)


def test_groups_keep_to_the_workspace():
    regions, labels = features(64, 50, 40)
    sizes = [len(block) for block in fused._blocks(regions, labels, 1, triton=False)]
    assert sum(sizes) == 64
    assert max(sizes) * 50 * 40 * 20 <= 1 << 20


def test_scores_do_not_shrink_with_the_vocabulary():
    """Doubling every label leaves scores as they are."""
    sim = similarities(2, 30, 10)
    twice = torch.cat([sim, sim], dim=2)
    soft = {"logit_scale": 1e-3, "tol": 1e-7}  # flat softmax: cost does not depend on N either
    one, two = match_scores(sim, **soft), match_scores(twice, **soft)
    torch.testing.assert_close(two.scores[:, :10], one.scores, atol=1e-3, rtol=0)


def test_autocast_half_precision_and_gradients_stay_outside():
    sim = similarities(2, 30, 10)
    plain = match_scores(sim)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = match_scores(sim)
    assert torch.equal(inside.scores, plain.scores)
    low = sim.to(torch.bfloat16)
    assert torch.equal(match_scores(low).scores, match_scores(low.float()).scores)
    assert not match_scores(sim.clone().requires_grad_()).scores.requires_grad


def test_empty_batch():
    for n in (10, 3000):
        res = match_scores(torch.rand(0, 5, n))
        assert res.scores.shape == (0, n)
        assert res.marginal.shape == (0, 5)
        assert res.n_iter.shape == res.error.shape == res.converged.shape == (0,)


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("either sim", {}),
        ("either sim", {"sim": torch.rand(1, 2, 3), "regions": torch.rand(1, 2, 4), "labels": torch.rand(3, 4)}),
        ("either sim", {"regions": torch.rand(1, 2, 4)}),
        ("do not fit", {"regions": torch.rand(1, 2, 4), "labels": torch.rand(3, 5)}),
        ("expected floats", {"sim": torch.rand(2, 3)}),
        ("expected floats", {"sim": torch.rand(2, 3, 0)}),
        ("unknown backend", {"sim": torch.rand(1, 2, 3), "backend": "cuda"}),
        ("must be positive", {"sim": torch.rand(1, 2, 3), "eps": 0.0}),
        ("must be positive", {"sim": torch.rand(1, 2, 3), "tau_u": -1.0}),
    ],
)
def test_what_is_refused(match, options):
    with pytest.raises(RamatchError, match=match):
        match_scores(**options)


def test_triton_backend_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RamatchError, match="needs Triton and a GPU"):
        match_scores(torch.rand(1, 2, 3), backend="triton")
