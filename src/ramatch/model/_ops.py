"""Two operations that training and recognising spend time in, each in as few passes over memory as it takes."""

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
    module = None if torch.compiler.is_compiling() else _kernels(x)
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


def _kernels(x: Tensor) -> ModuleType | None:
    """The kernels if they can run on x: on a GPU with Triton, or under TRITON_INTERPRET=1."""
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    try:
        return importlib.import_module("ramatch.model._gelu_triton")
    except ImportError:
        return None
