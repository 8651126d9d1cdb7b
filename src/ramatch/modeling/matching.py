"""Matching regions with labels (Section 4.3). Every matcher has one signature and returns a plan whose columns each
carry 1/N of the mass; no gradient flows through a plan."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..config import RAMConfig
from ..errors import require
from ..ot import bounded, match_scores, solve_batch
from .types import Match

TRANSPORT = ("kcot", "ot")  # matchers that solve a transport problem
FLOOR = 1e-30  # smallest teacher assignment, so that its logarithm is finite


def transport_cost(sim: Tensor, scale: float, cost: str = "softmax") -> Tensor:
    """1 − softmax over labels of sim (B, M, N) · scale (Eq. 7); or "cosine", (1 − sim) · scale, which tells apart also
    what the softmax has rounded to nothing."""
    return (1 - sim) * scale if cost == "cosine" else 1 - (sim * scale).softmax(-1)


def presence(sim: Tensor, temperature: float) -> Tensor:
    """Label presence detection: region marginal ũ (B, M) from each region's best label (Eq. 8)."""
    return (sim.amax(-1) / temperature).softmax(-1)


def teacher_plan(sim: Tensor, targets: Tensor, scale: float, config: RAMConfig) -> Tensor:
    """P̃ (B, M, N) (Eq. 9): assignment of the frozen model, from its sim (B, M, N), with absent labels at the minimum
    (targets (B, N): 1 present, 0 absent, −1 not known)."""
    plan = (sim * scale).softmax(-1)
    if config.teacher == "regions":
        plan = (plan * 20).softmax(1)
    floor = plan.amin() if config.teacher_floor == "batch" else plan.amin((1, 2), keepdim=True)
    return torch.where(targets[:, None] != 0, plan, floor).clamp(min=FLOOR)


def _uniform(sim: Tensor) -> Tensor:
    return sim.new_full(sim.shape[:2], 1 / sim.shape[1])


def _transport(cost: Tensor, u: Tensor, eps: float, config: RAMConfig, cost_range: float = 1.0) -> Match:
    if config.cost == "cosine":
        cost, cost_range = bounded(cost, eps, config.relax is not None)
    rule = {"max_iter": config.max_iter, "tol": config.tol, "stop": config.stop, "relax": config.relax}
    found = solve_batch(cost, eps, u, cost_range=cost_range, **rule)  # type: ignore[arg-type]
    return Match(found.plan, u, found.n_iter)


def kcot(
    sim: Tensor, scale: float, config: RAMConfig, teacher: Tensor | None = None, targets: Tensor | None = None
) -> Match:
    """Knowledge-constrained optimal transport (Eq. 6, 10–12): LPD for regions, with a teacher TKT in the cost."""
    cost, eps, reach = transport_cost(sim, scale, config.cost), config.lambda1, 1.0
    if config.tkt and teacher is not None and targets is not None:
        guide = teacher_plan(teacher, targets, scale, config)
        cost, eps = cost - config.lambda2 * guide.log(), config.lambda1 + config.lambda2
        reach = 1 - config.lambda2 * math.log(FLOOR)
    u = presence(sim, config.tau_u or 1 / scale) if config.lpd else _uniform(sim)
    return _transport(cost, u, eps, config, reach)


def ot(sim: Tensor, scale: float, config: RAMConfig, *_: Tensor | None) -> Match:
    """Plain entropic transport between uniform marginals (Eq. 1)."""
    return _transport(transport_cost(sim, scale, config.cost), _uniform(sim), config.lambda1, config)


def bipartite(sim: Tensor, scale: float, config: RAMConfig, *guide: Tensor | None) -> Match:
    """One region per label (Kuhn, 1955). With more labels than regions, a region serves ⌈N/M⌉ labels at most."""
    assign = require("scipy.optimize", "match").linear_sum_assignment
    _, m, n = sim.shape
    cost = transport_cost(sim, scale).repeat(1, -(-n // m), 1).cpu().numpy()
    plan = torch.zeros_like(sim)
    for image, problem in enumerate(cost):
        rows, columns = assign(problem)
        plan[image, torch.as_tensor(rows % m), torch.as_tensor(columns)] = 1 / n
    return Match(plan, plan.sum(-1))


def average(sim: Tensor, scale: float, config: RAMConfig, *_: Tensor | None) -> Match:
    """Every region counts the same for every label."""
    return Match(torch.full_like(sim, 1 / (sim.shape[1] * sim.shape[2])), _uniform(sim))


def reweight(sim: Tensor, scale: float, config: RAMConfig, *_: Tensor | None) -> Match:
    """Independent softmax over regions for each label (DualCoOp)."""
    plan = (sim * scale).softmax(1) / sim.shape[2]
    return Match(plan, plan.sum(-1))


Matcher = Callable[[Tensor, float, RAMConfig, Tensor | None, Tensor | None], Match]
MATCHERS: dict[str, Matcher] = {
    "kcot": kcot,
    "ot": ot,
    "bipartite": bipartite,
    "average": average,
    "reweight": reweight,
}


def match(
    sim: Tensor, scale: float, config: RAMConfig, teacher: Tensor | None = None, targets: Tensor | None = None
) -> Match:
    """Run the configured matcher in float32 and without gradient. sim, teacher (B, M, N) cosines; targets (B, N)."""
    with torch.no_grad(), torch.autocast(sim.device.type, enabled=False):
        teacher = None if teacher is None else teacher.float()
        return MATCHERS[config.matcher](sim.detach().float(), scale, config, teacher, targets)


def on_host(config: RAMConfig) -> bool:
    """Whether matching asks the CPU (the assignment; when to stop a whole batch), so that no CUDA graph can hold it."""
    return config.matcher == "bipartite" or (config.matcher in TRANSPORT and config.stop == "scaling")


def fused_scores(config: RAMConfig) -> bool:
    """Whether `scores_without_plan` computes what the configured matcher does: transport, stopped image by image."""
    return config.matcher in TRANSPORT and config.stop != "scaling"


def scores_without_plan(
    regions: Tensor, labels: Tensor, scale: float, config: RAMConfig, best: bool, workspace_mb: int
) -> tuple[Tensor, Tensor | None]:
    """Σ_k plan · cosine (B, N), for a plan scaled by N, of unit regions (B, M, D) and labels (N, D), and each label's
    best region (B, N) if wanted; for recognizing: neither plan nor gradient."""
    uniform = config.matcher == "ot" or not config.lpd
    settings = {
        "logit_scale": scale,
        "tau_u": None if uniform else config.tau_u or 1 / scale,
        "eps": config.lambda1,
        "max_iter": config.max_iter,
        "tol": config.tol,
        "cost": config.cost,
        "relax": config.relax,
        "workspace_mb": workspace_mb,
    }
    if not best:
        return match_scores(regions=regions, labels=labels, **settings).scores, None  # type: ignore[arg-type]
    # similarities of as many images at a time as the workspace allows (with cost and temporaries)
    size = max(1, (workspace_mb << 20) // (24 * regions.shape[1] * len(labels)))
    found, top = [], []
    for part in regions.split(size):
        sim = part @ labels.T
        top.append(sim.amax(1).float())
        found.append(match_scores(sim, **settings).scores)  # type: ignore[arg-type]
    return torch.cat(found), torch.cat(top)
