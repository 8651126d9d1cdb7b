"""The edges of solve_batch: zero weights, tiny and huge problems, precision, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ramatch.errors import RamatchError
from ramatch.ot import solve_batch

METHODS = ["exp", "log", "auto"]


def is_finite(res) -> bool:
    return all(
        bool(torch.isfinite(t).all()) for t in (res.plan, *res.potentials, res.error, res.value, res.value_linear)
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_weights_are_exact_zeros(method, dtype):
    cost = torch.rand(2, 5, 4, dtype=dtype)
    a = torch.tensor([[0.5, 0, 0.25, 0.25, 0], [0.2] * 5], dtype=dtype)
    b = torch.tensor([[0.5, 0.5, 0, 0], [0.0, 0.25, 0.5, 0.25]], dtype=dtype)
    res = solve_batch(cost, 0.2, a, b, method=method, max_iter=500)
    assert is_finite(res)
    assert res.converged.all()
    assert (res.plan[0, [1, 4]] == 0).all()
    assert (res.plan[0, :, [2, 3]] == 0).all()
    assert (res.plan[1, :, 0] == 0).all()
    # the rest is the problem without the empty rows and columns
    small = solve_batch(cost[0][[0, 2, 3]][:, [0, 1]], 0.2, a[0, [0, 2, 3]], b[0, :2], method=method, max_iter=500)
    torch.testing.assert_close(res.plan[0][[0, 2, 3]][:, [0, 1]], small.plan, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_no_mass_at_all(method):
    res = solve_batch(torch.rand(1, 3, 2), 0.1, torch.zeros(1, 3), torch.zeros(1, 2), method=method)
    assert is_finite(res)
    assert (res.plan == 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 6), (6, 1)])
def test_one_region_or_one_label_is_the_product_of_weights(method, n, m):
    a = torch.softmax(torch.randn(2, n), 1)
    b = torch.softmax(torch.randn(2, m), 1)
    res = solve_batch(torch.rand(2, n, m), 0.1, a, b, method=method)
    torch.testing.assert_close(res.plan, a[:, :, None] * b[:, None])
    assert res.converged.all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", ["marginal", "scaling"])
def test_million_fold_cost_range_is_finite(method, stop):
    torch.manual_seed(1)
    cost = torch.rand(3, 8, 6) * torch.logspace(0, 6, 6)
    res = solve_batch(cost, 1.0, method=method, stop=stop)
    assert is_finite(res)


@pytest.mark.parametrize("reg", [1e-6, 1e-3])
def test_tiny_reg_is_solved_in_the_log_domain(reg):
    """With reg -> 0 the plan is the assignment of least cost; float32 input, a million-fold range."""
    torch.manual_seed(0)
    order = torch.randperm(6)
    cost = torch.rand(6, 6) + 0.5
    cost[torch.arange(6), order] = 0.1
    res = solve_batch(cost, reg, max_iter=300)
    assert res.converged
    assert is_finite(res)
    expected = torch.zeros(6, 6)
    expected[torch.arange(6), order] = 1 / 6
    torch.testing.assert_close(res.plan, expected, atol=1e-5, rtol=0)


def test_auto_leaves_the_exp_domain_when_it_must():
    torch.manual_seed(0)
    cost = torch.rand(2, 8, 6) * 100  # range / reg = 1000
    auto = solve_batch(cost, 0.1, max_iter=5)
    log = solve_batch(cost, 0.1, max_iter=5, method="log")
    assert torch.equal(auto.plan, log.plan)
    fast = solve_batch(cost, 10.0, max_iter=5)
    assert torch.equal(fast.plan, solve_batch(cost, 10.0, max_iter=5, method="exp").plan)
    # a large offset per row is no conditioning problem: rows are shifted by their smallest cost
    offset = cost / 100 + 1e4 * torch.rand(2, 8, 1)
    assert torch.equal(
        solve_batch(offset, 0.1, max_iter=5).plan, solve_batch(offset, 0.1, max_iter=5, method="exp").plan
    )
    # what the caller knows is believed
    told = solve_batch(cost, 10.0, max_iter=5, cost_range=1e6)
    assert torch.equal(told.plan, solve_batch(cost, 10.0, max_iter=5, method="log").plan)


def test_exp_domain_is_accurate_up_to_its_limit():
    torch.manual_seed(0)
    cost = torch.rand(2, 20, 15)
    cost[:, 0, 0], cost[:, 0, 1] = 0.0, 1.0
    a = torch.softmax(30 * torch.randn(2, 20), 1)  # weights far apart as well
    exp = solve_batch(cost, 1 / 49, a, method="exp", max_iter=200, tol=0)
    log = solve_batch(cost.double(), 1 / 49, a.double(), method="log", max_iter=200, tol=0)
    assert is_finite(exp)
    torch.testing.assert_close(exp.plan.double(), log.plan, atol=2e-6, rtol=0)


@pytest.mark.parametrize("scale", [300.0, 1e4, 1e6])
@pytest.mark.parametrize(
    "options", [{"method": "exp"}, {"method": "exp", "fixed_iter": True}, {"stop": "scaling"}], ids=str
)
def test_out_of_the_exp_domains_range_nothing_wrong_is_called_converged(scale, options):
    """K underflows there; "auto" takes the log domain, and whoever insists is told."""
    g = torch.Generator().manual_seed(0)
    cost = scale * torch.rand(20, 6, 4, generator=g)
    a, b = (torch.softmax(3 * torch.randn(20, n, generator=g), 1) for n in (6, 4))
    res = solve_batch(cost, 1.0, a, b, max_iter=200, tol=1e-3, **options)
    assert is_finite(res)
    rows, columns = (res.plan.sum(2) - a).abs().sum(1), (res.plan.sum(1) - b).abs().sum(1)
    assert (rows > 0.1).any()
    torch.testing.assert_close(res.error, rows, atol=1e-5, rtol=1e-4)
    # the scaling rule is loose about marginals, but not about lost rows
    wrong = torch.maximum(rows, columns) > (2e-3 if "method" in options else 0.1)
    assert not (res.converged & wrong).any()


@pytest.mark.parametrize(
    "options", [{"method": m} for m in METHODS] + [{"stop": "scaling"}, {"fixed_iter": True}], ids=str
)
@pytest.mark.parametrize("reg", [0.1, torch.zeros(0), torch.tensor(0.1)], ids=["number", "none", "one"])
def test_empty_batch(options, reg):
    for weights in ({}, {"a": torch.full((4,), 0.25), "b": torch.rand(0, 3)}):
        start = (torch.zeros(0, 4), torch.zeros(0, 3))
        res = solve_batch(torch.rand(0, 4, 3), reg, **weights, **options, potentials_init=start)
        assert res.plan.shape == (0, 4, 3)
        assert res.value.shape == res.value_linear.shape == (0,)
        assert res.n_iter.shape == res.error.shape == res.converged.shape == (0,)
        assert (res.n_iter.dtype, res.converged.dtype) == (torch.int64, torch.bool)
        assert [p.shape for p in res.potentials] == [(0, 4), (0, 3)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_is_solved_in_float32(dtype):
    cost = torch.rand(2, 30, 20).to(dtype)
    a = torch.softmax(torch.randn(2, 30), 1).to(dtype)
    res = solve_batch(cost, 0.02, a, max_iter=500)
    assert res.plan.dtype == torch.float32
    same = solve_batch(cost.float(), 0.02, a.float(), max_iter=500)
    assert torch.equal(res.plan, same.plan)


def test_autocast_does_not_reach_inside():
    cost = torch.rand(2, 30, 20)
    plain = solve_batch(cost, 0.02)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            inside = solve_batch(cost, 0.02)
        assert inside.plan.dtype == torch.float32
        assert torch.equal(inside.plan, plain.plan)


def test_no_gradient_flows():
    cost = torch.rand(2, 4, 3, requires_grad=True)
    res = solve_batch(cost, 0.1)
    assert not res.plan.requires_grad
    assert not res.value.requires_grad
    assert not any(p.requires_grad for p in res.potentials)


def test_inputs_are_left_alone():
    cost, a = torch.rand(2, 4, 3), torch.full((2, 4), 0.25)
    before = cost.clone(), a.clone()
    for options in ({"method": "exp"}, {"method": "log"}, {"stop": "scaling"}):
        solve_batch(cost, 0.1, a, **options)
    assert torch.equal(cost, before[0])
    assert torch.equal(a, before[1])


def test_shared_weights_and_non_contiguous_cost():
    cost = torch.rand(3, 2, 5).transpose(0, 1).transpose(1, 2)  # (2, 5, 3), strided
    a = torch.softmax(torch.randn(5), 0)
    shared = solve_batch(cost, 0.1, a)
    assert torch.equal(shared.plan, solve_batch(cost.contiguous(), 0.1, a.expand(2, 5)).plan)


OK = torch.rand(2, 3, 4)


@pytest.mark.parametrize(
    ("match", "args", "options"),
    [
        ("shape", (torch.rand(3), 0.1), {}),
        ("floating-point", (torch.ones(2, 3, 4, dtype=torch.int64), 0.1), {}),
        ("a row and a column", (torch.rand(2, 0, 4), 0.1), {}),
        ("reg must be positive", (OK, 0.0), {}),
        ("reg must be positive", (OK, float("nan")), {}),
        ("reg has shape", (OK, torch.ones(3)), {}),
        ("every reg", (OK, torch.tensor([0.1, -1.0])), {}),
        ("a has shape", (OK, 0.1, torch.ones(2, 4)), {}),
        ("b has shape", (OK, 0.1, None, torch.ones(3, 4)), {}),
        ("a must be a floating", (OK, 0.1, torch.ones(2, 3, dtype=torch.int64)), {}),
        ("a holds negative", (OK, 0.1, torch.tensor([[1.5, -0.5, 0.0]] * 2)), {}),
        ("b holds negative", (OK, 0.1, None, torch.full((2, 4), float("nan"))), {}),
        ("problem 1 do not match", (OK, 0.1, torch.tensor([[0.5, 0.5, 0.0], [1.0, 1.0, 0.0]])), {}),
        ("NaN or infinite", (OK / torch.zeros(1), 0.1), {}),
        ("unknown method", (OK, 0.1), {"method": "newton"}),
        ("unknown stop", (OK, 0.1), {"stop": "never"}),
        ("at least 1", (OK, 0.1), {"max_iter": 0}),
        ("potentials_init", (OK, 0.1), {"potentials_init": (torch.zeros(2, 3), torch.zeros(2, 3))}),
        (
            "potentials_init.* NaN",
            (OK, 0.1),
            {"potentials_init": (torch.zeros(2, 3), torch.full((2, 4), float("nan")))},
        ),
        ("potentials_init.* NaN", (OK, 0.1), {"potentials_init": (torch.zeros(2, 3), torch.full((4,), float("inf")))}),
    ],
)
def test_what_is_refused(match, args, options):
    with pytest.raises(RamatchError, match=match):
        solve_batch(*args, **options)


def test_huge_starting_potentials_do_not_drown_the_costs() -> None:
    M = torch.rand(2, 3, 5, dtype=torch.float64) * 40
    right = solve_batch(M, 0.5, max_iter=2000, tol=1e-10, method="log")
    for value in (-1e30, 1e20, 1e4):
        start = (torch.zeros(2, 3), torch.full((2, 5), value))
        found = solve_batch(M, 0.5, max_iter=2000, tol=1e-10, method="log", potentials_init=start)
        assert found.converged.all()
        torch.testing.assert_close(found.plan, right.plan, atol=1e-9, rtol=0)


def test_converged_means_that_the_plan_has_the_sums() -> None:
    """Costs of 1e14 eps leave the potentials no digits for the plan."""
    M = torch.rand(40, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e6
    found = solve_batch(M, 1e-8, max_iter=300, tol=1e-6, method="log")
    gaps = (found.plan.sum(2) - 1 / 5).abs().sum(1)
    assert (gaps[found.converged] < 1e-5).all()


def test_a_tolerance_that_is_no_number_is_refused() -> None:
    with pytest.raises(RamatchError, match="tol"):
        solve_batch(torch.rand(1, 2, 3), 0.1, tol=float("nan"))
