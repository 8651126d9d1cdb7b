"""Batched Sinkhorn with the argument names of POT's `ot.solve_batch`.

min <P, M> - reg H(P)  subject to  P 1 = a, P^T 1 = b, P >= 0                 (Eq. 1)

Rows are updated first, then columns (Eq. 12), so a plan's column sums are exact and the error is
measured on its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ramatch.errors import RamatchError
from ramatch.ot._loops import Problem, Solution, solve_exp, solve_log, solve_scaling
from ramatch.ot.result import OTResult

METHODS = {"auto": "auto", "exp": "exp", "log": "log", "sinkhorn": "exp", "log_sinkhorn": "log"}
STOPS = ("marginal", "scaling")

# Largest (cost range of a row) / reg for which the exp domain keeps full accuracy: scalings reach exp(+-limit)
# and their products must stay inside the floating-point range with room for the weights.
EXP_LIMIT = {torch.float32: 50.0, torch.float64: 400.0}


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
) -> OTResult:
    """Solve B entropic optimal transport problems; see `OTResult` for what comes back.

    Args:
        M: (B, n, m) costs, or (n, m) for a single problem. Half precision is computed in float32, float64 is
            kept, whatever autocast says; the plan never carries a gradient.
        reg: entropic weight, a positive float or (B,) tensor.
        a: (B, n) row weights, uniform by default; (n,) is shared by all problems. Zeros are allowed.
        b: (B, m) column weights, likewise.
        max_iter: most iterations (one row and one column update each).
        tol: L1 row-marginal error at which a problem stops; with `stop="scaling"` see there.
        method: "exp" iterates on K = exp(-M / reg) with each row shifted by its smallest cost: fast; "log"
            works with log-sum-exp, in float64 where the device has it: any conditioning; "auto" takes "exp"
            unless a row's cost range exceeds 50 reg (400 reg in float64). POT's names "sinkhorn" and
            "log_sinkhorn" are understood.
        potentials_init: (u, v) to start from, as in a former `OTResult.potentials`; rows are updated first,
            so only v matters.
        check_every: iterations between two convergence tests (a GPU's kernel tests after each). A problem that
            passes is frozen there: `n_iter`, `error` and plan do not depend on its batch mates.
        fixed_iter: run exactly `max_iter` iterations without any control flow that depends on values or on
            the batch size, for CUDA graphs and export. Values are not checked, and "auto" means "log" unless
            `cost_range` is given and reg is a float.
        stop: "marginal", or "scaling": plain exp-domain iterations from scalings of one, all problems stopped
            together once mean |r - r_prev| over the whole batch falls below `tol` (tested every iteration).
        cost_range: bound on (max - min) of each row of M, known to the caller (1 for 1 - softmax). It lets
            "auto" choose without looking at M.

    Host synchronisation: on a GPU none per iteration. "auto" without `cost_range` reads one number before it
    starts. float32 exp-domain problems of up to 2,048 columns then run in one Triton kernel whose programs stop
    by themselves; elsewhere the all-converged flag is copied asynchronously and merely polled, so stopping may
    come a few iterations late, which frozen problems do not notice. Values of M, a and b (finite, non-negative,
    equal sums) are checked on the CPU only, where that is free of synchronisation.
    """
    _check_options(max_iter, method, stop, check_every)
    if not isinstance(M, Tensor) or M.dim() not in (2, 3) or not M.is_floating_point():
        raise RamatchError("solve_batch: M must be a floating-point tensor of shape (B, n, m) or (n, m)")
    single = M.dim() == 2
    with torch.no_grad(), torch.autocast(M.device.type, enabled=False):
        problem = _prepare(M.detach(), reg, a, b, potentials_init, check_values=not fixed_iter)
        if problem.cost.shape[0] == 0:
            solution = _empty(problem)
        elif stop == "scaling":
            solution = solve_scaling(problem, max_iter=max_iter, tol=tol, fixed=fixed_iter)
        else:
            domain = METHODS[method]
            if domain == "auto":
                domain = _choose(problem, reg, cost_range, fixed_iter)
            solve = solve_exp if domain == "exp" else solve_log
            solution = solve(problem, max_iter=max_iter, tol=tol, fixed=fixed_iter, check_every=check_every)
    pick = (lambda t: t[0]) if single else (lambda t: t)
    if single and isinstance(reg, Tensor):
        reg = reg.reshape(())
    return OTResult(
        plan=pick(solution.plan),
        potentials=(pick(solution.u), pick(solution.v)),
        n_iter=pick(solution.n_iter),
        error=pick(solution.error),
        converged=pick(solution.converged),
        cost=M.detach(),
        reg=reg,
    )


def _check_options(max_iter: int, method: str, stop: str, check_every: int) -> None:
    if method not in METHODS:
        raise RamatchError(f"solve_batch: unknown method '{method}', choose from {', '.join(METHODS)}")
    if stop not in STOPS:
        raise RamatchError(f"solve_batch: unknown stop '{stop}', choose from {', '.join(STOPS)}")
    if max_iter < 1 or check_every < 1:
        raise RamatchError("solve_batch: max_iter and check_every must be at least 1")


def _prepare(
    M: Tensor,
    reg: float | Tensor,
    a: Tensor | None,
    b: Tensor | None,
    init: tuple[Tensor, Tensor] | None,
    check_values: bool,
) -> Problem:
    """Bring everything to (B, ...) tensors of one dtype, and refuse what cannot be solved."""
    dtype = torch.float64 if M.dtype == torch.float64 else torch.float32
    cost = (M if M.dim() == 3 else M.unsqueeze(0)).to(dtype)
    batch, n, m = cost.shape
    if n == 0 or m == 0:
        raise RamatchError(f"solve_batch: M has shape {tuple(M.shape)}: a problem needs a row and a column")

    if isinstance(reg, Tensor):
        if reg.numel() not in (1, batch) or reg.dim() > 1:
            raise RamatchError(f"solve_batch: reg has shape {tuple(reg.shape)}, expected a float or ({batch},)")
        reg_col = reg.to(device=cost.device, dtype=dtype).reshape(-1, 1).expand(batch, 1)
    else:
        if not reg > 0:
            raise RamatchError(f"solve_batch: reg must be positive, got {reg}")
        reg_col = cost.new_full((batch, 1), float(reg))

    weights_a = _weights("a", a, (batch, n), cost)
    weights_b = _weights("b", b, (batch, m), cost)
    start = None
    if init is not None:
        if len(init) != 2:
            raise RamatchError("solve_batch: potentials_init must be a pair (u, v)")
        start = _expand("potentials_init[1]", init[1], (batch, m), cost)
    if check_values and cost.device.type == "cpu" and batch > 0 and not torch.compiler.is_compiling():
        _check_values(cost, reg_col, weights_a, weights_b)
    return Problem(cost, reg_col, weights_a, weights_b, start)


def _weights(name: str, weights: Tensor | None, shape: tuple[int, int], like: Tensor) -> Tensor:
    if weights is None:
        return like.new_full(shape, 1.0 / shape[1])
    return _expand(name, weights, shape, like)


def _expand(name: str, value: Tensor, shape: tuple[int, int], like: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise RamatchError(f"solve_batch: {name} must be a floating-point tensor")
    if value.device != like.device:
        raise RamatchError(f"solve_batch: {name} is on {value.device}, but M is on {like.device}")
    if tuple(value.shape) not in (shape, shape[1:]):
        raise RamatchError(f"solve_batch: {name} has shape {tuple(value.shape)}, expected {shape} or {shape[1:]}")
    return value.detach().to(like.dtype).expand(shape)


def _check_values(cost: Tensor, reg: Tensor, a: Tensor, b: Tensor) -> None:
    low, high = torch.aminmax(cost)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise RamatchError("solve_batch: M holds NaN or infinite costs; use a large finite cost to forbid a pair")
    if not (torch.isfinite(reg).all() and (reg > 0).all()):
        raise RamatchError("solve_batch: every reg must be positive and finite")
    for name, weights in (("a", a), ("b", b)):
        if not (torch.isfinite(weights).all() and (weights >= 0).all()):
            raise RamatchError(f"solve_batch: {name} holds negative or non-finite weights")
    mass_a, mass_b = a.sum(1), b.sum(1)
    # Loose enough for weights that were normalised in half precision; Sinkhorn's fixed point needs equality,
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
    if cost_range is not None:
        return "exp" if bool((cost_range <= limit * problem.reg).all()) else "log"
    spread = problem.cost.amax(2) - problem.cost.amin(2)
    return "exp" if bool((spread <= limit * problem.reg).all()) else "log"


def _empty(problem: Problem) -> Solution:
    cost = problem.cost
    return Solution(
        plan=torch.empty_like(cost),
        u=torch.empty_like(problem.a),
        v=torch.empty_like(problem.b),
        n_iter=cost.new_zeros(0, dtype=torch.int64),
        error=cost.new_zeros(0),
        converged=cost.new_zeros(0, dtype=torch.bool),
    )
