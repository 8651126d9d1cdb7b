"""Triton kernels: Sinkhorn with one program per problem, from costs to plans.

Nothing here talks to the host while it iterates: every program tests its own problem's row marginal, which falls out
of the next row update for free, and leaves its loop when it is met.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramatch.ot import _loops

TINY = tl.constexpr(_loops.TINY[torch.float32])
LOG_ZERO = tl.constexpr(_loops.ZERO)
MAX_COLUMNS = 2048  # columns one program keeps in registers
WHOLE_NUMBERS = 16384  # of a K that stays in registers, 64 in each thread; with 128 the other way was faster
LATE_COLUMNS = 128  # up to which columns are summed over threads once per iteration (LATE)


@triton.jit
def _update(a, sums, POWER: tl.constexpr):
    """Row scalings of weights a for row sums of K c, and what the plan's rows should hold then."""
    r = a / tl.maximum(sums, TINY)
    wanted = a
    if POWER != 1:
        r = tl.exp(POWER * tl.log(tl.maximum(r, TINY)))
        wanted = r * sums
    return r, wanted


@triton.jit
def _iterate(
    K_ptr,  # (M, width) this program's K
    a_ptr,  # (M,)
    work_ptr,  # (2, M) row scalings: of the last iteration at iteration % 2, of the next at the other place
    c,  # column scalings, of as many columns as a tile has, like weight
    weight,
    M,
    width,
    tol,
    max_iter,
    POWER: tl.constexpr,
    LATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Iterate, from the second iteration on, on a K in memory until the row error is below `tol`: column scalings,
    iterations in all, error. LATE: columns are summed over threads once per iteration instead of once per tile, at the
    price of a tile of registers."""
    BLOCK_N: tl.constexpr = c.shape[0]
    cols = tl.arange(0, BLOCK_N)
    iteration = 1
    error = 0.0
    running = 1
    while running == 1:
        last = work_ptr + (iteration % 2) * M
        here = work_ptr + ((iteration + 1) % 2) * M
        column_sums = tl.zeros((BLOCK_N,), dtype=tl.float32)
        if LATE:
            tile_sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        errors = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for start in tl.range(0, M, BLOCK_M, num_stages=STAGES):
            rows = start + tl.arange(0, BLOCK_M)
            in_m = rows < M
            inside = in_m[:, None] & (cols < width)[None, :]
            k = tl.load(K_ptr + rows[:, None] * width + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            a = tl.load(a_ptr + rows, mask=in_m, other=0.0)
            sums = tl.sum(k * c[None, :], axis=1)
            r, wanted = _update(a, sums, POWER)
            # Row sums of the plan that the last iteration left.
            errors += tl.abs(tl.load(last + rows, mask=in_m, other=0.0) * sums - wanted)
            tl.store(here + rows, r, mask=in_m)
            if LATE:
                tile_sums += k * r[:, None]
            else:
                column_sums += tl.sum(k * r[:, None], axis=0)
        if LATE:
            column_sums = tl.sum(tile_sums, axis=0)
        error = tl.sum(errors, axis=0)
        stop = (error < tol) | (iteration == max_iter)
        c = tl.where(stop, c, weight / tl.maximum(column_sums, TINY))
        iteration = tl.where(stop, iteration, iteration + 1)
        running = tl.where(stop, 0, 1)
        tl.debug_barrier()  # `here` is read by other threads of this program in the next round
    return c, iteration, error


@triton.jit
def _log(x):
    """log with log 0 = LOG_ZERO."""
    return tl.where(x > 0, tl.log(tl.where(x > 0, x, 1.0)), LOG_ZERO)


@triton.jit
def _gibbs(cost_ptr, rows, cols, M, N, inv_reg, POWER: tl.constexpr):
    """Of a tile: K, zero outside, and what was taken off its rows' costs, the smallest of each (see `row_shift`)."""
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    x = tl.load(cost_ptr + rows[:, None] * N + cols[None, :], mask=inside, other=float("inf"))
    low = tl.where(rows < M, tl.min(x, axis=1), 0.0)
    if POWER != 1:
        low = tl.zeros_like(low)
    return tl.exp((low[:, None] - x) * inv_reg), low


@triton.jit
def _registers_kernel(
    cost_ptr,  # (B, M, N)
    reg_ptr,  # (B,)
    a_ptr,  # (B, M)
    b_ptr,  # (B, N)
    c_ptr,  # (B, N) first column scalings
    plan_ptr,  # (B, M, N) out
    u_ptr,  # (B, M) out: log-scalings
    v_ptr,  # (B, N) out
    n_iter_ptr,  # (B,) int64 out
    error_ptr,  # (B,) out
    M,
    N,
    tol,
    max_iter,
    POWER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One problem, from its costs to its plan; K stays in registers."""
    pid = tl.program_id(0).to(tl.int64)
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    in_m, in_n = rows < M, cols < N
    inv_reg = 1.0 / tl.load(reg_ptr + pid)
    k, low = _gibbs(cost_ptr + pid * M * N, rows, cols, M, N, inv_reg, POWER)
    a = tl.load(a_ptr + pid * M + rows, mask=in_m, other=0.0)
    weight = tl.load(b_ptr + pid * N + cols, mask=in_n, other=0.0)
    c = tl.load(c_ptr + pid * N + cols, mask=in_n, other=0.0)
    sums = tl.sum(k * c[None, :], axis=1)
    r, error = a, 0.0
    iteration, running = 0, 1
    while running == 1:
        r, _ = _update(a, sums, POWER)
        c = weight / tl.maximum(tl.sum(k * r[:, None], axis=0), TINY)
        sums = tl.sum(k * c[None, :], axis=1)
        _, wanted = _update(a, sums, POWER)
        error = tl.sum(tl.abs(r * sums - wanted), axis=0)
        iteration += 1
        running = tl.where((error < tol) | (iteration == max_iter), 0, 1)
    plan_ptr += pid * M * N + rows[:, None] * N + cols[None, :]
    tl.store(plan_ptr, k * r[:, None] * c[None, :], mask=in_m[:, None] & in_n[None, :])
    tl.store(u_ptr + pid * M + rows, _log(r) + low * inv_reg, mask=in_m)
    tl.store(v_ptr + pid * N + cols, _log(c), mask=in_n)
    tl.store(n_iter_ptr + pid, iteration)
    tl.store(error_ptr + pid, error)


@triton.jit
def _memory_kernel(
    cost_ptr,  # arguments as those of _registers_kernel, and room for
    reg_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    K_ptr,  # (B, M, width) K, with rows that start at aligned places
    work_ptr,  # (B, 3, M) row scalings of this and the last iteration, and the rows' shifts
    plan_ptr,
    u_ptr,
    v_ptr,
    n_iter_ptr,
    error_ptr,
    M,
    N,
    width,
    tol,
    max_iter,
    POWER: tl.constexpr,
    LATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One problem, from its costs to its plan; K is written once and read in every iteration."""
    pid = tl.program_id(0).to(tl.int64)
    K_ptr, work_ptr, a_ptr = K_ptr + pid * M * width, work_ptr + pid * 3 * M, a_ptr + pid * M
    inv_reg = 1.0 / tl.load(reg_ptr + pid)
    cols = tl.arange(0, BLOCK_N)
    in_n, column_sums = cols < N, tl.zeros((BLOCK_N,), dtype=tl.float32)
    c = tl.load(c_ptr + pid * N + cols, mask=in_n, other=0.0)
    weight = tl.load(b_ptr + pid * N + cols, mask=in_n, other=0.0)
    for start in range(0, M, BLOCK_M):  # the first iteration makes K
        rows = start + tl.arange(0, BLOCK_M)
        in_m = rows < M
        k, low = _gibbs(cost_ptr + pid * M * N, rows, cols, M, N, inv_reg, POWER)
        tl.store(K_ptr + rows[:, None] * width + cols[None, :], k, mask=in_m[:, None] & (cols < width)[None, :])
        a = tl.load(a_ptr + rows, mask=in_m, other=0.0)
        r, _ = _update(a, tl.sum(k * c[None, :], axis=1), POWER)
        tl.store(work_ptr + M + rows, r, mask=in_m)
        tl.store(work_ptr + 2 * M + rows, low * inv_reg, mask=in_m)
        column_sums += tl.sum(k * r[:, None], axis=0)
    c = weight / tl.maximum(column_sums, TINY)
    tl.debug_barrier()  # what one thread wrote others of this program read
    c, iteration, error = _iterate(
        K_ptr, a_ptr, work_ptr, c, weight, M, width, tol, max_iter, POWER, LATE, BLOCK_M, STAGES
    )
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        in_m = rows < M
        inside = in_m[:, None] & in_n[None, :]
        k = tl.load(K_ptr + rows[:, None] * width + cols[None, :], mask=inside, other=0.0)
        r = tl.load(work_ptr + (iteration % 2) * M + rows, mask=in_m, other=0.0)
        plan = plan_ptr + pid * M * N + rows[:, None] * N + cols[None, :]
        tl.store(plan, k * r[:, None] * c[None, :], mask=inside)
        shift = tl.load(work_ptr + 2 * M + rows, mask=in_m, other=0.0)
        tl.store(u_ptr + pid * M + rows, _log(r) + shift, mask=in_m)
    tl.store(v_ptr + pid * N + cols, _log(c), mask=in_n)
    tl.store(n_iter_ptr + pid, iteration)
    tl.store(error_ptr + pid, error)


def padded(columns: int) -> int:
    """Columns a kernel row is stored with: whole 16s, so that loads are wide and aligned."""
    return (columns + 15) // 16 * 16


def default_tile(rows: int, width: int) -> dict[str, int]:
    """Tile of the Sinkhorn kernel: 8,192 numbers, 32 registers of a thread, so that two programs share an SM (twice
    that for small batches was slower)."""
    numbers = 8192
    block_n = max(16, triton.next_power_of_2(width))
    block_m = max(1, min(numbers // block_n, triton.next_power_of_2(rows)))
    warps = 4 if block_m * block_n < 4096 else numbers // 1024
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": 3, "num_warps": warps}


def default_way(rows: int, columns: int) -> dict[str, int]:
    """How `solve` runs: the tile of `_registers_kernel` where K fits into registers, else that of `_memory_kernel`."""
    block_m, block_n = triton.next_power_of_2(rows), max(16, triton.next_power_of_2(columns))
    if block_m * block_n <= WHOLE_NUMBERS:
        return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": max(4, block_m * block_n // 2048)}
    if block_n <= LATE_COLUMNS:
        return {"LATE": True, "BLOCK_M": min(64, block_m), "BLOCK_N": block_n, "STAGES": 1, "num_warps": 16}
    return {"LATE": False, **default_tile(rows, padded(columns))}


def solve(
    cost: Tensor,
    reg: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    control: _loops.Control,
    *,
    power: float = 1.0,
    way: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Plan (B, M, N), log-scalings u (B, M) and v (B, N), n_iter (B,), error (B,) of costs (B, M, N) with N <= 2048.

    All float32 and contiguous; reg (B,), weights a (B, M) and b (B, N), first column scalings c (B, N). power: of a
    row's update. `way`: see `default_way`.
    """
    batch, rows, columns = cost.shape
    way, width = way or default_way(rows, columns), padded(columns)
    plan, u, v, error = torch.empty_like(cost), torch.empty_like(a), torch.empty_like(b), a.new_empty(batch)
    n_iter = torch.empty(batch, dtype=torch.int64, device=cost.device)
    given, out = (cost, reg, a, b, c), (plan, u, v, n_iter, error)
    rule = (-1.0 if control.fixed else control.tol, control.max_iter, power)
    if batch and "LATE" in way:
        room = (cost.new_empty(batch, rows, width), a.new_empty(batch, 3, rows))
        _memory_kernel[(batch,)](*given, *room, *out, rows, columns, width, *rule, **way)
    elif batch:
        _registers_kernel[(batch,)](*given, *out, rows, columns, *rule, **way)
    return out
