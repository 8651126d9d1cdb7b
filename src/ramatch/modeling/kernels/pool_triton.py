"""Smooth maximum of cosines over regions in one pass over memory, and its gradient in one."""

# mypy: allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
MAX_WIDTH = 1 << 62  # any: labels are taken in blocks


@triton.jit
def _pool_forward_kernel(x_ptr, y_ptr, M, N, beta, BLOCK: tl.constexpr):
    image, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here, total = at < N, tl.zeros([BLOCK], tl.float32)
    for m in range(M):
        x = tl.load(x_ptr + (image * M + m) * N + at, mask=here, other=0.0).to(tl.float32)
        total += tl.exp(beta * (x - 1.0))  # cosines are at most 1
    tl.store(y_ptr + image * N + at, 1.0 + tl.log(total / M) / beta, mask=here)


@triton.jit
def _pool_backward_kernel(x_ptr, y_ptr, grad_ptr, out_ptr, M, N, beta, BLOCK: tl.constexpr):
    image, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < N
    y = tl.load(y_ptr + image * N + at, mask=here, other=0.0)
    grad = tl.load(grad_ptr + image * N + at, mask=here, other=0.0) / M
    for m in range(M):
        place = (image * M + m) * N + at
        x = tl.load(x_ptr + place, mask=here, other=0.0).to(tl.float32)
        out = grad * tl.exp(beta * (x - y))
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=here)


def forward(x: Tensor, beta: float) -> Tensor:
    """Cosines (B, M, N) → float32 (B, N)."""
    b, m, n = x.shape
    y = torch.empty(b, n, dtype=torch.float32, device=x.device)
    if y.numel():
        with torch.cuda.device_of(x):
            _pool_forward_kernel[(triton.cdiv(n, BLOCK), b)](x, y, m, n, beta, BLOCK=BLOCK)
    return y


def backward(x: Tensor, y: Tensor, grad: Tensor, beta: float) -> Tensor:
    """Gradient at x for the gradient of y."""
    b, m, n = x.shape
    out = torch.empty_like(x)
    if out.numel():
        with torch.cuda.device_of(x):
            _pool_backward_kernel[(triton.cdiv(n, BLOCK), b)](x, y, grad.contiguous(), out, m, n, beta, BLOCK=BLOCK)
    return out
