"""Thousands of transport problems, most of them awkward, through `solve_batch`."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ramatch import RamatchError, solve_batch
from soak.report import Soak

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
METHODS = ("auto", "exp", "log")


def run(soak: Soak) -> None:
    _numbers(soak, soak.size(10_000, 400))
    _refusals(soak)
    _gradients(soak, soak.size(200, 10))


def problem(rng: random.Random, g: torch.Generator) -> dict[str, Any]:
    """Arguments of one call, which may be sound, badly conditioned or empty."""
    batch, n, m = rng.choice((0, 1, 1, 2, 5)), rng.choice((1, 2, 7, 30)), rng.choice((1, 2, 9, 40))
    dtype = rng.choice(DTYPES)
    scale = rng.choice((1e-6, 1.0, 1.0, 1e3, 1e6 if dtype not in (torch.float16,) else 6e4))
    cost = torch.rand(batch, n, m, generator=g, dtype=torch.float64) * scale
    if rng.random() < 0.15:
        cost -= scale / 2
    if rng.random() < 0.1:
        cost = cost.round()  # ties
    found: dict[str, Any] = {
        "M": cost.to(dtype),
        "reg": rng.choice((1e-8, 1e-4, 0.01, 0.05, 1.0, 1e3)) * rng.choice((1.0, 1.0, scale)),
        "method": rng.choice(METHODS),
        "max_iter": rng.choice((1, 10, 100, 300)),
        "tol": rng.choice((1e-3, 1e-5)),
        "check_every": rng.choice((1, 5)),
    }
    if rng.random() < 0.6:
        for name, size in (("a", n), ("b", m)):
            weights = torch.rand(batch, size, generator=g, dtype=torch.float64) + 1e-3
            if size > 1 and rng.random() < 0.5:
                weights[:, torch.randperm(size, generator=g)[: size // 2]] = 0
            if rng.random() < 0.1:
                weights[:, 0] *= 1e-12
            found[name] = (weights / weights.sum(1, keepdim=True)).to(rng.choice((dtype, torch.float32)))
    start = rng.random()
    if start < 0.3:
        value = rng.choice((0.0, 1e4, -1e30, 700.0)) if start < 0.2 else rng.choice((math.nan, math.inf, -math.inf))
        v = torch.randn(batch, m, generator=g) + value
        found["potentials_init"] = (torch.zeros(batch, n), v)
    if rng.random() < 0.1 and batch:
        found["reg"] = torch.full((batch,), float(found["reg"]))
    return found


def fault(values: dict[str, Any]) -> str:
    """What is wrong with the answer to this problem; empty when nothing is."""
    try:
        result = solve_batch(**values)
    except RamatchError as error:
        return "" if len(str(error)) > 20 else f"an error that says little: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    parts = {"plan": result.plan, "u": result.potentials[0], "v": result.potentials[1], "error": result.error}
    for name, part in parts.items():
        if part.isnan().any():
            return f"NaN in {name}"
    if not result.plan.isfinite().all() or (result.plan < 0).any():
        return "a plan that is infinite or negative"
    if result.plan.shape != values["M"].shape:
        return f"a plan of shape {tuple(result.plan.shape)}"
    done = result.converged
    for name, axis in (("a", 2), ("b", 1)):
        size = values["M"].shape[1 if name == "a" else 2]
        want = values.get(name, torch.full((len(done), size), 1 / size)).double()
        gap = (result.plan.double().sum(axis) - want).abs().sum(1)
        slack = values["tol"] + rounding(values)
        if (gap[done] > slack).any():
            return f"converged, but the sums over {name} are off by {gap[done].max():.1e}, tol {values['tol']:g}"
    return ""


def rounding(values: dict[str, Any]) -> float:
    """How far sums may be off beside `tol`: weights in half precision need not have equal sums."""
    kinds = [values[name].dtype for name in ("a", "b") if name in values]
    most = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    return 2 * most + 1e-5


def _numbers(soak: Soak, count: int) -> None:
    start = time.monotonic()
    rng, g = random.Random(soak.seed), torch.Generator().manual_seed(soak.seed)
    faults: Counter[str] = Counter()
    example: dict[str, str] = {}
    for _ in range(count):
        values = problem(rng, g)
        if found := fault(values):
            kind = found.split(" off by")[0]
            faults[kind] += 1
            example.setdefault(kind, f"{found} ({describe(values)})")
    misses = [f"{n}x {example[kind]}" for kind, n in faults.most_common()]
    required = "never NaN; sums within tol where converged; or an error that says why"
    soak.check("awkward problems", required, misses, cases=count, since=start)


def describe(values: dict[str, Any]) -> str:
    """The problem in a few words, enough to look for another like it."""
    M = values["M"]
    words = [f"{tuple(M.shape)} {M.dtype}".replace("torch.", "")]
    if M.numel():
        words.append(f"cost {M.min():.3g}..{M.max():.3g}")
    words += [f"{k} {values[k]}" for k in ("reg", "method", "max_iter")]
    if "potentials_init" in values and M.numel():
        words.append(f"v from {values['potentials_init'][1].flatten()[0]:.3g}")
    words += [f"zeros in {k}" for k in ("a", "b") if k in values and (values[k] == 0).any()]
    return ", ".join(words)


def _refusals(soak: Soak) -> None:
    """What cannot be solved is refused in words."""
    start, M, misses = time.monotonic(), torch.rand(2, 3, 4), []
    nan, inf = torch.full((2, 3, 4), math.nan), torch.full((2, 3, 4), math.inf)
    wrong: list[dict[str, Any]] = [
        {"M": nan, "reg": 0.1},
        {"M": inf, "reg": 0.1},
        {"M": M, "reg": 0.0},
        {"M": M, "reg": math.nan},
        {"M": M, "reg": math.inf},
        {"M": M, "reg": -1.0},
        {"M": M.int(), "reg": 0.1},
        {"M": M[:, :0], "reg": 0.1},
        {"M": M, "reg": 0.1, "a": torch.full((2, 3), -1.0)},
        {"M": M, "reg": 0.1, "a": torch.full((2, 3), math.nan)},
        {"M": M, "reg": 0.1, "a": torch.ones(2, 5)},
        {"M": M, "reg": 0.1, "a": torch.full((3,), 9.0)},
        {"M": M, "reg": 0.1, "method": "magic"},
        {"M": M, "reg": 0.1, "max_iter": 0},
        {"M": M, "reg": 0.1, "tol": math.nan},
        {"M": M, "reg": 0.1, "potentials_init": (torch.zeros(2, 3), torch.full((2, 4), math.nan))},
    ]
    for values in wrong:
        try:
            solve_batch(**values)
            misses.append(f"taken: {describe({'method': 'auto', 'max_iter': 100, **values})}")
        except RamatchError:
            pass
        except Exception as error:
            misses.append(f"{type(error).__name__}: {error}")
    soak.check(
        "refusals", "NaN, zero reg, wrong shapes and the like: RamatchError", misses, cases=len(wrong), since=start
    )


def unrolled(M: Tensor, reg: float, a: Tensor, b: Tensor, steps: int) -> Tensor:
    """The regularised objective by a plain loop that torch differentiates."""
    u, v = torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(steps):
        u = a.log() - torch.logsumexp(v[:, None] - M / reg, 2)
        v = b.log() - torch.logsumexp(u[:, :, None] - M / reg, 1)
    plan = (u[:, :, None] + v[:, None] - M / reg).exp()
    return (plan * M).sum() + reg * torch.xlogy(plan, plan).sum()


def _gradients(soak: Soak, count: int) -> None:
    """The plan is the gradient of the objective by the cost; a result carries none of its own."""
    start, misses = time.monotonic(), []
    g = torch.Generator().manual_seed(soak.seed)
    for i in range(count):
        M = torch.rand(2, 4, 3 + i % 4, generator=g, dtype=torch.float64, requires_grad=True)
        a, b = (torch.rand(2, size, generator=g, dtype=torch.float64) + 0.1 for size in M.shape[1:])
        a, b = a / a.sum(1, keepdim=True), b / b.sum(1, keepdim=True)
        (by_cost,) = torch.autograd.grad(unrolled(M, 0.1, a, b, 300), M)
        for method in METHODS:
            result = solve_batch(M, 0.1, a, b, max_iter=3000, tol=1e-12, method=method)
            gap = (by_cost - result.plan).abs().max()
            if gap > 1e-6:
                misses.append(f"{method}: the plan differs from the gradient of an unrolled loop by {gap:.1e}")
            if result.plan.requires_grad:
                misses.append(f"{method}: the plan carries a gradient, which is not documented")
    required = "plan = d objective / d cost of an unrolled loop, to 1e-6; no gradient of its own"
    soak.check("gradients", required, misses, cases=count * len(METHODS), since=start)
