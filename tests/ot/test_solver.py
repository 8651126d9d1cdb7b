"""solve_batch against POT, against itself in other settings, and against the invariants of transport."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ramatch.ot._loops as loops
from ramatch.ot import OTResult, solve_batch

pot = pytest.importorskip("ot", reason="POT is not installed")


def problem(batch=3, n=7, m=5, dtype=torch.float64, seed=0, spread=1.0):
    """Random cost (B, n, m) in [0, spread] and random weights that sum to one."""
    g = torch.Generator().manual_seed(seed)
    cost = spread * torch.rand(batch, n, m, generator=g, dtype=dtype)
    a = torch.rand(batch, n, generator=g, dtype=dtype) + 0.1
    b = torch.rand(batch, m, generator=g, dtype=dtype) + 0.1
    return cost, a / a.sum(1, keepdim=True), b / b.sum(1, keepdim=True)


problems = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 4),
        "n": st.integers(1, 12),
        "m": st.integers(1, 12),
        "seed": st.integers(0, 10_000),
        "spread": st.floats(0.05, 3.0),
    }
)
regs = st.floats(0.05, 2.0)
QUICK = settings(max_examples=25, deadline=None)


@QUICK
@given(problems, regs, st.sampled_from(["exp", "log", "auto"]))
def test_equals_pot_batch_in_float64(p, reg, method):
    cost, a, b = problem(**p)
    ours = solve_batch(cost, reg, a, b, max_iter=3000, tol=1e-11, method=method)
    theirs = pot.solve_batch(cost, reg, a, b, max_iter=3001, tol=1e-12)
    torch.testing.assert_close(ours.plan, theirs.plan, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.value, theirs.value, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.value_linear, theirs.value_linear, atol=1e-6, rtol=0)
    for mine, pots in zip(ours.potentials, theirs.potentials, strict=True):
        torch.testing.assert_close(mine, pots, atol=1e-5, rtol=0)


@QUICK
@given(problems, regs, st.sampled_from(["exp", "log", "auto"]))
def test_equals_pot_batch_in_float32(p, reg, method):
    cost, a, b = problem(**p, dtype=torch.float32)
    ours = solve_batch(cost, reg, a, b, max_iter=3000, tol=1e-6, method=method)
    theirs = pot.solve_batch(cost.double(), reg, a.double(), b.double(), max_iter=3001, tol=1e-12)
    assert ours.plan.dtype == torch.float32
    torch.testing.assert_close(ours.plan.double(), theirs.plan, atol=1e-4, rtol=0)


@QUICK
@given(problems, regs)
def test_equals_pot_solve(p, reg):
    cost, a, b = problem(**p)
    ours = solve_batch(cost, reg, a, b, max_iter=3000, tol=1e-11)
    for i in range(len(cost)):
        theirs = pot.solve(cost[i], a[i], b[i], reg=reg, reg_type="entropy", max_iter=3000, tol=1e-11)
        torch.testing.assert_close(ours.plan[i], theirs.plan, atol=1e-6, rtol=0)


@QUICK
@given(problems, st.floats(0.05, 0.5), st.floats(0.01, 0.5))
def test_knowledge_constrained_transport_is_pots_reference_measure(p, lambda1, lambda2):
    """min <P,C> - l1 H(P) + l2 KL(P || Q) is entropic transport of C - l2 log Q with eps = l1 + l2 (Eq. 10),

    and POT's form with KL to the reference measure Q ** (l2 / (l1 + l2))."""
    cost, a, b = problem(**p)
    g = torch.Generator().manual_seed(p["seed"] + 1)
    teacher = torch.softmax(2 * torch.randn(cost.shape, generator=g, dtype=cost.dtype), dim=-1)
    eps = lambda1 + lambda2
    ours = solve_batch(cost - lambda2 * teacher.log(), eps, a, b, max_iter=5000, tol=1e-12)
    for i in range(len(cost)):
        theirs = pot.solve(
            cost[i],
            a[i],
            b[i],
            reg=eps,
            c=teacher[i] ** (lambda2 / eps),
            reg_type="KL",
            unbalanced=(float("inf"), float("inf")),  # POT reads c only here; infinite penalties: balanced
            method="sinkhorn",
            max_iter=5000,
            tol=1e-13,
        )
        torch.testing.assert_close(ours.plan[i], theirs.plan, atol=1e-6, rtol=0)


def test_knowledge_objective_is_minimal_at_the_plan():
    """No feasible perturbation of the plan lowers the KCOT objective."""
    cost, a, b = problem(1, 6, 5)
    teacher = torch.softmax(torch.randn(cost.shape, dtype=cost.dtype), dim=-1)
    l1, l2 = 0.1, 0.05
    plan = solve_batch(cost - l2 * teacher.log(), l1 + l2, a, b, max_iter=5000, tol=1e-13).plan

    def objective(q):
        return (q * cost).sum() + l1 * (q * q.log()).sum() + l2 * (q * (q / teacher).log()).sum()

    best = objective(plan)
    for _ in range(50):
        move = torch.randn(cost.shape, dtype=cost.dtype)
        move = move - move.mean(1, keepdim=True) - move.mean(2, keepdim=True) + move.mean((1, 2), keepdim=True)
        step = 0.5 * (plan / move.abs()).min()
        assert objective(plan + step * move) > best


@QUICK
@given(problems, st.floats(0.08, 2.0))
def test_marginals_and_own_error(p, reg):
    cost, a, b = problem(**p)
    res = solve_batch(cost, reg, a, b, max_iter=2000, tol=1e-9)
    assert res.converged.all()
    torch.testing.assert_close(res.plan.sum(1), b, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close((res.plan.sum(2) - a).abs().sum(1), res.error, atol=1e-12, rtol=1e-3)
    assert (res.error < 1e-9).all()
    u, v = res.potentials
    torch.testing.assert_close(res.plan, (u[:, :, None] + v[:, None] - cost / reg).exp(), atol=1e-12, rtol=1e-9)


@QUICK
@given(problems, st.integers(0, 1000))
def test_permutation_equivariance(p, seed):
    cost, a, b = problem(**p)
    g = torch.Generator().manual_seed(seed)
    i, j = torch.randperm(p["n"], generator=g), torch.randperm(p["m"], generator=g)
    k = torch.randperm(p["batch"], generator=g)
    plan = solve_batch(cost, 0.2, a, b).plan
    moved = solve_batch(cost[k][:, i][:, :, j], 0.2, a[k][:, i], b[k][:, j]).plan
    torch.testing.assert_close(moved, plan[k][:, i][:, :, j])


def test_scaling_laws():
    cost, a, b = problem()
    res = solve_batch(cost, 0.2, a, b, tol=1e-12, max_iter=500)
    both = solve_batch(7 * cost, 1.4, a, b, tol=1e-12, max_iter=500)  # cost and reg together
    torch.testing.assert_close(both.plan, res.plan)
    mass = solve_batch(cost, 0.2, 3 * a, 3 * b, tol=1e-12, max_iter=500)  # weights need not sum to one
    torch.testing.assert_close(mass.plan, 3 * res.plan)
    shift = torch.randn(3, 7, 1, dtype=cost.dtype) + torch.randn(3, 1, 5, dtype=cost.dtype)
    torch.testing.assert_close(solve_batch(cost + shift, 0.2, a, b, tol=1e-12, max_iter=500).plan, res.plan)


def test_exp_and_log_agree_after_every_iteration():
    cost, a, b = problem(4, 9, 6)
    for k in (1, 2, 7):
        exp = solve_batch(cost, 0.1, a, b, max_iter=k, tol=0, method="exp")
        log = solve_batch(cost, 0.1, a, b, max_iter=k, tol=0, method="log")
        torch.testing.assert_close(exp.plan, log.plan, atol=1e-12, rtol=1e-9)
        torch.testing.assert_close(exp.potentials, log.potentials)
        torch.testing.assert_close(exp.error, log.error)


def test_pots_method_names_are_understood():
    cost, a, b = problem()
    exp, log = (solve_batch(cost, 0.1, a, b, method=m).plan for m in ("sinkhorn", "log_sinkhorn"))
    torch.testing.assert_close(exp, log)
    assert torch.equal(exp, solve_batch(cost, 0.1, a, b, method="exp").plan)


@pytest.mark.parametrize("method", ["exp", "log"])
def test_each_problem_stops_on_its_own(method):
    """n_iter, error and plan of a problem do not depend on what else is in the batch."""
    cost, a, b = problem(6, 8, 7)
    cost = cost * torch.tensor([0.01, 3.0, 0.5, 1.0, 2.0, 0.1], dtype=cost.dtype)[:, None, None]
    res = solve_batch(cost, 0.1, a, b, max_iter=40, tol=1e-6, method=method, check_every=2)
    assert len(set(res.n_iter.tolist())) > 2
    for i in range(6):
        alone = solve_batch(cost[i], 0.1, a[i], b[i], max_iter=40, tol=1e-6, method=method, check_every=2)
        assert alone.n_iter == res.n_iter[i]
        assert alone.converged == res.converged[i]
        torch.testing.assert_close(alone.plan, res.plan[i], atol=1e-13, rtol=1e-9)
        torch.testing.assert_close(alone.error, res.error[i], atol=1e-13, rtol=1e-6)
        if res.converged[i] and res.n_iter[i] > 2:  # and not a test later than needed
            earlier = solve_batch(cost[i], 0.1, a[i], b[i], max_iter=int(res.n_iter[i]) - 2, tol=0, method=method)
            assert earlier.error >= 1e-6


@pytest.mark.parametrize("method", ["exp", "log"])
def test_blocks_of_problems_change_nothing(method, monkeypatch):
    cost, a, b = problem(7, 8, 7)
    whole = solve_batch(cost, 0.05, a, b, method=method)
    monkeypatch.setattr(loops, "CPU_BLOCK_BYTES", 3 * 8 * 7 * 8)  # three problems at a time
    parts = solve_batch(cost, 0.05, a, b, method=method)
    assert torch.equal(whole.n_iter, parts.n_iter)
    torch.testing.assert_close(whole.plan, parts.plan, atol=1e-14, rtol=1e-10)
    torch.testing.assert_close(whole.potentials, parts.potentials)


@pytest.mark.parametrize("method", ["exp", "log"])
def test_fixed_iterations_equal_the_loop(method):
    cost, a, b = problem(4, 9, 6)
    fixed = solve_batch(cost, 0.1, a, b, max_iter=13, fixed_iter=True, method=method, tol=1e-3)
    loop = solve_batch(cost, 0.1, a, b, max_iter=13, tol=0, method=method)
    assert torch.equal(fixed.plan, loop.plan)
    assert fixed.n_iter.tolist() == [13] * 4
    assert torch.equal(fixed.converged, fixed.error < 1e-3)


@pytest.mark.parametrize("options", [{"cost_range": 1.0}, {"method": "log"}, {"stop": "scaling"}])
def test_fixed_iterations_export(options):
    class Solver(torch.nn.Module):
        def forward(self, cost, a):
            res = solve_batch(cost, 0.1, a, max_iter=6, fixed_iter=True, **options)
            return res.plan, res.error

    cost, a, _ = problem(3, 7, 5, dtype=torch.float32)
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(Solver(), (cost, a), dynamic_shapes=({0: batch}, {0: batch}))
    cost, a, _ = problem(5, 7, 5, dtype=torch.float32, seed=1)
    for out, expected in zip(exported.module()(cost, a), Solver()(cost, a), strict=True):
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("method", ["exp", "log"])
def test_warm_start(method):
    cost, a, b = problem(3, 8, 7, spread=2.0)
    cold = solve_batch(cost, 0.05, a, b, max_iter=5000, tol=1e-10, method=method, check_every=1)
    warm = solve_batch(
        cost, 0.05, a, b, max_iter=5000, tol=1e-9, method=method, potentials_init=cold.potentials, check_every=1
    )
    assert (warm.n_iter == 1).all()
    assert (cold.n_iter > 10).all()
    torch.testing.assert_close(warm.potentials, cold.potentials)
    # going on from the middle is the same as never having stopped
    half = solve_batch(cost, 0.05, a, b, max_iter=4, tol=0, method=method)
    rest = solve_batch(cost, 0.05, a, b, max_iter=3, tol=0, method=method, potentials_init=half.potentials)
    straight = solve_batch(cost, 0.05, a, b, max_iter=7, tol=0, method=method)
    torch.testing.assert_close(rest.potentials, straight.potentials)


def test_one_reg_per_problem():
    cost, a, b = problem(3)
    reg = torch.tensor([0.05, 0.2, 1.0], dtype=cost.dtype)
    for method in ("exp", "log", "auto"):
        res = solve_batch(cost, reg, a, b, method=method)
        for i in range(3):
            one = solve_batch(cost[i], float(reg[i]), a[i], b[i], method=method)
            torch.testing.assert_close(res.plan[i], one.plan)
            torch.testing.assert_close(res.value[i], one.value)


def scaling_loop(cost, a, b, reg, settled):
    """The authors' program's iterations, written plainly; `settled` of |r - r_prev| (B, n) ends them."""
    K = torch.exp(-cost / reg)
    r, c = torch.ones_like(a), torch.ones_like(b)
    n_iter, done = 0, False
    while not done and n_iter < 100:
        last, n_iter = r, n_iter + 1
        r = a / torch.matmul(K, c[:, :, None])[:, :, 0]
        c = b / torch.matmul(K.transpose(1, 2), r[:, :, None])[:, :, 0]
        done = settled((r - last).abs())
    return r[:, :, None] * K * c[:, None, :], n_iter


def every_image(change):
    """The authors' program's stop: mean |r - r_prev| < 1e-3 in every image of the batch."""
    return all(image.mean() < 1e-3 for image in change)


def test_scaling_rule_equals_a_plain_loop():
    for seed, reg in ((0, 0.1), (1, 0.3), (2, 0.05)):
        cost, a, b = problem(4, 9, 6, dtype=torch.float32, seed=seed)
        plan, n_iter = scaling_loop(cost, a, b, reg, every_image)
        res = solve_batch(cost, reg, a, b, max_iter=100, tol=1e-3, stop="scaling")
        assert 2 < n_iter < 100
        assert res.n_iter.tolist() == [n_iter] * 4
        assert res.converged.all()
        torch.testing.assert_close(res.plan, plan, atol=1e-7, rtol=1e-5)
        torch.testing.assert_close(res.error, (res.plan.sum(2) - a).abs().sum(1), atol=1e-6, rtol=1e-3)


def test_scaling_rule_waits_for_the_slowest_problem():
    """One hard problem among easy ones: a mean over the whole batch would stop long before it has settled."""
    cost, a, b = problem(8, 9, 6, seed=2)
    cost[:7] *= 0.01
    cost[7] *= 0.5
    plan, n_iter = scaling_loop(cost, a, b, 0.1, every_image)
    early, fewer = scaling_loop(cost, a, b, 0.1, lambda change: change.mean() < 1e-3)
    assert fewer < n_iter < 100
    assert (early - plan).abs().max() > 1e-2 * plan.max()  # the two rules differ in what comes out
    res = solve_batch(cost, 0.1, a, b, max_iter=100, tol=1e-3, stop="scaling")
    assert res.n_iter.tolist() == [n_iter] * 8
    torch.testing.assert_close(res.plan, plan)
    alone = solve_batch(cost[7:], 0.1, a[7:], b[7:], max_iter=100, tol=1e-3, stop="scaling")
    torch.testing.assert_close(res.plan[7:], alone.plan)


def test_scaling_rule_depends_on_the_batch_and_may_run_out():
    cost, a, b = problem(4, 9, 6)
    cost = cost * torch.tensor([0.01, 1, 2, 3], dtype=cost.dtype)[:, None, None]
    together = solve_batch(cost, 0.1, a, b, tol=1e-3, stop="scaling", max_iter=500)
    alone = solve_batch(cost[:1], 0.1, a[:1], b[:1], tol=1e-3, stop="scaling", max_iter=500)
    assert together.n_iter[0] > alone.n_iter[0]
    short = solve_batch(cost, 0.1, a, b, tol=1e-3, stop="scaling", max_iter=3)
    assert short.n_iter.tolist() == [3] * 4
    assert not short.converged.any()


def test_single_problem_keeps_its_shape():
    cost, a, b = problem(1)
    res = solve_batch(cost[0], 0.1, a[0], b[0])
    assert isinstance(res, OTResult)
    assert res.plan.shape == (7, 5)
    assert [p.shape for p in res.potentials] == [(7,), (5,)]
    assert res.n_iter.shape == res.error.shape == res.converged.shape == res.value.shape == ()
    torch.testing.assert_close(res.plan, solve_batch(cost, 0.1, a, b).plan[0])
