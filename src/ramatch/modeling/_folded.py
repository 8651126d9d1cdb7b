"""Frozen weights rearranged for recognising: everything that is constant at test time is multiplied out beforehand.

All of it is exact algebra, done in float32 before the last rounding: pixel normalisation into the patch embedding, LayerScale
into output projections, BatchNorm into convolutions, a LayerNorm's affine part and the attention's scale into the keys it meets,
and quick-GELU's 1.702 into the two layers around it (x sigmoid(1.702 x) = silu(1.702 x) / 1.702, one kernel instead of three).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels.ops import add_norm, layer_norm
from .preprocess import Preprocess
from .region_set import TSS, Stream
from .towers import Block, VisionTower, quick_gelu

QUICK = 1.702
CENTRE = 128.0  # taken off uint8 pixels: what is left is exact even in bfloat16
ALIGN = 64  # labels are padded to whole multiples, so that rows of products start at aligned addresses


def _silu(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)


def _gelu(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu.out(x, out=x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu.out(x, approximate="tanh", out=x)


@dataclass(frozen=True)
class Affine:
    """y = x weightᵀ + bias; weight (out, in), bias (out) or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Norm:
    """LayerNorm over the last axis."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class Layer:
    """One pre-LN transformer layer; `act` works in place."""

    heads: int
    ln1: Norm
    qkv: Affine
    out: Affine
    ln2: Norm
    fc1: Affine
    fc2: Affine
    act: Callable[[Tensor], Tensor]

    def split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, T, parts · W) → `parts` views (B, heads, T, W/heads)"""
        return x.unflatten(-1, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def query(self, x: Tensor) -> Tensor:
        """Query of x (B, T, W) alone: (B, heads, T, W/heads)"""
        return self.split(_part(self.qkv, x, slice(0, x.shape[-1])), 1)[0]

    def key_value(self, x: Tensor) -> tuple[Tensor, ...]:
        """Key and value of x (B, T, W) alone: (B, heads, T, W/heads) each"""
        return self.split(_part(self.qkv, x, slice(x.shape[-1], None)), 2)

    def feed(self, x: Tensor, attended: Tensor, into: Tensor | None = None) -> Tensor:
        """Everything after attention: x (B, T, W), attended (B, heads, T, W/heads) → (B, T, W), written `into` a view if given."""
        norm = self.ln2
        x, y = add_norm(x, self.out(attended.transpose(1, 2).flatten(2)), norm.weight, norm.bias, norm.eps)
        return torch.add(x, self.fc2(self.act(self.fc1(y))), out=into)


def _part(affine: Affine, x: Tensor, rows: slice) -> Tensor:
    return F.linear(x, affine.weight[rows], None if affine.bias is None else affine.bias[rows])


@dataclass(frozen=True)
class Select:
    """TSS of one adapted layer: two streams (3×3 and 1×1, BatchNorm inside), the two norms that become part of the keys,
    the mask's convolution and the way back."""

    point: Affine
    area: Affine  # weight (D, W, 3, 3), channels last
    norms: tuple[Norm, Norm]
    norm_labels: Norm
    mask: Tensor
    groups: int
    back: Tensor  # (D, W): transposed, ready for a product

    def streams(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """patches (B, M, W), contiguous → (2, B, M, D), point and area, after their activation; no label enters."""
        b, m, w = patches.shape
        area = F.conv2d(patches.view(b, *grid, w).permute(0, 3, 1, 2), self.area.weight, self.area.bias, padding=1)
        point = self.point(patches)
        out = point.new_empty(2, *point.shape)
        torch.ops.aten.gelu.out(point, out=out[0])
        # channels last in, channels last out: this is a view
        torch.ops.aten.gelu.out(area.permute(0, 2, 3, 1).reshape(b, m, -1), out=out[1])
        return out


@dataclass(frozen=True)
class Keys:
    """What one TSS needs of a vocabulary of N labels, padded to P rows: values (P, D) (rows past N are zero); and for each
    stream the scaled keys (D, P) and the bias (P) that goes with them, −∞ past N."""

    values: Tensor
    keys: tuple[Tensor, Tensor]
    biases: tuple[Tensor, Tensor]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values, *self.keys, *self.biases)


def fold_affine(linear: nn.Linear, dtype: torch.dtype, rows: Tensor | None = None, scale: float = 1.0) -> Affine:
    """A linear layer whose output rows are multiplied by `rows` (LayerScale) and by `scale`."""
    if rows is None and scale == 1.0:  # nothing to multiply: the weights are shared, not copied, if the type is theirs
        return Affine(linear.weight.detach().to(dtype), None if linear.bias is None else linear.bias.detach().to(dtype))
    gain = scale * (torch.ones_like(linear.bias) if rows is None else rows).float()
    weight, bias = linear.weight.detach().float() * gain[:, None], linear.bias.detach().float() * gain
    return Affine(weight.to(dtype), bias.to(dtype))


def fold_norm(norm: nn.LayerNorm, dtype: torch.dtype) -> Norm:
    return Norm(norm.weight.detach().to(dtype, copy=True), norm.bias.detach().to(dtype, copy=True), norm.eps)


def fold_block(block: nn.Module, dtype: torch.dtype) -> Layer:
    assert isinstance(block, Block)
    quick = block.act is quick_gelu
    act = _silu if quick else _gelu if block.act is F.gelu else _gelu_tanh
    fc1, fc2 = fold_affine(block.fc1, dtype, None, QUICK if quick else 1.0), fold_affine(block.fc2, dtype, block.scale2)
    if quick:  # the second layer's weight (not its bias) takes the first one's 1.702 back
        gain = 1.0 if block.scale2 is None else block.scale2.float()[:, None]
        fc2 = Affine((block.fc2.weight.float() * gain / QUICK).to(dtype), fc2.bias)
    return Layer(
        block.heads, fold_norm(block.ln1, dtype), fold_affine(block.qkv, dtype),
        fold_affine(block.out, dtype, block.scale1), fold_norm(block.ln2, dtype), fc1, fc2, act,
    )  # fmt: skip


def fold_patches(tower: VisionTower, preprocess: Preprocess, dtype: torch.dtype) -> Affine:
    """Patch embedding of centred uint8 pixels (3·p·p per patch): conv((x − mean) / std) = W' (x − 128) + b'."""
    weight = tower.patch.weight.double()
    mean = 255 * torch.tensor(preprocess.mean, dtype=torch.float64, device=weight.device).view(1, 3, 1, 1)
    std = 255 * torch.tensor(preprocess.std, dtype=torch.float64, device=weight.device).view(1, 3, 1, 1)
    bias = (weight * ((CENTRE - mean) / std)).sum((1, 2, 3))
    if tower.patch.bias is not None:
        bias = bias + tower.patch.bias.double()
    return Affine((weight / std).flatten(1).to(dtype).contiguous(), bias.to(dtype))


def fold_stream(stream: Stream, dtype: torch.dtype) -> Affine:
    """Convolution and BatchNorm (evaluation) in one: weight (D, W, k, k) and bias (D)."""
    conv, norm = stream[0], stream[1]
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    gain = norm.weight.float() * (norm.running_var.float() + norm.eps).rsqrt()
    weight = (conv.weight.float() * gain.view(-1, 1, 1, 1)).to(dtype)  # type: ignore[operator]
    return Affine(weight, (norm.bias.float() - norm.running_mean.float() * gain).to(dtype))


def fold_tss(tss: nn.Module, dtype: torch.dtype) -> Select:
    assert isinstance(tss, TSS)
    point, area = fold_stream(tss.point, dtype), fold_stream(tss.area, dtype)
    return Select(
        Affine(point.weight.flatten(1).contiguous(), point.bias),
        Affine(area.weight.contiguous(memory_format=torch.channels_last), area.bias),
        (fold_norm(tss.norm_point, torch.float32), fold_norm(tss.norm_area, torch.float32)),
        fold_norm(tss.norm_labels, torch.float32),
        tss.mask.weight.detach().float().clone(),
        tss.mask.groups,
        tss.back.weight.flatten(1).T.to(dtype).contiguous(),
    )


def fold_keys(select: Select, labels: Tensor, dtype: torch.dtype) -> Keys:
    """Keys of labels (N, D) for one TSS: LayerNorm(stream) · key D^-½ = standardised(stream) · (w key D^-½) + b · key D^-½."""
    values = select.norm_labels(labels.float())
    n, dim = values.shape
    scaled = values * dim**-0.5
    padding = -n % ALIGN
    keys, biases = [], []
    for norm in select.norms:
        keys.append(F.pad(scaled * norm.weight, (0, 0, 0, padding)).to(dtype).T.contiguous())
        biases.append(F.pad(scaled @ norm.bias, (0, padding), value=float("-inf")).to(dtype))
    return Keys(F.pad(values, (0, 0, 0, padding)).to(dtype), (keys[0], keys[1]), (biases[0], biases[1]))
