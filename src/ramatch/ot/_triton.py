"""Triton kernels: scores from similarities without a plan. (The iterations themselves: `_sinkhorn_triton.py`.)

Shapes: sim (B, M, N), contiguous, any float type; everything else float32 unless said otherwise.
In these kernels K = exp((p - 1) / eps) with p = softmax over labels of sim * scale, rebuilt from `sim` and the
rows' log-sum-exp `lse` wherever one read of `sim` is all that is needed.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramatch.ot._sinkhorn_triton import HALF_LIMIT, MAX_COLUMNS, TINY, default_tile, padded, sinkhorn, solve

__all__ = [
    "HALF_LIMIT", "MAX_COLUMNS", "columns", "default_tile", "gather", "padded", "peaks", "polish", "rows", "sinkhorn", "solve",
]  # fmt: skip


@triton.jit
def _rows_kernel(
    sim_ptr,
    scale_ptr,  # one float32
    lse_ptr,  # (B * M,) out: log-sum-exp of sim * scale
    top_ptr,  # (B * M,) out: largest sim
    K_ptr,  # (B * M, width) out, if WRITE_K: K times exp(shift), zero in the padding
    count,  # B * M
    N,
    width,
    inv_eps,
    shift,
    WRITE_K: tl.constexpr,
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
        mask = in_m[:, None] & (cols < N)[None, :]
        x = tl.load(sim_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=-float("inf")).to(tl.float32)
        x = tl.where(in_m[:, None], x, 0.0)  # rows past the end must not become inf - inf
        new_top = tl.maximum(top, tl.max(x, axis=1))
        fresh = tl.sum(tl.exp((x - new_top[:, None]) * scale), axis=1)
        total = total * tl.exp((top - new_top) * scale) + fresh
        top = new_top
    lse = top * scale + tl.log(total)
    tl.store(lse_ptr + rows, lse, mask=in_m)
    tl.store(top_ptr + rows, top, mask=in_m)
    if WRITE_K:
        for start in range(0, width, BLOCK_N):
            cols = start + tl.arange(0, BLOCK_N)
            mask = in_m[:, None] & (cols < N)[None, :]
            x = tl.load(sim_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            p = tl.exp(x * scale - lse[:, None])
            k = tl.where(mask, tl.exp((p - 1.0) * inv_eps + shift), 0.0)
            mask = in_m[:, None] & (cols < width)[None, :]
            tl.store(K_ptr + rows[:, None] * width + cols[None, :], k.to(K_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _columns_kernel(
    sim_ptr,
    scale_ptr,
    lse_ptr,
    r_ptr,  # (B, M)
    c_ptr,  # (B, N) out: column scalings, so that columns sum to 1 / N
    scores_ptr,  # (B, N) out: gain * sum_k plan[k, i] sim[k, i]
    M,
    N,
    inv_eps,
    weight,  # 1 / N
    gain,
    tiny,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = cols < N
    sim_ptr += pid * M * N
    scale = tl.load(scale_ptr)
    mass = tl.zeros((BLOCK_N,), dtype=tl.float32)
    moved = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        in_m = rows < M
        x = tl.load(sim_ptr + rows[:, None] * N + cols[None, :], mask=in_m[:, None] & in_n[None, :], other=0.0).to(
            tl.float32
        )
        lse = tl.load(lse_ptr + pid * M + rows, mask=in_m, other=0.0)
        r = tl.load(r_ptr + pid * M + rows, mask=in_m, other=0.0)
        k = tl.exp((tl.exp(x * scale - lse[:, None]) - 1.0) * inv_eps) * r[:, None]
        mass += tl.sum(k, axis=0)
        moved += tl.sum(k * x, axis=0)
    c = weight / tl.maximum(mass, tiny)
    tl.store(c_ptr + pid * N + cols, c, mask=in_n)
    tl.store(scores_ptr + pid * N + cols, moved * c * gain, mask=in_n)


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
        x = tl.load(
            sim_ptr + rows[:, None] * N + cols[None, :], mask=in_m[:, None] & in_n[None, :], other=-float("inf")
        ).to(tl.float32)
        lse = tl.load(lse_ptr + pid * M + rows, mask=in_m, other=0.0)
        peak = tl.maximum(peak, tl.max(x * scale - lse[:, None], axis=0))
    tl.store(peak_ptr + pid * N + cols, tl.exp(peak), mask=in_n)


@triton.jit
def _gather_kernel(
    sim_ptr,  # (B, M, N)
    scale_ptr,
    lse_ptr,  # (B * M,)
    kept_ptr,  # (B, kept) int64, columns that stay
    K_ptr,  # (B * M, width) out: K of those, then of the mean of the others; zero in the padding
    M,
    N,
    kept,
    width,
    inv_eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    here = cols < kept
    scale = tl.load(scale_ptr)
    lse = tl.load(lse_ptr + row)
    which = tl.load(kept_ptr + (row // M) * kept + cols, mask=here, other=0)
    x = tl.load(sim_ptr + row * N + which, mask=here, other=0.0).to(tl.float32)
    p = tl.where(here, tl.exp(x * scale - lse), 0.0)
    rest = tl.maximum(1.0 - tl.sum(p, axis=0), 0.0) / (N - kept)  # a softmax sums to one
    p = tl.where(here, p, rest)
    k = tl.where(cols <= kept, tl.exp((p - 1.0) * inv_eps), 0.0)
    tl.store(K_ptr + row * width + cols, k, mask=cols < width)


@triton.jit
def _test_kernel(
    sim_ptr,
    scale_ptr,
    lse_ptr,
    a_ptr,  # (B, M)
    r_ptr,  # (B, M)
    c_ptr,  # (B, N)
    work_ptr,  # (B, M) out: the next row scalings
    gap_ptr,  # (B, M) out: distance of each row sum of the whole plan from a
    M,
    N,
    inv_eps,
    tiny,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = rows < M
    scale = tl.load(scale_ptr)
    lse = tl.load(lse_ptr + pid * M + rows, mask=in_m, other=0.0)
    sim_ptr += pid * M * N
    c_ptr += pid * N
    sums = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for first in range(0, N, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        in_n = cols < N
        x = tl.load(sim_ptr + rows[:, None] * N + cols[None, :], mask=in_m[:, None] & in_n[None, :], other=0.0).to(
            tl.float32
        )
        c = tl.load(c_ptr + cols, mask=in_n, other=0.0)
        k = tl.exp((tl.exp(x * scale - lse[:, None]) - 1.0) * inv_eps)
        sums += tl.sum(k * c[None, :], axis=1)
    a = tl.load(a_ptr + pid * M + rows, mask=in_m, other=0.0)
    r = tl.load(r_ptr + pid * M + rows, mask=in_m, other=0.0)
    tl.store(gap_ptr + pid * M + rows, tl.abs(r * sums - a), mask=in_m)
    tl.store(work_ptr + pid * M + rows, a / tl.maximum(sums, tiny), mask=in_m)


@triton.jit
def _polish_kernel(
    sim_ptr,
    scale_ptr,
    lse_ptr,
    a_ptr,  # (B, M)
    r_ptr,  # (B, M) in and out
    c_ptr,  # (B, N) in and out
    work_ptr,  # (B, M) in: the next row scalings, from the test
    gap_ptr,  # (B, M) in: what the test found
    scores_ptr,  # (B, N) rewritten where an iteration was needed
    n_iter_ptr,  # (B,) int64, iterations so far, in and out
    error_ptr,  # (B,) out: row-marginal error of the whole plan
    M,
    N,
    inv_eps,
    weight,
    gain,
    tol,
    max_iter,
    tiny,
    ALL_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where the test of the whole plan's row marginal missed `tol`, iterate over all columns."""
    pid = tl.program_id(0).to(tl.int64)
    sim_ptr += pid * M * N
    lse_ptr += pid * M
    a_ptr += pid * M
    r_ptr += pid * M
    work_ptr += pid * M
    c_ptr += pid * N
    scale = tl.load(scale_ptr)
    every = tl.arange(0, ALL_M)
    error = tl.sum(tl.load(gap_ptr + pid * M + every, mask=every < M, other=0.0), axis=0)
    iteration = tl.load(n_iter_ptr + pid).to(tl.int32)
    running = tl.where((error < tol) | (iteration >= max_iter), 0, 1)
    while running == 1:
        for start in range(0, M, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            in_m = rows < M
            tl.store(r_ptr + rows, tl.load(work_ptr + rows, mask=in_m, other=0.0), mask=in_m)
        tl.debug_barrier()
        for first in range(0, N, BLOCK_N):
            cols = first + tl.arange(0, BLOCK_N)
            in_n = cols < N
            mass = tl.zeros((BLOCK_N,), dtype=tl.float32)
            moved = tl.zeros((BLOCK_N,), dtype=tl.float32)
            for start in range(0, M, BLOCK_M):
                rows = start + tl.arange(0, BLOCK_M)
                in_m = rows < M
                x = tl.load(
                    sim_ptr + rows[:, None] * N + cols[None, :], mask=in_m[:, None] & in_n[None, :], other=0.0
                ).to(tl.float32)
                lse = tl.load(lse_ptr + rows, mask=in_m, other=0.0)
                r = tl.load(r_ptr + rows, mask=in_m, other=0.0)
                k = tl.exp((tl.exp(x * scale - lse[:, None]) - 1.0) * inv_eps) * r[:, None]
                mass += tl.sum(k, axis=0)
                moved += tl.sum(k * x, axis=0)
            c = weight / tl.maximum(mass, tiny)
            tl.store(c_ptr + cols, c, mask=in_n)
            tl.store(scores_ptr + pid * N + cols, moved * c * gain, mask=in_n)
        iteration += 1
        tl.debug_barrier()
        errors = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for start in range(0, M, BLOCK_M):
            rows = start + tl.arange(0, BLOCK_M)
            in_m = rows < M
            lse = tl.load(lse_ptr + rows, mask=in_m, other=0.0)
            sums = tl.zeros((BLOCK_M,), dtype=tl.float32)
            for first in range(0, N, BLOCK_N):
                cols = first + tl.arange(0, BLOCK_N)
                in_n = cols < N
                x = tl.load(
                    sim_ptr + rows[:, None] * N + cols[None, :], mask=in_m[:, None] & in_n[None, :], other=0.0
                ).to(tl.float32)
                c = tl.load(c_ptr + cols, mask=in_n, other=0.0)
                k = tl.exp((tl.exp(x * scale - lse[:, None]) - 1.0) * inv_eps)
                sums += tl.sum(k * c[None, :], axis=1)
            a = tl.load(a_ptr + rows, mask=in_m, other=0.0)
            errors += tl.abs(tl.load(r_ptr + rows, mask=in_m, other=0.0) * sums - a)
            tl.store(work_ptr + rows, a / tl.maximum(sums, tiny), mask=in_m)
        error = tl.sum(errors, axis=0)
        running = tl.where((error < tol) | (iteration >= max_iter), 0, 1)
        tl.debug_barrier()
    tl.store(n_iter_ptr + pid, iteration)
    tl.store(error_ptr + pid, error)


def rows(
    sim: Tensor, scale: Tensor, *, eps: float = 1.0, K: Tensor | None = None, shift: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of sim * scale and largest sim, (B, M) each; fills K (B, M, width) with exp(shift) K if given."""
    batch, regions, labels = sim.shape
    lse = torch.empty(batch, regions, device=sim.device)
    top = torch.empty_like(lse)
    width = 0 if K is None else K.shape[2]
    block_n = min(2048, max(16, triton.next_power_of_2(max(labels, width))))
    block_m = 2048 // block_n
    _rows_kernel[(triton.cdiv(batch * regions, block_m),)](
        sim, scale, lse, top, lse if K is None else K, batch * regions, labels, width, 1.0 / eps, shift,
        WRITE_K=K is not None, BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    return lse, top


def _column_grid(batch: int, labels: int) -> tuple[tuple[int, int], dict[str, int]]:
    block_n = min(128, max(16, triton.next_power_of_2(labels)))
    return (batch, triton.cdiv(labels, block_n)), {"BLOCK_M": 32, "BLOCK_N": block_n}


def columns(sim: Tensor, scale: Tensor, lse: Tensor, r: Tensor, *, eps: float, gain: float) -> tuple[Tensor, Tensor]:
    """Scores (B, N) and column scalings (B, N) for given row scalings; one read of sim."""
    batch, regions, labels = sim.shape
    c = torch.empty(batch, labels, device=sim.device)
    scores = torch.empty_like(c)
    grid, blocks = _column_grid(batch, labels)
    _columns_kernel[grid](sim, scale, lse, r, c, scores, regions, labels, 1.0 / eps, 1.0 / labels, gain, TINY, **blocks)
    return scores, c


def peaks(sim: Tensor, scale: Tensor, lse: Tensor) -> Tensor:
    """(B, N) each label's largest softmax value over the regions."""
    batch, regions, labels = sim.shape
    out = torch.empty(batch, labels, device=sim.device)
    grid, blocks = _column_grid(batch, labels)
    _peaks_kernel[grid](sim, scale, lse, out, regions, labels, **blocks)
    return out


def gather(sim: Tensor, scale: Tensor, lse: Tensor, kept: Tensor, *, eps: float) -> Tensor:
    """K (B, M, k + 1) of the kept labels (B, k) and, last, of the mean of all the others.

    In float32: the last column has nearly all the mass and is nearly the same in all rows, so that rounding it to float16 would
    cost what the test of the whole plan asks for, and every image would iterate over all columns."""
    batch, regions, labels = sim.shape
    count = kept.shape[1]
    width = padded(count + 1)
    K = torch.empty(batch, regions, width, device=sim.device)
    _gather_kernel[(batch * regions,)](
        sim, scale, lse, kept, K, regions, labels, count, width, 1.0 / eps,
        BLOCK=max(16, triton.next_power_of_2(width)),
    )  # fmt: skip
    return K


def polish(
    sim: Tensor,
    scale: Tensor,
    lse: Tensor,
    a: Tensor,
    r: Tensor,
    c: Tensor,
    scores: Tensor,
    n_iter: Tensor,
    *,
    eps: float,
    gain: float,
    tol: float,
    max_iter: int,
) -> Tensor:
    """Error (B,) of the whole plan; iterates r, c, scores, n_iter in place where it is not below `tol`.

    The test is a kernel of its own, over all the chip: usually nothing is left to iterate."""
    batch, regions, labels = sim.shape
    error, work, gap = a.new_empty(batch), torch.empty_like(a), torch.empty_like(a)
    rows = max(1, min(8, triton.next_power_of_2(regions)))
    _test_kernel[(batch, triton.cdiv(regions, rows))](
        sim, scale, lse, a, r, c, work, gap, regions, labels, 1.0 / eps, TINY, BLOCK_M=rows, BLOCK_N=512,
    )  # fmt: skip
    _polish_kernel[(batch,)](
        sim, scale, lse, a, r, c, work, gap, scores, n_iter, error, regions, labels,
        1.0 / eps, 1.0 / labels, gain, tol, max_iter, TINY,
        ALL_M=triton.next_power_of_2(regions), BLOCK_M=16, BLOCK_N=256, num_warps=8,
    )  # fmt: skip
    return error
