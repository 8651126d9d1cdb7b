"""Triton kernels: scores from similarities without a plan. (The iterations themselves: `_sinkhorn_triton.py`.)

Shapes: sim (B, M, N), contiguous, any float type. Everything else is float32 unless said otherwise: of rows (B, M) lse
(log-sum-exp of sim * scale), top (largest sim), a (weights), r (scalings), next (r of the next iteration) and gap (what
a row sum of the plan lacks); of columns (B, N) c (scalings), scores and peak; scale is one number in memory.
In these kernels K = exp((p - 1) / eps) with p = softmax over labels of sim * scale, rebuilt from `sim` and the
rows' log-sum-exp `lse` wherever one read of `sim` is all that is needed.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramatch.ot._sinkhorn_triton import TINY


@triton.jit
def _load(ptr, rows, cols, in_m, in_n, N, OTHER: tl.constexpr):
    """A tile of a matrix with N columns, as float32; OTHER outside."""
    mask = in_m[:, None] & in_n[None, :]
    return tl.load(ptr + rows[:, None] * N + cols[None, :], mask=mask, other=OTHER).to(tl.float32)


@triton.jit
def _gibbs(x, lse, scale, inv_eps):
    """K of a tile of similarities x, given its rows' log-sum-exp."""
    return tl.exp((tl.exp(x * scale - lse[:, None]) - 1.0) * inv_eps)


@triton.jit
def _update_columns(
    sim_ptr, lse_ptr, r_ptr, c_ptr, scores_ptr, image, cols, M, N, scale, inv_eps, BLOCK_M: tl.constexpr
):
    """Write an image's column scalings, with which each column sums to 1 / N, and scores, N * sum_k plan sim."""
    in_n = cols < N
    mass = tl.zeros((cols.shape[0],), dtype=tl.float32)
    moved = tl.zeros((cols.shape[0],), dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        in_m = rows < M
        x = _load(sim_ptr + image * M * N, rows, cols, in_m, in_n, N, 0.0)
        lse = tl.load(lse_ptr + image * M + rows, mask=in_m, other=0.0)
        r = tl.load(r_ptr + image * M + rows, mask=in_m, other=0.0)
        k = _gibbs(x, lse, scale, inv_eps) * r[:, None]
        mass += tl.sum(k, axis=0)
        moved += tl.sum(k * x, axis=0)
    c = (1.0 / N) / tl.maximum(mass, TINY)
    tl.store(c_ptr + image * N + cols, c, mask=in_n)
    tl.store(scores_ptr + image * N + cols, moved * c * N, mask=in_n)


@triton.jit
def _test_rows(
    sim_ptr, lse_ptr, a_ptr, r_ptr, c_ptr, next_ptr, image, rows, M, N, scale, inv_eps, BLOCK_N: tl.constexpr
):
    """How far sums of an image's rows of the plan are from a; writes their next scalings."""
    in_m = rows < M
    lse = tl.load(lse_ptr + image * M + rows, mask=in_m, other=0.0)
    sums = tl.zeros((rows.shape[0],), dtype=tl.float32)
    for first in range(0, N, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        in_n = cols < N
        x = _load(sim_ptr + image * M * N, rows, cols, in_m, in_n, N, 0.0)
        c = tl.load(c_ptr + image * N + cols, mask=in_n, other=0.0)
        sums += tl.sum(_gibbs(x, lse, scale, inv_eps) * c[None, :], axis=1)
    a = tl.load(a_ptr + image * M + rows, mask=in_m, other=0.0)
    r = tl.load(r_ptr + image * M + rows, mask=in_m, other=0.0)
    tl.store(next_ptr + image * M + rows, a / tl.maximum(sums, TINY), mask=in_m)
    return tl.abs(r * sums - a)


@triton.jit
def _rows_kernel(
    sim_ptr,
    scale_ptr,
    lse_ptr,
    top_ptr,
    count,  # B * M
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = rows < count
    scale = tl.load(scale_ptr)
    top = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = _load(sim_ptr, rows, cols, in_m, cols < N, N, -float("inf"))
        x = tl.where(in_m[:, None], x, 0.0)  # rows past the end must not become inf - inf
        new_top = tl.maximum(top, tl.max(x, axis=1))
        fresh = tl.sum(tl.exp((x - new_top[:, None]) * scale), axis=1)
        total = total * tl.exp((top - new_top) * scale) + fresh
        top = new_top
    lse = top * scale + tl.log(total)
    tl.store(lse_ptr + rows, lse, mask=in_m)
    tl.store(top_ptr + rows, top, mask=in_m)


@triton.jit
def _columns_kernel(
    sim_ptr, scale_ptr, lse_ptr, r_ptr, c_ptr, scores_ptr, M, N, inv_eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    image = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    scale = tl.load(scale_ptr)
    _update_columns(sim_ptr, lse_ptr, r_ptr, c_ptr, scores_ptr, image, cols, M, N, scale, inv_eps, BLOCK_M)


@triton.jit
def _peaks_kernel(sim_ptr, scale_ptr, lse_ptr, peak_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """peak (B, N): each label's largest p over the regions. exp does not change the order, so it comes last."""
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = cols < N
    sim_ptr += pid * M * N
    scale = tl.load(scale_ptr)
    peak = tl.full((BLOCK_N,), -float("inf"), dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        in_m = rows < M
        x = _load(sim_ptr, rows, cols, in_m, in_n, N, -float("inf"))
        lse = tl.load(lse_ptr + pid * M + rows, mask=in_m, other=0.0)
        peak = tl.maximum(peak, tl.max(x * scale - lse[:, None], axis=0))
    tl.store(peak_ptr + pid * N + cols, tl.exp(peak), mask=in_n)


@triton.jit
def _test_kernel(
    sim_ptr,
    scale_ptr,
    lse_ptr,
    a_ptr,
    r_ptr,
    c_ptr,
    next_ptr,
    gap_ptr,
    M,
    N,
    inv_eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    scale = tl.load(scale_ptr)
    gap = _test_rows(sim_ptr, lse_ptr, a_ptr, r_ptr, c_ptr, next_ptr, image, rows, M, N, scale, inv_eps, BLOCK_N)
    tl.store(gap_ptr + image * M + rows, gap, mask=rows < M)


@triton.jit
def _polish_kernel(
    sim_ptr,
    scale_ptr,
    lse_ptr,
    a_ptr,
    r_ptr,  # in and out, like c
    c_ptr,
    next_ptr,  # in, from the test, like gap
    gap_ptr,
    scores_ptr,  # rewritten where an iteration was needed
    n_iter_ptr,  # (B,) int64, iterations so far, in and out
    error_ptr,  # (B,) out: row-marginal error of the whole plan
    M,
    N,
    inv_eps,
    tol,
    max_iter,
    ALL_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where the test of the whole plan's row marginal missed `tol`, iterate over all columns."""
    image = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr)
    every = tl.arange(0, ALL_M)
    error = tl.sum(tl.load(gap_ptr + image * M + every, mask=every < M, other=0.0), axis=0)
    iteration = tl.load(n_iter_ptr + image).to(tl.int32)
    running = tl.where((error < tol) | (iteration >= max_iter), 0, 1)
    while running == 1:
        r = tl.load(next_ptr + image * M + every, mask=every < M, other=0.0)
        tl.store(r_ptr + image * M + every, r, mask=every < M)
        tl.debug_barrier()
        for start in range(0, N, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            _update_columns(sim_ptr, lse_ptr, r_ptr, c_ptr, scores_ptr, image, cols, M, N, scale, inv_eps, BLOCK_M)
        iteration += 1
        tl.debug_barrier()
        gap = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for start in range(0, M, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            gap += _test_rows(
                sim_ptr, lse_ptr, a_ptr, r_ptr, c_ptr, next_ptr, image, rows, M, N, scale, inv_eps, BLOCK_N
            )
        error = tl.sum(gap, axis=0)
        running = tl.where((error < tol) | (iteration >= max_iter), 0, 1)
        tl.debug_barrier()
    tl.store(n_iter_ptr + image, iteration)
    tl.store(error_ptr + image, error)


@dataclass(frozen=True)
class Rows:
    """What every pass over an image's K needs: sim (B, M, N), scale (1,), its rows' log-sum-exp (B, M), and eps."""

    sim: Tensor
    scale: Tensor
    lse: Tensor
    eps: float


def read_rows(sim: Tensor, scale: Tensor, eps: float) -> tuple[Rows, Tensor]:
    """The rows, and each one's largest sim (B, M)."""
    batch, regions, labels = sim.shape
    lse = torch.empty(batch, regions, device=sim.device)
    top = torch.empty_like(lse)
    block_n = min(2048, max(16, triton.next_power_of_2(labels)))
    count, block_m = batch * regions, 2048 // block_n
    grid = (triton.cdiv(count, block_m),)
    _rows_kernel[grid](sim, scale, lse, top, count, labels, BLOCK_M=block_m, BLOCK_N=block_n)
    return Rows(sim, scale, lse, eps), top


def _column_grid(batch: int, labels: int) -> tuple[tuple[int, int], dict[str, int]]:
    block_n = min(128, max(16, triton.next_power_of_2(labels)))
    return (batch, triton.cdiv(labels, block_n)), {"BLOCK_M": 32, "BLOCK_N": block_n}


def column_scores(g: Rows, r: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (B, N) and column scalings (B, N) for given row scalings; one read of sim."""
    batch, regions, labels = g.sim.shape
    c = torch.empty(batch, labels, device=g.sim.device)
    scores = torch.empty_like(c)
    grid, blocks = _column_grid(batch, labels)
    _columns_kernel[grid](g.sim, g.scale, g.lse, r, c, scores, regions, labels, 1.0 / g.eps, **blocks)
    return scores, c


def peaks(g: Rows) -> Tensor:
    """(B, N) each label's largest softmax value over the regions."""
    batch, regions, labels = g.sim.shape
    out = torch.empty(batch, labels, device=g.sim.device)
    grid, blocks = _column_grid(batch, labels)
    _peaks_kernel[grid](g.sim, g.scale, g.lse, out, regions, labels, **blocks)
    return out


def polish(g: Rows, a: Tensor, state: tuple[Tensor, Tensor, Tensor, Tensor], *, tol: float, max_iter: int) -> Tensor:
    """Error (B,) of the whole plan; iterates `state` = (r, c, scores, n_iter) in place where it is not below `tol`.

    The test is a kernel of its own, over all the chip: usually nothing is left to iterate."""
    batch, regions, labels = g.sim.shape
    r, c, scores, n_iter = state
    error, work, gap = a.new_empty(batch), torch.empty_like(a), torch.empty_like(a)
    rows = max(1, min(8, triton.next_power_of_2(regions)))
    shared = (g.sim, g.scale, g.lse, a, r, c, work, gap)
    test = _test_kernel[(batch, triton.cdiv(regions, rows))]
    test(*shared, regions, labels, 1.0 / g.eps, BLOCK_M=rows, BLOCK_N=512)
    numbers = (regions, labels, 1.0 / g.eps, tol, max_iter)
    blocks = {"ALL_M": triton.next_power_of_2(regions), "BLOCK_M": 16, "BLOCK_N": 256, "num_warps": 8}
    _polish_kernel[(batch,)](*shared, scores, n_iter, error, *numbers, **blocks)
    return error
