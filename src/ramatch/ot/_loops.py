"""The Sinkhorn iterations behind `solve_batch`: exp domain, log domain, and the scaling-change rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ramatch.ot._backend import kernels

ZERO = -1e30  # stands for log 0: finite, so that 0 * log 0 and differences of potentials stay numbers
TINY = {torch.float32: 1e-30, torch.float64: 1e-290}  # denominators never fall below
CPU_BLOCK_BYTES = 1 << 22  # problems iterated together on a CPU: what stays in its cache from one pass to the next


@dataclass(frozen=True)
class Problem:
    """B problems in one dtype: cost (B, n, m), reg (B, 1), a (B, n), b (B, m), start (B, m) or None."""

    cost: Tensor
    reg: Tensor
    a: Tensor
    b: Tensor
    start: Tensor | None

    def block(self, rows: slice) -> Problem:
        start = None if self.start is None else self.start[rows]
        return Problem(self.cost[rows], self.reg[rows], self.a[rows], self.b[rows], start)


@dataclass(frozen=True)
class Solution:
    """Plan (B, n, m), log-scalings u (B, n) and v (B, m), and how each problem ended (B,)."""

    plan: Tensor
    u: Tensor
    v: Tensor
    n_iter: Tensor
    error: Tensor
    converged: Tensor


class Tracker:
    """Per-problem state at the last test: live problems take the newest values, finished ones keep theirs.

    Only tests touch it, so iterations in between cost nothing extra and nothing waits for the host.
    """

    def __init__(self, x: Tensor, y: Tensor, tol: float) -> None:
        self.x, self.y, self.tol = x, y, tol
        self.error = x.new_full(x.shape[:1], float("inf"))
        self.n_iter = torch.zeros_like(self.error, dtype=torch.int64)
        self.done = torch.zeros_like(self.error, dtype=torch.bool)
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def update(self, x: Tensor, y: Tensor, error: Tensor, iteration: int) -> None:
        done = self.done
        self.x = torch.where(done[:, None], self.x, x)
        self.y = torch.where(done[:, None], self.y, y)
        self.error = torch.where(done, self.error, error)
        self.n_iter = torch.where(done, self.n_iter, iteration)
        self.done = done | (error < self.tol)

    def all_done(self) -> bool:
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


def gibbs_kernel(problem: Problem, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """K = exp((low - cost) / reg) and low / reg (B, n), where low is each row's smallest cost."""
    low = problem.cost.amin(2)
    K = torch.sub(low.unsqueeze(2), problem.cost, out=out)
    return K.div_(problem.reg.unsqueeze(2)).exp_(), low / problem.reg


def solve_exp(problem: Problem, *, max_iter: int, tol: float, check_every: int, fixed: bool) -> Solution:
    """Iterate r = a / K c, c = b / K^T r (Eq. 12) on the row-shifted kernel."""
    if problem.cost.device.type == "cuda" and problem.cost.dtype == torch.float32:
        module = kernels(problem.cost.device)
        if module is not None and problem.cost.shape[2] <= module.MAX_COLUMNS:
            return solve_exp_kernel(module, problem, max_iter=max_iter, tol=tol, fixed=fixed)

    def block(part: Problem, out: Tensor | None) -> Solution:
        K, low = gibbs_kernel(part, out)
        tiny = TINY[K.dtype]
        c, shift = start_scaling(part)
        state = Tracker(torch.zeros_like(part.a), c, tol)
        sums = row_sums(K, c).clamp_min_(tiny)
        for iteration in range(1, max_iter + 1):
            r = part.a / sums
            c = part.b / column_sums(K, r).clamp_min_(tiny)
            sums = row_sums(K, c).clamp_min_(tiny)
            if iteration == max_iter or (not fixed and iteration % check_every == 0):
                # The next row sums are also the present plan's row marginal: the test needs no extra pass.
                state.update(r, c, (r * sums - part.a).abs().sum(1), iteration)
                if not fixed and state.all_done():
                    break
        u, v = safe_log(state.x) + low, safe_log(state.y)
        if shift is not None:
            u, v = u - shift, v + shift
        plan = K.mul_(state.x.unsqueeze(2)).mul_(state.y.unsqueeze(1))
        return Solution(plan, u, v, state.n_iter, state.error, state.done)

    return _in_blocks(problem, block, fixed)


def solve_exp_kernel(module: ModuleType, problem: Problem, *, max_iter: int, tol: float, fixed: bool) -> Solution:
    """`solve_exp` in one Triton launch: one program per problem, tested after every iteration, no host in the loop."""
    start, shift = start_scaling(problem)
    with torch.cuda.device_of(problem.cost):
        plan, u, v, n_iter, error = module.solve(
            problem.cost.contiguous(), problem.reg.reshape(-1).contiguous(), problem.a.contiguous(), problem.b.contiguous(),
            start.contiguous(), max_iter=max_iter, tol=-1.0 if fixed else tol, log_zero=ZERO,
        )  # fmt: skip
    if shift is not None:
        u, v = u - shift, v + shift
    return Solution(plan, u, v, n_iter, error, error < tol)


def solve_log(problem: Problem, *, max_iter: int, tol: float, check_every: int, fixed: bool) -> Solution:
    """The same iterations on log-scalings, u = log a - LSE(v - cost / reg), for any conditioning.

    In float64 where there is one: potentials are of the size of cost / reg, and their absolute error is the
    plan's relative error.
    """
    dtype = problem.cost.dtype
    wide = dtype if problem.cost.device.type == "mps" else torch.float64

    def block(part: Problem, out: Tensor | None) -> Solution:
        reg = part.reg.to(wide)
        cost = part.cost.to(wide)
        low = cost.amin(2)
        x = (low.unsqueeze(2) - cost).div_(reg.unsqueeze(2))
        a = part.a.to(wide)
        log_a, log_b = safe_log(a), safe_log(part.b.to(wide))
        v = torch.zeros_like(log_b) if part.start is None else part.start.to(wide)
        state = Tracker(torch.zeros_like(log_a), v, tol)
        lse = torch.logsumexp(x + v.unsqueeze(1), 2)
        for iteration in range(1, max_iter + 1):
            u = log_a - lse
            v = log_b - torch.logsumexp(x + u.unsqueeze(2), 1)
            lse = torch.logsumexp(x + v.unsqueeze(1), 2)
            if iteration == max_iter or (not fixed and iteration % check_every == 0):
                state.update(u, v, ((u + lse).exp() - a).abs().sum(1), iteration)
                if not fixed and state.all_done():
                    break
        u, v = state.x, state.y
        plan = x.add_(u.unsqueeze(2)).add_(v.unsqueeze(1)).exp_()
        plan = plan.to(dtype) if out is None else out.copy_(plan)
        u = u + low / reg
        return Solution(plan, u.to(dtype), v.to(dtype), state.n_iter, state.error.to(dtype), state.done)

    return _in_blocks(problem, block, fixed)


def solve_scaling(problem: Problem, *, max_iter: int, tol: float, fixed: bool) -> Solution:
    """Unshifted exp-domain iterations that stop together when the mean change of the row scalings is small.

    This is the rule of the authors' program: mean over the whole batch of |r - r_prev| < tol, absolute, so
    how far one problem gets depends on its batch. Kept for the `reference` preset.
    """
    K = (problem.cost / -problem.reg.unsqueeze(2)).exp_()
    tiny = torch.finfo(K.dtype).tiny
    r, c = torch.ones_like(problem.a), torch.ones_like(problem.b)
    if problem.start is not None:
        c = problem.start.exp()
    state = Tracker(r.reshape(1, -1), c.reshape(1, -1), tol)  # one "problem": the whole batch
    for iteration in range(1, max_iter + 1):
        previous = r
        r = problem.a / row_sums(K, c).clamp_min_(tiny)
        c = problem.b / column_sums(K, r).clamp_min_(tiny)
        if fixed and iteration < max_iter:
            continue
        state.update(r.reshape(1, -1), c.reshape(1, -1), (r - previous).abs().mean().reshape(1), iteration)
        if not fixed and state.all_done():
            break
    r, c = state.x.reshape(r.shape), state.y.reshape(c.shape)
    error = (r * row_sums(K, c) - problem.a).abs().sum(1)
    plan = K.mul_(r.unsqueeze(2)).mul_(c.unsqueeze(1))
    batch = r.shape[0]
    return Solution(plan, safe_log(r), safe_log(c), state.n_iter.repeat(batch), error, state.done.repeat(batch))


def _in_blocks(problem: Problem, block: Callable[[Problem, Tensor | None], Solution], fixed: bool) -> Solution:
    """Run `block` on the whole batch, or on a CPU on groups of problems small enough for its cache."""
    cost = problem.cost
    if cost.device.type != "cpu" or fixed:
        return block(problem, None)
    batch = cost.shape[0]
    size = max(1, CPU_BLOCK_BYTES // max(1, cost[0].numel() * cost.element_size()))
    if size >= batch:
        return block(problem, None)
    plan = torch.empty_like(cost, memory_format=torch.contiguous_format)
    parts = []
    for start in range(0, batch, size):
        rows = slice(start, start + size)
        parts.append(block(problem.block(rows), plan[rows]))
    joined = (torch.cat([getattr(p, name) for p in parts]) for name in ("u", "v", "n_iter", "error", "converged"))
    return Solution(plan, *joined)
