"""The last part of TSS in few passes over memory: both streams with what they found, their mean and maximum over
channels, and the streams weighted by the masks that come of these; and the gradients.

Rows are positions: B images of M, (B·M, D). What belongs to a position is stored as the mask's convolution wants it,
(B, 2, M).
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 4096


@triton.jit
def _mix_places(count, width, regions, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of this program's rows: which exist; which numbers do; where those are; where what belongs to a position is."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_m = rows < count
    here = in_m[:, None] & (cols < width)[None, :]
    return in_m, here, rows[:, None] * width + cols[None, :], (rows // regions) * 2 * regions + rows % regions


@triton.jit
def _mix_load(ptr, at, mask):
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _mix_pool_kernel(
    count, width, regions, x0, found0, x1, found1, y0, y1, pooled, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    in_m, here, at, place = _mix_places(count, width, regions, ROWS, BLOCK)
    r0 = (_mix_load(x0, at, here) + _mix_load(found0, at, here)).to(y0.dtype.element_ty)
    r1 = (_mix_load(x1, at, here) + _mix_load(found1, at, here)).to(y1.dtype.element_ty)
    tl.store(y0 + at, r0, mask=here)
    tl.store(y1 + at, r1, mask=here)
    s0 = r0.to(tl.float32)
    s1 = r1.to(tl.float32)
    mean = tl.sum(s0 + s1, axis=1) / (2 * width)
    top = tl.max(tl.where(here, tl.maximum(s0, s1), -float("inf")), axis=1)
    tl.store(pooled + place, mean, mask=in_m)
    tl.store(pooled + place + regions, top, mask=in_m)


@triton.jit
def _mix_kernel(count, width, regions, y0, y1, masks, out, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    in_m, here, at, place = _mix_places(count, width, regions, ROWS, BLOCK)
    m0 = _mix_load(masks, place, in_m)
    m1 = _mix_load(masks, place + regions, in_m)
    mixed = _mix_load(y0, at, here) * m0[:, None] + _mix_load(y1, at, here) * m1[:, None]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=here)


@triton.jit
def _mix_masks_backward_kernel(count, width, regions, grad, y0, y1, dmask, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    in_m, here, at, place = _mix_places(count, width, regions, ROWS, BLOCK)
    g = _mix_load(grad, at, here)
    tl.store(dmask + place, tl.sum(g * _mix_load(y0, at, here), axis=1), mask=in_m)
    tl.store(dmask + place + regions, tl.sum(g * _mix_load(y1, at, here), axis=1), mask=in_m)


@triton.jit
def _mix_streams_backward_kernel(
    count, width, regions, grad, y0, y1, masks, pooled, dpooled, d0, d1, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    in_m, here, at, place = _mix_places(count, width, regions, ROWS, BLOCK)
    m0 = _mix_load(masks, place, in_m)
    m1 = _mix_load(masks, place + regions, in_m)
    top = _mix_load(pooled, place + regions, in_m)
    level = _mix_load(dpooled, place, in_m) / (2 * width)
    peak = _mix_load(dpooled, place + regions, in_m)
    g = _mix_load(grad, at, here)
    at0 = tl.where(here & (_mix_load(y0, at, here) == top[:, None]), 1.0, 0.0)
    at1 = tl.where(here & (_mix_load(y1, at, here) == top[:, None]), 1.0, 0.0)
    peak = peak / tl.maximum(tl.sum(at0 + at1, axis=1), 1.0)  # equals share the gradient, as in PyTorch's amax
    g0 = g * m0[:, None] + level[:, None] + at0 * peak[:, None]
    g1 = g * m1[:, None] + level[:, None] + at1 * peak[:, None]
    tl.store(d0 + at, g0.to(d0.dtype.element_ty), mask=here)
    tl.store(d1 + at, g1.to(d1.dtype.element_ty), mask=here)


def _launch(kernel: Any, like: Tensor, *tensors: Tensor) -> None:
    """Run a kernel over the rows of streams (B, M, D) like this one."""
    b, m, width = like.shape
    block = max(16, triton.next_power_of_2(width))
    rows = max(1, min(16, 4096 // block))
    if b * m:
        with torch.cuda.device_of(like):
            kernel[(triton.cdiv(b * m, rows),)](b * m, width, m, *tensors, ROWS=rows, BLOCK=block, num_warps=4)


def _of_positions(like: Tensor) -> Tensor:
    """Two numbers of each position, (B, 2, M), not yet written."""
    return torch.empty(like.shape[0], 2, like.shape[1], device=like.device, dtype=torch.float32)


def pool(x0: Tensor, found0: Tensor, x1: Tensor, found1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x0 + found0, x1 + found1 (B, M, D), and mean and maximum over both's channels (B, 2, M) float32."""
    y0, y1, pooled = torch.empty_like(x0), torch.empty_like(x1), _of_positions(x0)
    _launch(_mix_pool_kernel, x0, x0, found0, x1, found1, y0, y1, pooled)
    return y0, y1, pooled


def mix(y0: Tensor, y1: Tensor, masks: Tensor) -> Tensor:
    """y0 masks[:, 0] + y1 masks[:, 1], for masks (B, 2, M) float32."""
    out = torch.empty_like(y0)
    _launch(_mix_kernel, y0, y0, y1, masks, out)
    return out


def masks_backward(grad: Tensor, y0: Tensor, y1: Tensor) -> Tensor:
    """Gradient of the masks, (B, 2, M)."""
    dmask = _of_positions(y0)
    _launch(_mix_masks_backward_kernel, y0, grad, y0, y1, dmask)
    return dmask


def streams_backward(
    grad: Tensor, y0: Tensor, y1: Tensor, masks: Tensor, pooled: Tensor, dpooled: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of y0 and y1, through the weighted sum and through mean and maximum."""
    d0, d1 = torch.empty_like(y0), torch.empty_like(y1)
    _launch(_mix_streams_backward_kernel, y0, grad, y0, y1, masks, pooled, dpooled, d0, d1)
    return d0, d1
