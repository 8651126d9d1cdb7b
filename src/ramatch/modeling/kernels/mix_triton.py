"""The last part of TSS in few passes over memory: both streams with what they found, their mean and maximum over channels, and
the streams weighted by the masks that come of these; and the gradients.

Rows are positions: B images of M, (B·M, D). What belongs to a position is stored as the mask's convolution wants it, (B, 2, M).
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 4096


@triton.jit
def _mix_pool_kernel(
    x0_ptr, found0_ptr, x1_ptr, found1_ptr, y0_ptr, y1_ptr, pooled_ptr, count, width, regions,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_m = rows < count
    here = in_m[:, None] & (cols < width)[None, :]
    at = rows[:, None] * width + cols[None, :]
    y0 = tl.load(x0_ptr + at, mask=here, other=0.0).to(tl.float32)
    y0 += tl.load(found0_ptr + at, mask=here, other=0.0).to(tl.float32)
    y1 = tl.load(x1_ptr + at, mask=here, other=0.0).to(tl.float32)
    y1 += tl.load(found1_ptr + at, mask=here, other=0.0).to(tl.float32)
    r0 = y0.to(y0_ptr.dtype.element_ty)
    r1 = y1.to(y1_ptr.dtype.element_ty)
    tl.store(y0_ptr + at, r0, mask=here)
    tl.store(y1_ptr + at, r1, mask=here)
    y0 = r0.to(tl.float32)
    y1 = r1.to(tl.float32)
    mean = tl.sum(y0 + y1, axis=1) / (2 * width)
    top = tl.max(tl.where(here, tl.maximum(y0, y1), -float("inf")), axis=1)
    place = (rows // regions) * 2 * regions + rows % regions
    tl.store(pooled_ptr + place, mean, mask=in_m)
    tl.store(pooled_ptr + place + regions, top, mask=in_m)


@triton.jit
def _mix_kernel(
    y0_ptr, y1_ptr, mask_ptr, out_ptr, count, width, regions, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_m = rows < count
    here = in_m[:, None] & (cols < width)[None, :]
    at = rows[:, None] * width + cols[None, :]
    place = (rows // regions) * 2 * regions + rows % regions
    m0 = tl.load(mask_ptr + place, mask=in_m, other=0.0)
    m1 = tl.load(mask_ptr + place + regions, mask=in_m, other=0.0)
    y0 = tl.load(y0_ptr + at, mask=here, other=0.0).to(tl.float32)
    y1 = tl.load(y1_ptr + at, mask=here, other=0.0).to(tl.float32)
    out = y0 * m0[:, None] + y1 * m1[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _mix_masks_backward_kernel(
    grad_ptr, y0_ptr, y1_ptr, dmask_ptr, count, width, regions, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_m = rows < count
    here = in_m[:, None] & (cols < width)[None, :]
    at = rows[:, None] * width + cols[None, :]
    grad = tl.load(grad_ptr + at, mask=here, other=0.0).to(tl.float32)
    y0 = tl.load(y0_ptr + at, mask=here, other=0.0).to(tl.float32)
    y1 = tl.load(y1_ptr + at, mask=here, other=0.0).to(tl.float32)
    place = (rows // regions) * 2 * regions + rows % regions
    tl.store(dmask_ptr + place, tl.sum(grad * y0, axis=1), mask=in_m)
    tl.store(dmask_ptr + place + regions, tl.sum(grad * y1, axis=1), mask=in_m)


@triton.jit
def _mix_streams_backward_kernel(
    grad_ptr, y0_ptr, y1_ptr, mask_ptr, pooled_ptr, dpooled_ptr, d0_ptr, d1_ptr, count, width, regions,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    in_m = rows < count
    here = in_m[:, None] & (cols < width)[None, :]
    at = rows[:, None] * width + cols[None, :]
    place = (rows // regions) * 2 * regions + rows % regions
    m0 = tl.load(mask_ptr + place, mask=in_m, other=0.0)
    m1 = tl.load(mask_ptr + place + regions, mask=in_m, other=0.0)
    top = tl.load(pooled_ptr + place + regions, mask=in_m, other=0.0)
    level = tl.load(dpooled_ptr + place, mask=in_m, other=0.0) / (2 * width)
    peak = tl.load(dpooled_ptr + place + regions, mask=in_m, other=0.0)
    grad = tl.load(grad_ptr + at, mask=here, other=0.0).to(tl.float32)
    y0 = tl.load(y0_ptr + at, mask=here, other=0.0).to(tl.float32)
    y1 = tl.load(y1_ptr + at, mask=here, other=0.0).to(tl.float32)
    at0 = tl.where(here & (y0 == top[:, None]), 1.0, 0.0)
    at1 = tl.where(here & (y1 == top[:, None]), 1.0, 0.0)
    peak = peak / tl.maximum(tl.sum(at0 + at1, axis=1), 1.0)  # equals share the gradient, as in PyTorch's amax
    d0 = grad * m0[:, None] + level[:, None] + at0 * peak[:, None]
    d1 = grad * m1[:, None] + level[:, None] + at1 * peak[:, None]
    tl.store(d0_ptr + at, d0.to(d0_ptr.dtype.element_ty), mask=here)
    tl.store(d1_ptr + at, d1.to(d1_ptr.dtype.element_ty), mask=here)


def _tile(width: int) -> dict[str, int]:
    block = max(16, triton.next_power_of_2(width))
    return {"ROWS": max(1, min(16, 4096 // block)), "BLOCK": block, "num_warps": 4}


def pool(x0: Tensor, found0: Tensor, x1: Tensor, found1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x0 + found0, x1 + found1 (B, M, D), and mean and maximum over both's channels (B, 2, M) float32."""
    b, m, width = x0.shape
    y0, y1 = torch.empty_like(x0), torch.empty_like(x1)
    pooled = torch.empty(b, 2, m, device=x0.device, dtype=torch.float32)
    tile = _tile(width)
    if b * m:
        with torch.cuda.device_of(x0):
            _mix_pool_kernel[(triton.cdiv(b * m, tile["ROWS"]),)](
                x0, found0, x1, found1, y0, y1, pooled, b * m, width, m, **tile
            )
    return y0, y1, pooled


def mix(y0: Tensor, y1: Tensor, masks: Tensor) -> Tensor:
    """y0 masks[:, 0] + y1 masks[:, 1], for masks (B, 2, M) float32."""
    b, m, width = y0.shape
    out, tile = torch.empty_like(y0), _tile(width)
    if b * m:
        with torch.cuda.device_of(y0):
            _mix_kernel[(triton.cdiv(b * m, tile["ROWS"]),)](y0, y1, masks, out, b * m, width, m, **tile)
    return out


def masks_backward(grad: Tensor, y0: Tensor, y1: Tensor) -> Tensor:
    """Gradient of the masks, (B, 2, M)."""
    b, m, width = y0.shape
    dmask, tile = torch.empty(b, 2, m, device=y0.device, dtype=torch.float32), _tile(width)
    if b * m:
        with torch.cuda.device_of(y0):
            _mix_masks_backward_kernel[(triton.cdiv(b * m, tile["ROWS"]),)](
                grad, y0, y1, dmask, b * m, width, m, **tile
            )
    return dmask


def streams_backward(
    grad: Tensor, y0: Tensor, y1: Tensor, masks: Tensor, pooled: Tensor, dpooled: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of y0 and y1, through the weighted sum and through mean and maximum."""
    b, m, width = y0.shape
    d0, d1, tile = torch.empty_like(y0), torch.empty_like(y1), _tile(width)
    if b * m:
        with torch.cuda.device_of(y0):
            _mix_streams_backward_kernel[(triton.cdiv(b * m, tile["ROWS"]),)](
                grad, y0, y1, masks, pooled, dpooled, d0, d1, b * m, width, m, **tile
            )
    return d0, d1
