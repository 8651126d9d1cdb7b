"""The Triton kernels against the torch path. `test_kernels.py` runs this file under TRITON_INTERPRET=1 where
there is no GPU; with one, `pytest tests/ot/kernel_cases.py` runs it there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cases import features, similarities

import ramatch.ot.fused as fused
from ramatch.ot import _sinkhorn_triton as kernels
from ramatch.ot import match_scores, solve_batch
from ramatch.ot._loops import Control, solve_exp_kernel
from ramatch.ot.solver import prepare

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def agree(ours, plain, atol=1e-3):
    assert torch.isfinite(ours.scores).all()
    torch.testing.assert_close(ours.scores, plain.scores, atol=atol, rtol=0)
    torch.testing.assert_close(ours.marginal, plain.marginal, atol=1e-6, rtol=1e-4)
    assert torch.equal(ours.converged, plain.converged)
    assert (ours.n_iter - plain.n_iter).abs().max() <= 5  # the torch path tests every fifth iteration


@pytest.fixture
def few_kept(monkeypatch):
    """Labels are merged, as beyond 2,048, from the sixth on."""
    monkeypatch.setattr(fused, "DENSE_LABELS", 5)
    monkeypatch.setattr(fused, "KEPT_COLUMNS", 4)


@pytest.mark.usefixtures("few_kept")
@pytest.mark.parametrize(
    ("m", "n", "eps"),
    [(196, 6, 0.1), (196, 17, 0.1), (196, 65, 0.1), (196, 200, 0.1), (196, 65, 0.04), (45, 33, 0.04), (1, 7, 0.1)],
)
def test_scores_of_every_shape(m, n, eps):
    sim = similarities(2, m, n).to(DEVICE)
    options = {"eps": eps, "tol": 1e-5, "logit_scale": 60.0}
    agree(match_scores(sim, backend="triton", **options), match_scores(sim, backend="torch", **options), 2e-4)


@pytest.mark.parametrize("kept", [63, 3])
def test_reduced_scores(kept, monkeypatch):
    """With few kept columns the merged problem is wrong and the iterations over all columns must mend it."""
    sim = similarities(2, 49, 300).to(DEVICE)
    exact = match_scores(sim, backend="torch", tol=1e-6, max_iter=500)
    monkeypatch.setattr(fused, "DENSE_LABELS", 100)
    monkeypatch.setattr(fused, "KEPT_COLUMNS", kept)
    ours = match_scores(sim, backend="triton")
    agree(ours, match_scores(sim, backend="torch"), 2e-4)
    torch.testing.assert_close(ours.scores, exact.scores, atol=1e-3, rtol=0)
    assert ours.converged.all()


@pytest.mark.usefixtures("few_kept")
def test_options_reach_the_kernels():
    sim = similarities(3, 20, 12).to(DEVICE)
    for options in (
        {"tau_u": None},
        {"tau_u": 0.1},
        {"logit_scale": torch.tensor(7.0, device=DEVICE)},
        {"max_iter": 2},
    ):
        agree(match_scores(sim, backend="triton", **options), match_scores(sim, backend="torch", **options))


@pytest.mark.usefixtures("few_kept")
def test_half_precision_similarities_and_features():
    sim = similarities(2, 20, 12).to(DEVICE)
    for dtype in (torch.float16, torch.bfloat16):
        low = sim.to(dtype)
        agree(match_scores(low, backend="triton"), match_scores(low.float(), backend="torch"))
    regions, labels = (f.to(DEVICE) for f in features(3, 20, 12))
    agree(
        match_scores(regions=regions, labels=labels, backend="triton", workspace_mb=0),  # image by image
        match_scores(regions @ labels.T, backend="torch"),
    )


@pytest.mark.parametrize(
    ("whole", "late"), [(True, False), (False, False), (False, True)]
)  # K in registers, or in memory
def test_solver_kernel_equals_the_torch_loop(whole, late, monkeypatch):
    monkeypatch.setattr(kernels, "WHOLE_NUMBERS", 1 << 20 if whole else 0)
    monkeypatch.setattr(kernels, "LATE_COLUMNS", kernels.MAX_COLUMNS if late else 0)
    assert ("LATE" in kernels.default_way(40, 17)) is not whole
    g = torch.Generator().manual_seed(0)
    for batch, n, m in ((3, 20, 17), (2, 7, 16), (2, 40, 1), (1, 9, 1100)):
        cost = torch.rand(batch, n, m, generator=g).to(DEVICE)
        a = torch.rand(batch, n, generator=g).to(DEVICE)
        a[0, 0] = 0 if n > 1 else 1
        a = a / a.sum(1, keepdim=True)
        start = torch.randn(batch, m, generator=g).to(DEVICE)
        for init in (None, (a, start)):
            problem = prepare(cost, 0.1, a, None, init)
            wide = None if init is None else (a.double(), start.double())
            options = {"method": "exp", "tol": 1e-5, "max_iter": 30, "check_every": 1, "potentials_init": wide}
            for fixed in (False, True):
                res = solve_exp_kernel(problem, Control(max_iter=30, tol=1e-5, fixed=fixed))
                plain = solve_batch(cost.double(), 0.1, a.double(), fixed_iter=fixed, **options)
                torch.testing.assert_close(res.plan, plain.plan.float(), atol=2e-6, rtol=1e-3)
                assert (res.n_iter - plain.n_iter).abs().max() <= 1
                # once converged the row scalings are only defined up to what the tolerance leaves open
                for mine, theirs in zip((res.u, res.v), plain.potentials, strict=True):
                    torch.testing.assert_close(mine, theirs.float(), atol=2e-3, rtol=1e-4)
                assert torch.equal(res.converged, plain.converged)


@pytest.mark.parametrize("relax", [0.3, 1.0, 8.0])
@pytest.mark.parametrize(("n", "m"), [(6, 5), (40, 17), (200, 300)])
def test_relaxed_rows(n, m, relax):
    g = torch.Generator().manual_seed(n)
    cost = (20 * torch.rand(3, n, m, generator=g)).to(DEVICE)
    a = torch.rand(3, n, generator=g).softmax(1).to(DEVICE)
    plain = solve_batch(cost.double(), 1.0, a.double(), relax=relax, tol=1e-5, check_every=1, method="exp")
    problem = prepare(cost - cost.amin((1, 2), keepdim=True), 1.0, a, None, None)._replace(power=relax / (relax + 1))
    found = solve_exp_kernel(problem, Control(max_iter=100, tol=1e-5))
    torch.testing.assert_close(found.plan, plain.plan.float(), atol=2e-6, rtol=2e-3)
    assert (found.n_iter - plain.n_iter).abs().max() <= 1
    assert torch.equal(found.converged, plain.converged)


def test_fixed_runs_every_iteration():
    cost, reg = torch.rand(2, 6, 16, device=DEVICE), torch.ones(2, device=DEVICE)
    a, b = torch.full((2, 6), 1 / 6, device=DEVICE), torch.full((2, 16), 1 / 16, device=DEVICE)
    *_, n_iter, error = kernels.solve(cost, reg, a, b, torch.ones_like(b), Control(17, 1.0, fixed=True))
    assert n_iter.tolist() == [17, 17]
    assert (error < 1e-5).all()
