"""Triton kernels: Sinkhorn with one program per problem, and scores from similarities without a plan.

Nothing here talks to the host while it iterates: every program tests its own problem's row marginal, which
falls out of the next row update for free, and leaves its loop when it is met.

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

TINY = 1e-30
MAX_COLUMNS = 2048  # columns one program keeps in registers
HALF_LIMIT = 18.0  # with exp(x), |x| <= 9, float16 has full precision: eps >= 1 / 18


@triton.jit
def _sinkhorn_kernel(
    K_ptr,  # (B, M, N) float16 or float32, N padded with zeros to a multiple of 16
    a_ptr,  # (B, M)
    b_ptr,  # (B, N), zero in the padding
    c_ptr,  # (B, N) in: first column scalings, out: last ones
    r_ptr,  # (B, M) out
    work_ptr,  # (B, 2, M) row scalings of this and the last iteration, zeros at first
    n_iter_ptr,  # (B,) int64 out
    error_ptr,  # (B,) out
    M,
    N,
    tol,
    max_iter,
    tiny,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    K_ptr += pid * M * N
    a_ptr += pid * M
    r_ptr += pid * M
    work_ptr += pid * 2 * M
    cols = tl.arange(0, BLOCK_N)
    in_n = cols < N
    c = tl.load(c_ptr + pid * N + cols, mask=in_n, other=0.0)
    weight = tl.load(b_ptr + pid * N + cols, mask=in_n, other=0.0)
    iteration = 0
    error = 0.0
    running = 1
    while running == 1:
        last = work_ptr + (iteration % 2) * M
        here = work_ptr + ((iteration + 1) % 2) * M
        column_sums = tl.zeros((BLOCK_N,), dtype=tl.float32)
        errors = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for start in tl.range(0, M, BLOCK_M, num_stages=STAGES):
            rows = start + tl.arange(0, BLOCK_M)
            in_m = rows < M
            k = tl.load(K_ptr + rows[:, None] * N + cols[None, :], mask=in_m[:, None] & in_n[None, :], other=0.0).to(
                tl.float32
            )
            a = tl.load(a_ptr + rows, mask=in_m, other=0.0)
            sums = tl.sum(k * c[None, :], axis=1)
            # Row sums of the plan that the last iteration left (zeros before the first).
            errors += tl.abs(tl.load(last + rows, mask=in_m, other=0.0) * sums - a)
            r = a / tl.maximum(sums, tiny)
            tl.store(here + rows, r, mask=in_m)
            column_sums += tl.sum(k * r[:, None], axis=0)
        error = tl.sum(errors, axis=0)
        stop = ((error < tol) & (iteration > 0)) | (iteration == max_iter)
        c = tl.where(stop, c, weight / tl.maximum(column_sums, tiny))
        iteration = tl.where(stop, iteration, iteration + 1)
        running = tl.where(stop, 0, 1)
        tl.debug_barrier()  # `here` is read by other threads of this program in the next round
    tl.store(c_ptr + pid * N + cols, c, mask=in_n)
    final = work_ptr + (iteration % 2) * M
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        tl.store(r_ptr + rows, tl.load(final + rows, mask=rows < M, other=0.0), mask=rows < M)
    tl.store(n_iter_ptr + pid, iteration)
    tl.store(error_ptr + pid, error)


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
    """peak (B, N): each label's largest p over the regions."""
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = cols < N
    sim_ptr += pid * M * N
    scale = tl.load(scale_ptr)
    peak = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        in_m = rows < M
        x = tl.load(
            sim_ptr + rows[:, None] * N + cols[None, :], mask=in_m[:, None] & in_n[None, :], other=-float("inf")
        ).to(tl.float32)
        lse = tl.load(lse_ptr + pid * M + rows, mask=in_m, other=0.0)
        peak = tl.maximum(peak, tl.max(tl.exp(x * scale - lse[:, None]), axis=0))
    tl.store(peak_ptr + pid * N + cols, peak, mask=in_n)


@triton.jit
def _polish_kernel(
    sim_ptr,
    scale_ptr,
    lse_ptr,
    a_ptr,  # (B, M)
    r_ptr,  # (B, M) in and out
    c_ptr,  # (B, N) in and out
    work_ptr,  # (B, M)
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Test the whole plan's row marginal and, only where it misses `tol`, iterate over all columns."""
    pid = tl.program_id(0).to(tl.int64)
    sim_ptr += pid * M * N
    lse_ptr += pid * M
    a_ptr += pid * M
    r_ptr += pid * M
    work_ptr += pid * M
    c_ptr += pid * N
    scale = tl.load(scale_ptr)
    before = tl.load(n_iter_ptr + pid).to(tl.int32)
    iteration = before
    error = 0.0
    running = 1
    while running == 1:
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
        if running == 1:
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
                        sim_ptr + rows[:, None] * N + cols[None, :],
                        mask=in_m[:, None] & in_n[None, :],
                        other=0.0,
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
    tl.store(n_iter_ptr + pid, iteration)
    tl.store(error_ptr + pid, error)


def padded(columns: int) -> int:
    """Columns a kernel row is stored with: whole 16s, so that loads are wide and aligned."""
    return (columns + 15) // 16 * 16


def default_tile(rows: int, width: int) -> dict[str, int]:
    """Tile of the Sinkhorn kernel: 8,192 numbers, 32 registers of a thread, so that two programs share an SM."""
    block_n = max(16, triton.next_power_of_2(width))
    block_m = max(1, min(8192 // block_n, triton.next_power_of_2(rows)))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": 3, "num_warps": 8 if block_m * block_n >= 4096 else 4}


def sinkhorn(
    K: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    max_iter: int,
    tol: float,
    tile: dict[str, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row scalings (B, M), column scalings (B, width), n_iter (B,), error (B,).

    K (B, M, width) float16 or float32 with width = `padded(columns)` <= 2048, zero in the padding, as is b;
    c holds the first column scalings and is overwritten. A negative `tol` runs exactly `max_iter` iterations.
    """
    batch, rows, width = K.shape
    r, work = torch.empty_like(a), a.new_zeros(batch, 2, rows)
    n_iter = torch.zeros(batch, dtype=torch.int64, device=K.device)
    error = a.new_empty(batch)
    if batch:
        _sinkhorn_kernel[(batch,)](
            K, a, b, c, r, work, n_iter, error, rows, width, tol, max_iter, TINY,
            **(tile or default_tile(rows, width)),
        )  # fmt: skip
    return r, c, n_iter, error


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
    """Error (B,) of the whole plan; iterates r, c, scores, n_iter in place where it is not below `tol`."""
    batch, regions, labels = sim.shape
    error = a.new_empty(batch)
    _polish_kernel[(batch,)](
        sim, scale, lse, a, r, c, torch.empty_like(a), scores, n_iter, error, regions, labels,
        1.0 / eps, 1.0 / labels, gain, tol, max_iter, TINY, BLOCK_M=16, BLOCK_N=256, num_warps=8,
    )  # fmt: skip
    return error
