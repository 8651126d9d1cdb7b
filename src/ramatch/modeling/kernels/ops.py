"""Operations that training and recognising spend time in, each in as few passes over memory as it takes."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

ALIGN = 8  # numbers of half precision in the 16 bytes that matrix units want rows to start at


def label_attention(query: Tensor, labels: Tensor) -> Tensor:
    """Attention of positions query (B, M, D) to labels (N, D) as keys and values, scale D^-½: (B, M, D).

    One product for all positions of all images, since they share their keys. `scaled_dot_product_attention` would not do it
    that way: a head of size D is beyond its fused kernels, and its plain kind computes half precision in float32.
    Under autocast this runs in autocast's type, softmax included (its sums are float32 inside).
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
        if torch.is_grad_enabled() and (query.requires_grad or labels.requires_grad):
            found = _LabelAttention.apply(rows, labels, bias)
        else:
            found = _attend(rows, labels, bias)[0]
    return found.view(query.shape)


def _attend(query: Tensor, labels: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    scale = query.shape[-1] ** -0.5
    if bias is None:
        logits = (query * scale) @ labels.T
    else:
        logits = torch.addmm(bias, query, labels.T, alpha=scale)
    weights = logits.softmax(-1)
    return weights @ labels, weights


class _LabelAttention(torch.autograd.Function):
    """Keeps the weights in the working type only; autocast would keep a float32 copy beside them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
        found, weights = _attend(query, labels, bias)
        ctx.save_for_backward(query, labels, weights)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        query, labels, weights = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        grad = grad.to(weights.dtype)
        d_logits = torch.ops.aten._softmax_backward_data(grad @ labels.T, weights, -1, weights.dtype)
        d_query = d_labels = None
        if ctx.needs_input_grad[0]:
            d_query = torch.addmm(query, d_logits, labels, beta=0, alpha=scale)
        if ctx.needs_input_grad[1]:  # as values, and as keys
            d_labels = torch.addmm(weights.T @ grad, d_logits.T, query, alpha=scale)
        return d_query, d_labels, None


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x), CLIP's activation; one kernel each way on a GPU with Triton, of which only x is kept."""
    module = _kernels(x)
    if module is None:
        return x * torch.sigmoid(1.702 * x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _QuickGELU.apply(x)
    return module.forward(x)


class _QuickGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        module = _kernels(x)
        assert module is not None
        return module.forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        module = _kernels(x)
        assert module is not None
        return module.backward(x, grad)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last axis, computed in float32. With Triton the result has x's type, also under autocast (which would
    widen x first and hand on float32); gradients reach x, weight and bias."""
    module = _norm_kernels(x)
    if module is None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return _Norm.apply(x, weight, bias, eps)
    return module.forward(x, None, weight, bias, eps)[1]


def add_norm(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y and its LayerNorm over the last axis: a residual and the norm that follows it. Weight and bias are frozen ones."""
    module = _norm_kernels(x)
    if module is None or x.dtype != y.dtype or x.shape != y.shape:
        x = x + y
        return x, layer_norm(x, weight, bias, eps)
    if torch.is_grad_enabled() and (x.requires_grad or y.requires_grad):
        if weight.requires_grad or bias.requires_grad:
            x = x + y
            return x, layer_norm(x, weight, bias, eps)
        return _AddNorm.apply(x, y, weight, bias, eps)
    return module.forward(x, y, weight, bias, eps)[:2]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        module = _norm_kernels(x)
        assert module is not None
        x, out, mean, rstd = module.forward(x, None, weight, bias, eps, keep=True)
        ctx.save_for_backward(x, mean, rstd, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, mean, rstd, weight = ctx.saved_tensors
        module = _norm_kernels(x)
        assert module is not None
        learn = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dx, dweight, dbias = module.backward(x, mean, rstd, weight, grad, None, learn)
        if learn and weight is not None:
            dweight, dbias = dweight.to(weight.dtype), dbias.to(weight.dtype)
        return dx, dweight, dbias, None


class _AddNorm(torch.autograd.Function):
    """Keeps the sum, which the layer hands on anyway, and two numbers of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        module = _norm_kernels(x)
        assert module is not None
        total, out, mean, rstd = module.forward(x, y, weight, bias, eps, keep=True)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, other: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, rstd, weight = ctx.saved_tensors
        if grad is not None:
            module = _norm_kernels(total)
            assert module is not None
            other = module.backward(total, mean, rstd, weight, grad, other, False)[0]
        return other, other, None, None, None  # both addends have the sum's gradient


def spatial_selection(
    point: Tensor, found0: Tensor, area: Tensor, found1: Tensor, weight: Tensor, groups: int, grid: tuple[int, int]
) -> Tensor:
    """End of TSS: two streams (B, M, D), each with what it found added; their mean and maximum over all channels; a convolution
    (2, ·, k, k) and sigmoid make a mask for each; the streams weighted by their masks, (B, M, D)."""
    alike = all(t.dtype == point.dtype for t in (found0, area, found1))
    module = _kernels(point, "mix_triton") if alike and point.dtype != torch.float64 else None
    if module is not None and point.shape[-1] <= module.MAX_WIDTH:
        return _Selection.apply(point, found0, area, found1, weight, groups, grid)
    point, area = point + found0, area + found1
    both = torch.cat([point, area], dim=-1)
    pooled = torch.stack([both.mean(-1), both.amax(-1)], dim=1).unflatten(-1, grid)
    masks = F.conv2d(pooled, weight, padding=weight.shape[-1] // 2, groups=groups).sigmoid().flatten(2)
    return point * masks[:, 0, :, None] + area * masks[:, 1, :, None]


class _Selection(torch.autograd.Function):
    """Keeps the two sums; masks and what they are made of are two numbers of a position."""

    @staticmethod
    def forward(
        ctx: Any, point: Tensor, found0: Tensor, area: Tensor, found1: Tensor, weight: Tensor, groups: int,
        grid: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        module = _kernels(point, "mix_triton")
        assert module is not None
        y0, y1, pooled = module.pool(*(t.contiguous() for t in (point, found0, area, found1)))
        with torch.autocast(point.device.type, enabled=False):
            padding = weight.shape[-1] // 2
            masks = F.conv2d(pooled.unflatten(-1, grid), weight.float(), padding=padding, groups=groups).sigmoid()
        masks = masks.flatten(2).contiguous()
        ctx.save_for_backward(y0, y1, pooled, masks, weight)
        ctx.groups, ctx.grid = groups, grid
        return module.mix(y0, y1, masks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y0, y1, pooled, masks, weight = ctx.saved_tensors
        module = _kernels(y0, "mix_triton")
        assert module is not None
        grad = grad.contiguous()
        d_masks = module.masks_backward(grad, y0, y1) * masks * (1 - masks)
        side = weight.shape[-1] // 2
        d_pooled, d_weight, _ = torch.ops.aten.convolution_backward(
            d_masks.unflatten(-1, ctx.grid), pooled.unflatten(-1, ctx.grid), weight.float(), None, [1, 1], [side, side],
            [1, 1], False, [0, 0], ctx.groups, [True, ctx.needs_input_grad[4], False],
        )  # fmt: skip
        d0, d1 = module.streams_backward(grad, y0, y1, masks, pooled, d_pooled.flatten(2).contiguous())
        return d0, d0, d1, d1, None if d_weight is None else d_weight.to(weight.dtype), None, None


def _kernels(x: Tensor, name: str = "gelu_triton") -> ModuleType | None:
    """The kernels if they can run on x: on a GPU with Triton, or under TRITON_INTERPRET=1."""
    if torch.compiler.is_compiling() or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    try:
        return importlib.import_module(f"ramatch.modeling.kernels.{name}")
    except ImportError:
        return None


def _norm_kernels(x: Tensor) -> ModuleType | None:
    module = _kernels(x, "norm_triton")
    narrow = x.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return module if module is not None and narrow and x.shape[-1] <= module.MAX_WIDTH else None
