"""Operations that training and recognizing spend time in, each in as few passes over memory as it takes.

On a GPU with Triton they run as kernels of our own (`*_triton.py`); elsewhere the plain operators beside each call do
the same.
"""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ot import has_kernels

ALIGN = 8  # numbers of half precision in the 16 bytes that matrix units want rows to start at
NARROW = (torch.float16, torch.bfloat16, torch.float32)


def triton_kernels(name: str, x: Tensor) -> ModuleType | None:
    """The kernels if they can run on x: on a GPU with Triton or under TRITON_INTERPRET=1; of a type and width known."""
    if not has_kernels(x.device):
        return None
    module = importlib.import_module(f"ramatch.modeling.kernels.{name}_triton")
    return module if x.dtype in NARROW and x.shape[-1] <= module.MAX_WIDTH else None


# ------------------------------------------------------------------------------------------------ attention to labels


def label_attention(query: Tensor, labels: Tensor, workspace_mb: int = 1024) -> Tensor:
    """Attention of positions query (B, M, D) to labels (N, D) as keys and values, scale D^-½: (B, M, D).

    One product for all positions of all images, since they share their keys. `scaled_dot_product_attention` would not
    do it that way: a head of size D is beyond its fused kernels, and its plain kind computes half precision in float32.
    Under autocast this runs in autocast's type, softmax included (its sums are float32 inside). Where nothing learns,
    the weights, which are all that grows with the vocabulary, take no more than the workspace at once.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, labels = query.to(torch.get_autocast_dtype(kind)), labels.to(torch.get_autocast_dtype(kind))
    rows, bias = query.reshape(-1, query.shape[-1]), None
    padding = -len(labels) % ALIGN
    if padding and query.is_cuda:
        bias = F.pad(labels.new_zeros(len(labels)), (0, padding), value=float("-inf"))
        labels = F.pad(labels, (0, 0, 0, padding))
    with torch.autocast(kind, enabled=False):
        learning = torch.is_grad_enabled() and (query.requires_grad or labels.requires_grad)
        step = _rows_at_once(rows, len(labels), workspace_mb)
        if learning or len(rows) <= step:
            return _attend(rows, labels, bias, learning).view(query.shape)
        found = torch.empty_like(rows)
        for part, out in zip(rows.split(step), found.split(step), strict=True):
            out.copy_(_attend(part, labels, bias))
    return found.view(query.shape)


def _rows_at_once(rows: Tensor, labels: int, workspace_mb: int) -> int:
    """How many rows' weights fit into the workspace. On a GPU whole waves of them: rows that give every processor one
    tile of 128 × 256, since a product of a few waves and a bit takes as long as one of another whole wave."""
    step = max(1, (workspace_mb << 20) // (labels * rows.element_size()))
    if rows.is_cuda and len(rows) > step:
        processors = torch.cuda.get_device_properties(rows.device).multi_processor_count
        wave = max(1, processors * 128 * 256 // rows.shape[1])
        step -= step % wave if step > wave else 0
    return step


def _attend(query: Tensor, labels: Tensor, bias: Tensor | None, learning: bool = False) -> Tensor:
    """What was found (R, D). Where nothing learns, logits become the weights in place."""
    base, beta = (query.new_zeros(1), 0) if bias is None else (bias, 1)
    logits = torch.addmm(base, query, labels.T, beta=beta, alpha=query.shape[-1] ** -0.5)
    weights = logits.softmax(-1) if learning else torch.softmax(logits, -1, out=logits)
    return weights @ labels


# --------------------------------------------------------------------------------------------------------- quick-GELU


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), CLIP's activation; one kernel each way on a GPU with Triton, of which only x is kept."""
    kernels = triton_kernels("gelu", x)
    if kernels is None:
        return x * torch.sigmoid(1.702 * x)
    return _QuickGelu.apply(x, kernels) if torch.is_grad_enabled() and x.requires_grad else kernels.forward(x)


class _QuickGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: ModuleType) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(x)
        return kernels.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.kernels.backward(*ctx.saved_tensors, grad), None


# ------------------------------------------------------------------------------------------------ pooling of regions


def smooth_max(cosines: Tensor, beta: float) -> Tensor:
    """Log-mean-exp over regions with sharpness beta, float32: cosines (B, M, N) → (B, N), between their mean and their
    maximum. With Triton one kernel each way, which keeps only the cosines: they are the largest tensor there is."""
    kernels = triton_kernels("pool", cosines)
    if kernels is None:
        cosines = cosines if cosines.dtype == torch.float64 else cosines.float()
        return (torch.logsumexp(beta * cosines, 1) - math.log(cosines.shape[1])) / beta
    return _SmoothMax.apply(cosines.contiguous(), beta, kernels)


class _SmoothMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cosines: Tensor, beta: float, kernels: ModuleType) -> Tensor:
        ctx.kernels, ctx.beta = kernels, beta
        pooled = kernels.forward(cosines, beta)
        ctx.save_for_backward(cosines, pooled)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.kernels.backward(*ctx.saved_tensors, grad, ctx.beta), None, None


# ---------------------------------------------------------------------------------------------------------- LayerNorm


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis, computed in float32. With Triton the result has x's type, also under autocast
    (which would widen x first and hand on float32); gradients reach x, weight and bias."""
    kernels = triton_kernels("norm", x)
    if kernels is None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return _norm(kernels, x, None, weight, bias, eps)[1]


def add_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y and its LayerNorm over the last axis: a residual and the norm that follows it."""
    kernels = triton_kernels("norm", x) if x.dtype == y.dtype and x.shape == y.shape else None
    if kernels is None:
        x = x + y
        return x, layer_norm(x, weight, bias, eps)
    return _norm(kernels, x, y, weight, bias, eps)


def _norm(kernels: ModuleType, *inputs: Any) -> tuple[Tensor, Tensor]:
    learning = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs)
    return _Norm.apply(kernels, *inputs) if learning else kernels.forward(*inputs)[:2]


class _Norm(torch.autograd.Function):
    """Of x, y, weight, bias and eps. Keeps the sum, which a layer hands on anyway, and two numbers of each row."""

    @staticmethod
    def forward(ctx: Any, kernels: ModuleType, *inputs: Any) -> tuple[Tensor | None, Tensor]:
        _, y, weight, *_ = inputs
        total, out, mean, rstd = kernels.forward(*inputs, keep=True)
        ctx.kernels = kernels
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.set_materialize_grads(False)
        return None if y is None else total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, other: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, rstd, weight = ctx.saved_tensors
        learn = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        dweight = dbias = None
        if grad is not None:
            other, dweight, dbias = ctx.kernels.backward(total, mean, rstd, weight, grad, other, learn)
        if dweight is not None and dbias is not None:
            dweight, dbias = dweight.to(weight.dtype), dbias.to(weight.dtype)
        return None, other, other if ctx.needs_input_grad[2] else None, dweight, dbias, None  # addends share a gradient


# -------------------------------------------------------------------------------------------------- the masks of TSS


def spatial_selection(streams: tuple[Tensor, ...], weight: Tensor, groups: int, grid: tuple[int, int]) -> Tensor:
    """End of TSS: two streams (B, M, D), each followed by what it found among the labels, which is added; their mean
    and maximum over all channels; a convolution (2, ·, k, k) and sigmoid make a mask for each; the streams weighted by
    their masks (B, M, D)."""
    point, found0, area, found1 = streams
    alike = all(t.dtype == point.dtype for t in streams)
    kernels = triton_kernels("mix", point) if alike else None
    if kernels is not None:
        return _Selection.apply(point, found0, area, found1, weight, groups, grid, kernels)
    point, area = point + found0, area + found1
    both = torch.cat([point, area], dim=-1)
    pooled = torch.stack([both.mean(-1), both.amax(-1)], dim=1).unflatten(-1, grid)
    masks = F.conv2d(pooled, weight, padding=weight.shape[-1] // 2, groups=groups).sigmoid().flatten(2)
    return point * masks[:, 0, :, None] + area * masks[:, 1, :, None]


class _Selection(torch.autograd.Function):
    """Keeps the two sums; masks and what they are made of are two numbers of a position."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *streams, weight, groups, grid, kernels = inputs
        y0, y1, pooled = kernels.pool(*(t.contiguous() for t in streams))
        with torch.autocast(y0.device.type, enabled=False):
            padding = weight.shape[-1] // 2
            masks = F.conv2d(pooled.unflatten(-1, grid), weight.float(), padding=padding, groups=groups).sigmoid()
        masks = masks.flatten(2).contiguous()
        ctx.save_for_backward(y0, y1, pooled, masks, weight)
        ctx.groups, ctx.grid, ctx.kernels = groups, grid, kernels
        return kernels.mix(y0, y1, masks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y0, y1, pooled, masks, weight = ctx.saved_tensors
        grad, side, wanted = grad.contiguous(), weight.shape[-1] // 2, [True, ctx.needs_input_grad[4], False]
        d_masks = ctx.kernels.masks_backward(grad, y0, y1) * masks * (1 - masks)
        d_masks, image = d_masks.unflatten(-1, ctx.grid), pooled.unflatten(-1, ctx.grid)
        shape: tuple = (None, [1, 1], [side, side], [1, 1], False, [0, 0], ctx.groups)  # no bias, stride, padding, …
        convolution_backward = torch.ops.aten.convolution_backward
        d_pooled, d_weight, _ = convolution_backward(d_masks, image, weight.float(), *shape, wanted)
        d0, d1 = ctx.kernels.streams_backward(grad, y0, y1, masks, pooled, d_pooled.flatten(2).contiguous())
        return d0, d0, d1, d1, None if d_weight is None else d_weight.to(weight.dtype), None, None, None
