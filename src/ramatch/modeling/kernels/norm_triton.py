"""LayerNorm in one pass over memory, with the residual sum before it in the same pass, and the gradient of both in one.

PyTorch's own LayerNorm reaches a third of the memory's speed on rows this short; a layer does two, each after an
addition.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 4096  # of one tile: whole rows, as many as fit
PROGRAMS = 528  # that share the rows where weights learn: each leaves one partial sum of their gradients
MAX_WIDTH = 8192


@triton.jit
def _norm_forward_kernel(
    x_ptr,  # (count, width)
    y_ptr,  # (count, width), if ADD
    weight_ptr,  # (width,)
    bias_ptr,
    sum_ptr,  # (count, width) out, if ADD: x + y
    out_ptr,  # (count, width) out
    mean_ptr,  # (count,) out, if KEEP
    rstd_ptr,
    count,
    width,
    eps,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_n = cols < width
    in_m = rows < count
    here = in_m[:, None] & in_n[None, :]
    at = rows[:, None] * width + cols[None, :]
    x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(y_ptr + at, mask=here, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=here)
        x = rounded.to(tl.float32)  # what the next layer sees, so that the gradient belongs to it
    mean = tl.sum(x, axis=1) / width
    centred = tl.where(here, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1) / width + eps)
    weight = tl.load(weight_ptr + cols, mask=in_n, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + cols, mask=in_n, other=0.0).to(tl.float32)
    y = centred * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=here)
    if KEEP:
        tl.store(mean_ptr + rows, mean, mask=in_m)
        tl.store(rstd_ptr + rows, rstd, mask=in_m)


@triton.jit
def _norm_backward_kernel(
    x_ptr,  # (count, width) what was normalised
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    grad_ptr,  # (count, width) of the normalised rows
    other_ptr,  # (count, width) of the sum itself, if OTHER
    dx_ptr,  # (count, width) out
    dweight_ptr,  # (programs, width) out, if LEARN
    dbias_ptr,
    count,
    width,
    turns,  # tiles of one program
    OTHER: tl.constexpr,
    LEARN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    in_n = cols < width
    weight = tl.load(weight_ptr + cols, mask=in_n, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    for turn in range(turns):
        rows = (pid * turns + turn) * ROWS + tl.arange(0, ROWS)
        in_m = rows < count
        here = in_m[:, None] & in_n[None, :]
        at = rows[:, None] * width + cols[None, :]
        mean = tl.load(mean_ptr + rows, mask=in_m, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=in_m, other=0.0)
        x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=here, other=0.0).to(tl.float32)
        x = tl.where(here, (x - mean[:, None]) * rstd[:, None], 0.0)
        if LEARN:
            dweight += tl.sum(grad * x, axis=0)
            dbias += tl.sum(grad, axis=0)
        grad = grad * weight[None, :]
        along = tl.sum(grad * x, axis=1) / width
        level = tl.sum(grad, axis=1) / width
        dx = (grad - level[:, None] - x * along[:, None]) * rstd[:, None]
        if OTHER:
            dx += tl.load(other_ptr + at, mask=here, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=here)
    if LEARN:
        tl.store(dweight_ptr + pid * width + cols, dweight, mask=in_n)
        tl.store(dbias_ptr + pid * width + cols, dbias, mask=in_n)


def _tile(width: int) -> dict[str, int]:
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, min(16, NUMBERS // block))
    return {"ROWS": rows, "BLOCK": block, "num_warps": 4 if rows * block <= 4096 else 8}


def forward(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + y (x itself without y), its LayerNorm over the last axis, mean and 1/deviation of rows if they are kept."""
    x = x.contiguous()
    other = x if y is None else y.contiguous()
    width, count = x.shape[-1], x.numel() // x.shape[-1]
    out = torch.empty_like(x)
    total = x if y is None else torch.empty_like(x)
    mean, rstd = torch.empty(2, count if keep else 0, device=x.device, dtype=torch.float32)
    flags = _tile(width) | {"ADD": y is not None, "KEEP": keep}
    if count:
        with torch.cuda.device_of(x):
            grid = (triton.cdiv(count, flags["ROWS"]),)
            _norm_forward_kernel[grid](x, other, weight, bias, total, out, mean, rstd, count, width, eps, **flags)
    return total, out, mean, rstd


def backward(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, grad: Tensor, other: Tensor | None, learn: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, of weight and of bias (None unless they `learn`); `other` is what reached x past the norm."""
    grad = grad.contiguous()
    other = None if other is None else other.contiguous()
    width, count = x.shape[-1], x.numel() // x.shape[-1]
    flags = _tile(width) | {"OTHER": other is not None, "LEARN": learn}
    tiles = triton.cdiv(count, flags["ROWS"])
    turns = triton.cdiv(tiles, PROGRAMS) if learn else 1
    programs = triton.cdiv(tiles, turns) if count else 0
    dx = torch.empty_like(x)
    dweight, dbias = torch.empty(2, programs if learn else 0, width, device=x.device, dtype=torch.float32)
    inputs = (mean, rstd, weight, grad, x if other is None else other)
    if count:
        with torch.cuda.device_of(x):
            _norm_backward_kernel[(programs,)](x, *inputs, dx, dweight, dbias, count, width, turns, **flags)
    return dx, dweight.sum(0) if learn else None, dbias.sum(0) if learn else None
