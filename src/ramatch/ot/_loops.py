"""The Sinkhorn iterations behind `solve_batch`: exp domain, log domain, and the scaling-change rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ZERO = -1e30  # stands for log 0: finite, so that 0 * log 0 and differences of potentials stay numbers
TINY = {torch.float32: 1e-30, torch.float64: 1e-290}  # denominators never fall below
CPU_BLOCK_BYTES = 1 << 22  # problems iterated together on a CPU: what stays in its cache from one pass to the next


class Problem(NamedTuple):
    """B problems in one dtype: cost (B, n, m), reg (B, 1), a (B, n), b (B, m), start (B, m) or None; power: of a row's
    update, below 1 where the rows' weights are relaxed."""

    cost: Tensor
    reg: Tensor
    a: Tensor
    b: Tensor
    start: Tensor | None
    power: float = 1.0


class Solution(NamedTuple):
    """Plan (B, n, m), log-scalings u (B, n) and v (B, m), and how each problem ended (B,)."""

    plan: Tensor
    u: Tensor
    v: Tensor
    n_iter: Tensor
    error: Tensor
    converged: Tensor


@dataclass(frozen=True)
class Control:
    """When to test and when to stop. `fixed`: run all iterations and test the last one only."""

    max_iter: int
    tol: float
    check_every: int = 1
    fixed: bool = False

    def tests(self, iteration: int) -> bool:
        return iteration == self.max_iter or (not self.fixed and iteration % self.check_every == 0)


class Tracker:
    """Per-problem state at the last test: live problems take the newest values, finished ones keep theirs.

    Only tests touch it, so iterations in between cost nothing extra and nothing waits for the host.
    """

    def __init__(self, x: Tensor, y: Tensor, control: Control) -> None:
        self.x, self.y, self.control = x, y, control
        self.error = x.new_full(x.shape[:1], float("inf"))
        self.n_iter = torch.zeros_like(self.error, dtype=torch.int64)
        self.done = torch.zeros_like(self.error, dtype=torch.bool)
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def finished(self, x: Tensor, y: Tensor, error: Tensor, iteration: int) -> bool:
        """Take in the values of an iteration; whether no problem is left to iterate."""
        done = self.done
        self.x = torch.where(done[:, None], self.x, x)
        self.y = torch.where(done[:, None], self.y, y)
        self.error = torch.where(done, self.error, error)
        self.n_iter = torch.where(done, self.n_iter, iteration)
        self.done = done | (error < self.control.tol)
        return not self.control.fixed and self._all_done()

    def _all_done(self) -> bool:
        """Whether everything is known to have finished; on CUDA the answer may be late but never waits."""
        if self.done.device.type != "cuda":
            return bool(self.done.all())
        if torch.cuda.is_current_stream_capturing():
            return False
        if self._event is None or self._host is None:
            self._host = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._event = torch.cuda.Event()
        elif not self._event.query():
            return False
        elif bool(self._host):
            return True
        self._host.copy_(self.done.all(), non_blocking=True)
        self._event.record()
        return False


def has_kernels(device: torch.device) -> bool:
    """A GPU with Triton, or the CPU under TRITON_INTERPRET=1; not while tracing, which wants plain operators."""
    if (device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1") or torch.compiler.is_compiling():
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def row_sums(K: Tensor, c: Tensor) -> Tensor:
    """K c: (B, n, m), (B, m) -> (B, n)."""
    if K.device.type == "cpu":  # a row vector times a matrix is several times faster here than matrix times column
        return torch.bmm(c.unsqueeze(1), K.transpose(1, 2)).squeeze(1)
    return (K * c.unsqueeze(1)).sum(2)  # not a matmul: TF32 would take 13 bits off K


def column_sums(K: Tensor, r: Tensor) -> Tensor:
    """K^T r: (B, n, m), (B, n) -> (B, m)."""
    if K.device.type == "cpu":
        return torch.bmm(r.unsqueeze(1), K).squeeze(1)
    return (K * r.unsqueeze(2)).sum(1)


def safe_log(x: Tensor) -> Tensor:
    """log with log 0 = ZERO."""
    return torch.where(x > 0, x, 1.0).log().masked_fill(x <= 0, ZERO)


def start_scaling(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """First column scalings (B, m), and what was taken out of their logarithms (B, 1) to keep exp in range."""
    if problem.start is None:
        return torch.ones_like(problem.b), None
    shift = problem.start.amax(1, keepdim=True)
    return (problem.start - shift).clamp(min=-60).exp(), shift


def put_back(u: Tensor, v: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-scalings of the problem as given: the shift of `start_scaling` goes back into v and out of u."""
    return (u, v) if shift is None else (u - shift, v + shift)


def row_shift(problem: Problem) -> Tensor:
    """What may be taken off each row's costs (B, n): its smallest; nothing where rows need not hold."""
    return problem.cost.amin(2) if problem.power == 1 else torch.zeros_like(problem.a)


def row_update(problem: Problem, sums: Tensor) -> Tensor:
    """Row scalings for the kernel's row sums under the column scalings."""
    r = problem.a / sums.clamp_min(TINY[sums.dtype])
    return r if problem.power == 1 else r.pow_(problem.power)


def marginal_error(problem: Problem, r: Tensor, sums: Tensor) -> Tensor:
    """(B,) mass by which the plan's rows differ from what they should have: `a`; relaxed, from the next update's."""
    wanted = problem.a if problem.power == 1 else row_update(problem, sums) * sums
    return (r * sums - wanted).abs().sum(1)


def iterate(
    K: Tensor, problem: Problem, c: Tensor, control: Control, error: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tracker:
    """r = (a / K c)^power, c = b / K^T r (Eq. 12) from column scalings c, until `error` of (r, the r before, K c) is
    small."""
    tiny, r, sums = TINY[K.dtype], torch.ones_like(problem.a), row_sums(K, c)
    state = Tracker(r, c, control)
    for iteration in range(1, control.max_iter + 1):
        before, r = r, row_update(problem, sums)
        c = problem.b / column_sums(K, r).clamp_min_(tiny)
        sums = row_sums(K, c)  # also the present plan's row marginal: a test needs no extra pass
        if control.tests(iteration) and state.finished(r, c, error(r, before, sums), iteration):
            break
    return state


def solve_exp(problem: Problem, control: Control) -> Solution:
    """On the kernel K = exp((low - cost) / reg), where low is each row's smallest cost."""
    if problem.cost.device.type == "cuda" and problem.cost.dtype == torch.float32 and has_kernels(problem.cost.device):
        from ramatch.ot._sinkhorn_triton import MAX_COLUMNS

        if problem.cost.shape[2] <= MAX_COLUMNS:
            return solve_exp_kernel(problem, control)

    def block(part: Problem, out: Tensor | None) -> Solution:
        low = row_shift(part)
        K = torch.sub(low.unsqueeze(2), part.cost, out=out).div_(part.reg.unsqueeze(2)).exp_()
        c, shift = start_scaling(part)
        # of the sums as they are: where K has underflowed, clamped ones would pretend that all is well
        state = iterate(K, part, c, control, lambda r, _, sums: marginal_error(part, r, sums))
        u, v = put_back(safe_log(state.x) + low / part.reg, safe_log(state.y), shift)
        plan = K.mul_(state.x.unsqueeze(2)).mul_(state.y.unsqueeze(1))
        return Solution(plan, u, v, state.n_iter, state.error, state.done)

    return _in_blocks(problem, block, control)


def solve_exp_kernel(problem: Problem, control: Control) -> Solution:
    """`solve_exp` in one Triton launch: one program per problem, tested after every iteration, no host in the loop."""
    from ramatch.ot import _sinkhorn_triton

    start, shift = start_scaling(problem)
    cost, reg, a, b, c = (t.contiguous() for t in (problem.cost, problem.reg.reshape(-1), problem.a, problem.b, start))
    with torch.cuda.device_of(problem.cost):
        plan, u, v, n_iter, error = _sinkhorn_triton.solve(cost, reg, a, b, c, control, power=problem.power)
    return Solution(plan, *put_back(u, v, shift), n_iter, error, error < control.tol)


def solve_log(problem: Problem, control: Control) -> Solution:
    """The same iterations on log-scalings, u = log a - LSE(v - cost / reg), for any conditioning.

    In float64 where there is one: potentials are of the size of cost / reg, and their absolute error is the
    plan's relative error.
    """
    dtype = problem.cost.dtype
    wide = dtype if problem.cost.device.type == "mps" else torch.float64

    def block(part: Problem, out: Tensor | None) -> Solution:
        reg, cost, a = part.reg.to(wide), part.cost.to(wide), part.a.to(wide)
        low = row_shift(part).to(wide)
        x = (low.unsqueeze(2) - cost).div_(reg.unsqueeze(2))
        log_a, log_b = safe_log(a), safe_log(part.b.to(wide))
        start = torch.zeros_like(log_b) if part.start is None else part.start.to(wide)
        shift = start.amax(1, keepdim=True)  # beside huge potentials the costs would be lost in rounding
        v = start - shift
        state, lse = Tracker(torch.zeros_like(log_a), v, control), torch.logsumexp(x + v.unsqueeze(1), 2)
        for iteration in range(1, control.max_iter + 1):
            u = (log_a - lse) * part.power
            v = log_b - torch.logsumexp(x + u.unsqueeze(2), 1)
            lse = torch.logsumexp(x + v.unsqueeze(1), 2)
            wanted = a if part.power == 1 else ((log_a - lse) * part.power + lse).exp()
            if control.tests(iteration) and state.finished(u, v, ((u + lse).exp() - wanted).abs().sum(1), iteration):
                break
        plan = x.add_(state.x.unsqueeze(2)).add_(state.y.unsqueeze(1)).exp_()
        # Where cost / reg has used up the digits, the plan's sums are not those of the potentials.
        wanted = a if part.power == 1 else plan.sum(2)
        gaps = torch.stack([(plan.sum(2) - wanted).abs().sum(1), (plan.sum(1) - part.b).abs().sum(1)]).amax(0)
        done = state.done & (gaps < 1.001 * control.tol + 1e-9)
        plan = plan.to(dtype) if out is None else out.copy_(plan)
        u, v = put_back(state.x + low / reg, state.y, shift)
        return Solution(plan, u.to(dtype), v.to(dtype), state.n_iter, state.error.to(dtype), done)

    return _in_blocks(problem, block, control)


def solve_scaling(problem: Problem, control: Control) -> Solution:
    """Unshifted exp-domain iterations that stop together once every problem's row scalings have settled.

    This is the rule of the authors' program: mean |r - r_prev| < tol in each problem, absolute, tested after every
    iteration; the slowest problem decides for its batch. Kept for the `reference` preset.
    """

    def slowest(r: Tensor, before: Tensor, _: Tensor) -> Tensor:
        change = (r - before).abs().mean(1)
        return change.amax().expand_as(change)

    K = (problem.cost / -problem.reg.unsqueeze(2)).exp_()
    c = torch.ones_like(problem.b) if problem.start is None else problem.start.exp()
    state = iterate(K, problem, c, control, slowest)
    r, c = state.x, state.y
    sums, tiny = row_sums(K, c), TINY[K.dtype]
    # A row or column that has underflowed settles at once, with nothing in it.
    lost = ((sums < tiny) & (problem.a > 0)).any(1) | ((column_sums(K, r) < tiny) & (problem.b > 0)).any(1)
    error = (r * sums - problem.a).abs().sum(1)
    plan = K.mul_(r.unsqueeze(2)).mul_(c.unsqueeze(1))
    return Solution(plan, safe_log(r), safe_log(c), state.n_iter, error, state.done & ~lost)


def _in_blocks(problem: Problem, block: Callable[[Problem, Tensor | None], Solution], control: Control) -> Solution:
    """Run `block` on the whole batch, or on a CPU on groups of problems small enough for its cache."""
    cost = problem.cost
    if cost.device.type != "cpu" or control.fixed:
        return block(problem, None)
    size = max(1, CPU_BLOCK_BYTES // (cost.shape[1] * cost.shape[2] * cost.element_size()))
    if size >= len(cost):
        return block(problem, None)
    plan = torch.empty_like(cost, memory_format=torch.contiguous_format)
    parts = []
    for rows in (slice(start, start + size) for start in range(0, len(cost), size)):
        start = None if problem.start is None else problem.start[rows]
        part = Problem(cost[rows], problem.reg[rows], problem.a[rows], problem.b[rows], start, problem.power)
        parts.append(block(part, plan[rows])[1:])
    return Solution(plan, *map(torch.cat, zip(*parts, strict=True)))
