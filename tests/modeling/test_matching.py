"""Matchers: marginals, LPD, TKT, and agreement with independent solvers."""

from __future__ import annotations

import itertools

import pytest
import torch

from ramatch.config import PRESETS, preset
from ramatch.errors import RamatchError
from ramatch.modeling.matching import MATCHERS, match, presence, teacher_plan, transport_cost

SCALE = 50.0
CONFIG = PRESETS["paper"].replace(tol=1e-6, max_iter=1000)
SHAPES = [(2, 12, 5), (1, 4, 9), (3, 6, 1), (2, 1, 4), (1, 1, 1), (2, 3, 3)]


def cosines(b, m, n, seed=0):
    return torch.rand(b, m, n, generator=torch.Generator().manual_seed(seed)) * 0.3


def targets_for(b, n, seed=0):
    y = torch.rand(b, n, generator=torch.Generator().manual_seed(seed)) < 0.4
    y[:, 0] = True
    return y.long()


@pytest.mark.parametrize("name", list(MATCHERS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_plan_spreads_one_nth_over_each_label(name, shape):
    """More labels than regions, one label, one region: columns sum to 1/N, the plan to 1, nothing is negative or
    NaN."""
    if name == "bipartite":
        pytest.importorskip("scipy")
    sim = cosines(*shape).requires_grad_()
    found = match(sim, SCALE, CONFIG.replace(matcher=name))
    assert found.plan.shape == shape
    assert not found.plan.requires_grad
    assert (found.plan >= 0).all()
    torch.testing.assert_close(found.plan.sum(1), torch.full((shape[0], shape[2]), 1 / shape[2]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.plan.sum(2), found.marginal, atol=2e-5, rtol=1e-3)
    torch.testing.assert_close(found.marginal.sum(1), torch.ones(shape[0]), atol=1e-5, rtol=1e-5)


def test_cost_and_presence_by_hand():
    sim = cosines(2, 3, 4)
    for b, k in itertools.product(range(2), range(3)):
        weights = [torch.exp(sim[b, k, i] * SCALE) for i in range(4)]
        for i in range(4):
            torch.testing.assert_close(transport_cost(sim, SCALE)[b, k, i], 1 - weights[i] / sum(weights))
    best = [[max(sim[b, k].tolist()) for k in range(3)] for b in range(2)]
    torch.testing.assert_close(presence(sim, 0.1), torch.softmax(torch.tensor(best) / 0.1, -1))


def test_lpd_is_the_region_marginal():
    sim = cosines(2, 12, 5)
    with_lpd = match(sim, SCALE, CONFIG)
    torch.testing.assert_close(with_lpd.marginal, presence(sim, 1 / SCALE))  # no temperature given: CLIP's own
    torch.testing.assert_close(match(sim, SCALE, CONFIG.replace(tau_u=0.1)).marginal, presence(sim, 0.1))
    plain = match(sim, SCALE, CONFIG.replace(lpd=False))
    torch.testing.assert_close(plain.marginal, torch.full((2, 12), 1 / 12))
    torch.testing.assert_close(plain.plan, match(sim, SCALE, CONFIG.replace(matcher="ot")).plan)
    assert (with_lpd.plan - plain.plan).abs().max() > 1e-3


def test_kcot_minimises_the_papers_objective():
    """Against POT: entropic transport with reference measure P̃^(λ2/(λ1+λ2)) (Eq. 6 written as one divergence)."""
    ot = pytest.importorskip("ot")
    sim, teacher, y = cosines(3, 12, 5), cosines(3, 12, 5, seed=1), targets_for(3, 5)
    found = match(sim, SCALE, CONFIG, teacher, y)
    guide = teacher_plan(teacher, y, SCALE, CONFIG).double()
    u, cost, eps = (
        presence(sim, 1 / SCALE).double(),
        transport_cost(sim, SCALE).double(),
        CONFIG.lambda1 + CONFIG.lambda2,
    )
    for b in range(3):
        reference = guide[b] ** (CONFIG.lambda2 / eps)
        expected = ot.solve(
            cost[b],
            u[b] / u[b].sum(),
            torch.full((5,), 0.2).double(),
            reg=eps,
            reg_type="KL",
            c=reference,
            method="sinkhorn",
            unbalanced=(float("inf"), float("inf")),  # POT reads c only here; infinite penalties are hard constraints
            tol=1e-12,
            max_iter=5000,
        ).plan
        torch.testing.assert_close(found.plan[b].double(), expected, atol=1e-5, rtol=1e-3)


def test_tkt_needs_a_teacher_targets_and_the_setting():
    sim, teacher, y = cosines(2, 12, 5), cosines(2, 12, 5, seed=1), targets_for(2, 5)
    free = match(sim, SCALE, CONFIG).plan
    guided = match(sim, SCALE, CONFIG, teacher, y).plan
    assert (guided - free).abs().max() > 1e-3
    torch.testing.assert_close(match(sim, SCALE, CONFIG.replace(tkt=False), teacher, y).plan, free)
    for name in ("ot", "average", "reweight"):
        other = CONFIG.replace(matcher=name)
        torch.testing.assert_close(match(sim, SCALE, other, teacher, y).plan, match(sim, SCALE, other).plan)


@pytest.mark.parametrize("teacher", ["labels", "regions"])
@pytest.mark.parametrize("floor", ["image", "batch"])
def test_teacher_assignment_and_its_floor(teacher, floor):
    sim, y = cosines(2, 4, 3), torch.tensor([[1, 0, 0], [0, 1, 1]])
    config = preset("paper", teacher=teacher, teacher_floor=floor)
    plan = torch.softmax(sim * SCALE, dim=2)
    if teacher == "regions":
        plan = torch.softmax(20 * plan, dim=1)
    expected = plan.clone()
    for b, k, i in itertools.product(range(2), range(4), range(3)):
        if not y[b, i]:
            expected[b, k, i] = plan.min() if floor == "batch" else plan[b].min()
    torch.testing.assert_close(teacher_plan(sim, y, SCALE, config), expected)
    if floor == "image":
        assert plan[0].min() != plan[1].min()


def test_unknown_labels_keep_the_teachers_view():
    sim, y = cosines(1, 4, 3), torch.tensor([[1, 0, -1]])
    plan = teacher_plan(sim, y, SCALE, CONFIG)
    torch.testing.assert_close(plan[:, :, 2], torch.softmax(sim * SCALE, dim=2)[:, :, 2])
    assert (plan[:, :, 1] == plan.min()).all()


def test_the_floors_value_does_not_move_the_plan():
    """An absent label's column is constant, and column scaling takes a constant up: image or batch, the plan is one."""
    sim, teacher, y = (
        cosines(2, 12, 5),
        cosines(2, 12, 5, seed=1) * torch.tensor([1.0, 3.0]).view(2, 1, 1),
        targets_for(2, 5),
    )
    plans = [match(sim, SCALE, CONFIG.replace(teacher_floor=floor), teacher, y).plan for floor in ("image", "batch")]
    torch.testing.assert_close(plans[0], plans[1], atol=1e-6, rtol=1e-4)


def test_a_sharp_teacher_stays_finite():
    """Cosines 2 apart at CLIP's temperature: assignments of 1e-87 would be log 0 without a floor."""
    teacher = torch.full((1, 6, 3), -1.0)
    teacher[..., 0] = 1.0
    found = match(cosines(1, 6, 3), 100.0, PRESETS["paper"], teacher, torch.tensor([[0, 1, 0]]))
    assert torch.isfinite(found.plan).all()
    torch.testing.assert_close(found.plan.sum(1), torch.full((1, 3), 1 / 3))


def test_bipartite_is_the_cheapest_assignment():
    pytest.importorskip("scipy")
    sim = cosines(2, 5, 3)
    cost, config = transport_cost(sim, SCALE), CONFIG.replace(matcher="bipartite")
    plan = match(sim, SCALE, config).plan
    for b in range(2):
        best = min(itertools.permutations(range(5), 3), key=lambda rows: sum(cost[b, k, i] for i, k in enumerate(rows)))
        assert plan[b].argmax(0).tolist() == list(best)
        assert (plan[b] > 0).sum() == 3


def test_bipartite_with_more_labels_than_regions():
    pytest.importorskip("scipy")
    plan = match(cosines(1, 3, 7), SCALE, CONFIG.replace(matcher="bipartite")).plan[0]
    assert ((plan > 0).sum(0) == 1).all()  # every label has its region
    assert (plan > 0).sum(1).max() <= 3  # a region serves ⌈7/3⌉ at most


def test_average_and_reweight_by_hand():
    sim = cosines(2, 6, 4)
    torch.testing.assert_close(match(sim, SCALE, CONFIG.replace(matcher="average")).plan, torch.full((2, 6, 4), 1 / 24))
    torch.testing.assert_close(
        match(sim, SCALE, CONFIG.replace(matcher="reweight")).plan, torch.softmax(sim * SCALE, 1) / 4
    )


@pytest.mark.parametrize("name", ["paper", "reference", "ramatch"])
def test_autocast_does_not_reach_the_solver(name):
    sim, teacher, y = cosines(2, 12, 5), cosines(2, 12, 5, seed=1), targets_for(2, 5)
    expected = match(sim, 100.0, PRESETS[name], teacher, y).plan
    with torch.autocast("cpu", torch.bfloat16):
        found = match(sim, 100.0, PRESETS[name], teacher, y)
    assert found.plan.dtype == torch.float32
    torch.testing.assert_close(found.plan, expected, atol=0, rtol=0)


def test_scaling_rule_stops_the_batch_together():
    sim = torch.cat([cosines(1, 12, 5), 3 * cosines(1, 12, 5, seed=2)])
    assert len(set(match(sim, SCALE, PRESETS["reference"]).n_iter.tolist())) == 1


def test_unknown_matcher():
    with pytest.raises(RamatchError, match=r"'matcher' must be one of kcot, ot.*, got 'hungarian'"):
        CONFIG.replace(matcher="hungarian")


def test_relaxed_cosine_kcot_by_hand():
    """Preset `aligned` with a teacher: the transport problem written out, in float64 and log domain."""
    config = PRESETS["aligned"].replace(tol=1e-9, max_iter=2000)
    sim, teacher, y = cosines(2, 12, 5), cosines(2, 12, 5, seed=1), targets_for(2, 5)
    found = match(sim, SCALE, config, teacher, y).plan.double()
    guide = (teacher.double() * SCALE).softmax(-1)
    guide = torch.where(y[:, None] != 0, guide, guide.amin((1, 2), keepdim=True))
    eps = config.lambda1 + config.lambda2
    x = -((1 - sim.double()) * SCALE - config.lambda2 * guide.log()) / eps
    log_u, log_v = (sim.double().amax(-1) / 0.1).log_softmax(-1), torch.full((2, 5), 1 / 5).double().log()
    g = torch.zeros(2, 5).double()
    for _ in range(500):
        f = (log_u - (x + g[:, None]).logsumexp(-1)) * config.relax / (config.relax + eps)
        g = log_v - (x + f[..., None]).logsumexp(1)
    torch.testing.assert_close(found, (x + f[..., None] + g[:, None]).exp(), atol=1e-5, rtol=1e-3)
    # the teacher moves it, and rows do not hold
    assert (found - match(sim, SCALE, config).plan).abs().max() > 1e-3
    assert (found.sum(2) - log_u.exp()).abs().max() > 1e-3


def test_the_authors_stop_knows_no_relaxed_rows():
    with pytest.raises(RamatchError, match="stop 'scaling'"):
        preset("reference", relax=1.0)
