"""Batched Sinkhorn with the argument names of POT's `ot.solve_batch`.

min <P, M> - reg H(P)  subject to  P 1 = a, P^T 1 = b, P >= 0                 (Eq. 1)

or, with `relax`, without P 1 = a but + relax KL(P 1 | a) (as `reg_m` in POT's `ot.unbalanced`).

Rows are updated first, then columns (Eq. 12), so a plan's column sums are exact and the error is
measured on its rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ramatch.config import STOPS
from ramatch.errors import RamatchError
from ramatch.ot._loops import Control, Problem, Solution, row_shift, solve_exp, solve_log, solve_scaling

METHODS = {"auto": "auto", "exp": "exp", "log": "log", "sinkhorn": "exp", "log_sinkhorn": "log"}

# Largest (cost range of a row) / reg for which the exp domain keeps full accuracy: scalings reach exp(+-limit)
# and their products must stay inside the floating-point range with room for the weights.
EXP_LIMIT = {torch.float32: 50.0, torch.float64: 400.0}


@dataclass(frozen=True)
class OTResult:
    """Solution of B entropic transport problems (the leading axis is absent if the cost had none).

    `potentials` follow POT (`ot.solve`, `ot.solve_batch`): logarithms of the scalings, so that
    `plan = exp(u[:, :, None] + v[:, None, :] - cost / reg)`. A zero weight has the finite potential -1e30,
    which exp turns into an exact zero.
    """

    plan: Tensor  # (B, n, m); its columns sum to `b` exactly, its rows to `a` up to `error`
    potentials: tuple[Tensor, Tensor]  # (B, n) and (B, m) log-scalings u, v
    n_iter: Tensor  # (B,) int64, iterations after which each problem stopped
    error: Tensor  # (B,) L1 distance between the plan's row sums and `a`
    converged: Tensor  # (B,) bool, whether the stopping rule was met within `max_iter` iterations
    cost: Tensor  # (B, n, m) as given
    reg: float | Tensor  # entropic weight, or (B,) of them

    @property
    def value_linear(self) -> Tensor:
        """(B,) transport cost <plan, cost>."""
        return (self.plan * self.cost).sum((-2, -1))

    @property
    def value(self) -> Tensor:
        """(B,) regularized objective <plan, cost> - reg H(plan), with 0 log 0 = 0."""
        return self.value_linear + self.reg * torch.xlogy(self.plan, self.plan).sum((-2, -1))


def solve_batch(
    M: Tensor,
    reg: float | Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    max_iter: int = 100,
    tol: float = 1e-5,
    method: str = "auto",
    potentials_init: tuple[Tensor, Tensor] | None = None,
    check_every: int = 5,
    fixed_iter: bool = False,
    stop: str = "marginal",
    cost_range: float | None = None,
    relax: float | None = None,
) -> OTResult:
    """Solve B entropic optimal transport problems; see `OTResult` for what comes back.

    Args:
        M: (B, n, m) costs, or (n, m) for a single problem. Half precision is computed in float32, float64 is
            kept, whatever autocast says; the plan never carries a gradient. B may be 0.
        reg: entropic weight, a positive float or (B,) tensor.
        a, b: (B, n) row and (B, m) column weights, uniform by default; (n,), (m,) are shared by all. Zeros are allowed.
        max_iter: most iterations (one row and one column update each).
        tol: L1 row-marginal error at which a problem stops; with `stop="scaling"` see there.
        method: "exp" iterates on K = exp(-M / reg) with each row shifted by its smallest cost: fast; "log"
            works with log-sum-exp, in float64 where the device has it: any conditioning; "auto" takes "exp"
            unless a row's cost range exceeds 50 reg (400 reg in float64). "exp" beyond that range underflows, and
            what is lost shows in `error` and `converged`. POT's "sinkhorn" and "log_sinkhorn" are understood.
        potentials_init: (u, v) to start from, as in a former `OTResult.potentials`; rows are updated first,
            so only v matters.
        check_every: iterations between two convergence tests (a GPU's kernel tests after each). A problem that
            passes is frozen there: `n_iter`, `error` and plan do not depend on its batch mates.
        fixed_iter: run exactly `max_iter` iterations without any control flow that depends on values or on
            the batch size, for CUDA graphs and export. "auto" then means "log" unless `cost_range` and a float
            reg are given.
        stop: "marginal", or "scaling": plain exp-domain iterations from scalings of one, all problems stopped
            together once mean |r - r_prev| is below `tol` in every one of them (tested every iteration).
        cost_range: bound on (max - min) of each row of M (with `relax`, of all M), known to the caller (1 for
            1 - softmax). It lets "auto" choose without looking at M.
        relax: weight of KL(P 1 | a) in place of P 1 = a, beside a float reg; None: rows hold. The smaller, the fewer
            iterations (each leaves relax / (relax + reg) of the error); `error` is the mass that the next would move.

    On a GPU nothing synchronizes with the host, except that "auto" without `cost_range` reads one number before it
    starts: float32 exp-domain problems of up to 2,048 columns run in one Triton kernel, elsewhere the all-converged
    flag is merely polled, so stopping may come late, which frozen problems do not notice. Values (finite, weights
    non-negative and of equal sums) are checked on the CPU only, where that costs no synchronization.
    """
    _check_options(max_iter, tol, method, stop, check_every)
    if relax is not None and (not relax > 0 or isinstance(reg, Tensor) or stop == "scaling"):
        raise RamatchError("solve_batch: relax must be positive, and goes with a float reg and stop 'marginal'")
    if not isinstance(M, Tensor) or M.dim() not in (2, 3) or not M.is_floating_point():
        raise RamatchError("solve_batch: M must be a floating-point tensor of shape (B, n, m) or (n, m)")
    with torch.no_grad(), torch.autocast(M.device.type, enabled=False):
        problem = prepare(M.detach(), reg, a, b, potentials_init)
        if not fixed_iter and M.device.type == "cpu" and len(problem.cost) and not torch.compiler.is_compiling():
            _check_values(problem, balanced=relax is None)
        low = problem.cost.amin((1, 2), keepdim=True) if relax is not None and len(problem.cost) else None
        if low is not None:  # a row's own smallest cost must not be taken off where the row need not hold
            assert relax is not None
            problem = problem._replace(cost=problem.cost - low, power=relax / (relax + float(reg)))
        control = Control(max_iter, tol, 1 if stop == "scaling" else check_every, fixed_iter)
        if stop == "scaling" and problem.cost.shape[0] > 0:
            found = solve_scaling(problem, control)
        else:
            domain = METHODS[method] if method != "auto" else _choose(problem, reg, cost_range, fixed_iter)
            found = (solve_exp if domain == "exp" else solve_log)(problem, control)
        if low is not None:
            found = found._replace(v=found.v + low.squeeze(2) / problem.reg)
    if M.dim() == 2:
        found = Solution(*(t[0] for t in found))
        reg = reg.reshape(()) if isinstance(reg, Tensor) else reg
    plan, u, v, n_iter, error, converged = found
    return OTResult(plan, (u, v), n_iter, error, converged, M.detach(), reg)


def _check_options(max_iter: int, tol: float, method: str, stop: str, check_every: int) -> None:
    if method not in METHODS:
        raise RamatchError(f"solve_batch: unknown method '{method}', choose from {', '.join(METHODS)}")
    if stop not in STOPS:
        raise RamatchError(f"solve_batch: unknown stop '{stop}', choose from {', '.join(STOPS)}")
    if max_iter < 1 or check_every < 1 or math.isnan(tol):
        raise RamatchError("solve_batch: max_iter and check_every must be at least 1, and tol a number")


def prepare(
    M: Tensor, reg: float | Tensor, a: Tensor | None, b: Tensor | None, init: tuple[Tensor, Tensor] | None
) -> Problem:
    """Bring everything to (B, ...) tensors of one dtype, and refuse shapes that do not fit."""
    dtype = torch.float64 if M.dtype == torch.float64 else torch.float32
    cost = (M if M.dim() == 3 else M.unsqueeze(0)).to(dtype)
    batch, n, m = cost.shape
    if n == 0 or m == 0:
        raise RamatchError(f"solve_batch: M has shape {tuple(M.shape)}: a problem needs a row and a column")
    if isinstance(reg, Tensor):
        if reg.numel() not in (1, batch) or reg.dim() > 1:
            raise RamatchError(f"solve_batch: reg has shape {tuple(reg.shape)}, expected a float or ({batch},)")
        reg_column = reg.to(device=cost.device, dtype=dtype).reshape(-1, 1).expand(batch, 1)
    else:
        if not reg > 0:
            raise RamatchError(f"solve_batch: reg must be positive, got {reg}")
        reg_column = cost.new_full((batch, 1), float(reg))
    if init is not None and len(init) != 2:
        raise RamatchError("solve_batch: potentials_init must be a pair (u, v)")
    start = None if init is None else _expand("potentials_init[1]", init[1], (batch, m), cost)
    return Problem(cost, reg_column, _expand("a", a, (batch, n), cost), _expand("b", b, (batch, m), cost), start)


def _expand(name: str, value: Tensor | None, shape: tuple[int, int], like: Tensor) -> Tensor:
    """`value` of shape (B, k), or (k,) for all problems, as (B, k); None is uniform weights."""
    if value is None:
        return like.new_full(shape, 1.0 / shape[1])
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise RamatchError(f"solve_batch: {name} must be a floating-point tensor")
    if value.device != like.device:
        raise RamatchError(f"solve_batch: {name} is on {value.device}, but M is on {like.device}")
    if tuple(value.shape) not in (shape, shape[1:]):
        raise RamatchError(f"solve_batch: {name} has shape {tuple(value.shape)}, expected {shape} or {shape[1:]}")
    return value.detach().to(like.dtype).expand(shape)


def _check_values(problem: Problem, balanced: bool = True) -> None:
    low, high = torch.aminmax(problem.cost)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise RamatchError("solve_batch: M holds NaN or infinite costs; use a large finite cost to forbid a pair")
    if not (torch.isfinite(problem.reg).all() and (problem.reg > 0).all()):
        raise RamatchError("solve_batch: every reg must be positive and finite")
    if problem.start is not None and not torch.isfinite(problem.start).all():
        raise RamatchError("solve_batch: potentials_init[1] holds NaN or infinite values; start without it")
    for name, weights in (("a", problem.a), ("b", problem.b)):
        if not (torch.isfinite(weights).all() and (weights >= 0).all()):
            raise RamatchError(f"solve_batch: {name} holds negative or non-finite weights")
    if not balanced:
        return
    mass_a, mass_b = problem.a.sum(1), problem.b.sum(1)
    # Loose enough for weights that were normalized in half precision; Sinkhorn's fixed point needs equality,
    # but a rounding difference only shows up in `error`.
    bad = (mass_a - mass_b).abs() > 1e-2 * torch.maximum(mass_a, mass_b)
    if bad.any():
        i = int(bad.nonzero()[0])
        raise RamatchError(
            f"solve_batch: weights of problem {i} do not match: a sums to {mass_a[i]:.6g}, b to {mass_b[i]:.6g}"
        )


def _choose(problem: Problem, reg: float | Tensor, cost_range: float | None, fixed: bool) -> str:
    """Domain by conditioning. Reads one number from the device unless `cost_range` and a float reg settle it."""
    limit = EXP_LIMIT[problem.cost.dtype]
    if cost_range is not None and not isinstance(reg, Tensor):
        return "exp" if cost_range <= limit * reg else "log"
    if fixed:
        return "log"
    spread = problem.cost.amax(2) - row_shift(problem) if cost_range is None else cost_range
    return "exp" if bool((spread <= limit * problem.reg).all()) else "log"
