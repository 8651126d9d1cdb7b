"""Parts that only some vision towers have: rotary positions (EVA02, Perception Encoder, DINOv3), attention pooling
(SigLIP, Perception Encoder), a convolutional stem (MobileCLIP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels.ops import layer_norm


def norm_as(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm in the type of x, or in autocast's, whatever its weights are kept in."""
    weight: Tensor = norm.weight
    bias: Tensor = norm.bias
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    return layer_norm(x, weight, bias, norm.eps)


def linear_as(x: Tensor, linear: nn.Linear) -> Tensor:
    """A product in the type of x, or in autocast's, whatever its weights are kept in."""
    weight: Tensor = linear.weight
    bias: Tensor | None = linear.bias
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        weight, bias = weight.to(x.dtype), bias if bias is None else bias.to(x.dtype)
    return F.linear(x, weight, bias)


class Rope(NamedTuple):
    """Rotary positions of an image's patches, (M, head width / 2) each; `first`: tokens before them, not turned."""

    cos: Tensor
    sin: Tensor
    first: int

    @classmethod
    def of_grid(
        cls, grid: tuple[int, int], frequencies: Tensor, *, span: float, start: float, zero: float, first: int
    ) -> Rope:
        """Of an h × w grid: row i is at ((i + start) / h − zero) · span, a column likewise, whatever the grid's size.
        One half of the frequencies' pairs turns with the row, the other with the column."""
        rows, columns = (
            ((torch.arange(n, device=frequencies.device) + start) / n - zero).mul(span)[:, None] * frequencies
            for n in grid
        )
        h, w = grid
        angles = torch.cat([rows[:, None].expand(h, w, -1), columns[None].expand(h, w, -1)], dim=-1).flatten(0, 1)
        return cls(angles.cos(), angles.sin(), first)

    def turn(self, x: Tensor) -> Tensor:
        """Queries or keys (B, heads, T, width) with those of patches turned; tokens after them (prompts) stay too."""
        first, last = self.first, self.first + len(self.cos)
        if x.shape[2] <= first:
            return x
        a, b = x[:, :, first:last].chunk(2, dim=-1)
        turned = torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], dim=-1).to(x.dtype)
        return torch.cat([x[:, :, :first], turned, x[:, :, last:]], dim=2)


class AttentionPool(nn.Module):
    """Global feature by attention: one learned query looks at all tokens, then a residual feed-forward.

    The query is the same for every image, so the keys' weights are multiplied with it beforehand (`ask`: what each head
    weighs a token by), and values are taken of each head's mean token rather than of every token.
    """

    def __init__(self, width: int, heads: int, mlp: int, eps: float, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.act = heads, act
        self.ask = nn.Linear(width, heads, bias=False)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.fc1, self.fc2 = nn.Linear(width, mlp), nn.Linear(mlp, width)

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Tokens (B, T, W) → (B, W); with `allowed` (B, T), where there must be some, of those only."""
        asked = linear_as(x, self.ask)
        weights = (asked if allowed is None else asked.masked_fill(~allowed[..., None], -torch.inf)).softmax(1)
        seen = weights.transpose(1, 2) @ x  # (B, heads, W)
        value = self.value.weight.to(seen.dtype).unflatten(0, (self.heads, -1))
        pooled = (value @ seen.unsqueeze(-1)).flatten(1) + self.value.bias.to(seen.dtype)
        return self._finish(pooled)

    def alone(self, x: Tensor) -> Tensor:
        """Tokens (..., W) → (..., W): what pooling gives where a token is all there is."""
        return self._finish(linear_as(x, self.value))

    def _finish(self, x: Tensor) -> Tensor:
        x = linear_as(x, self.out)
        return x + linear_as(self.act(linear_as(norm_as(x, self.norm), self.fc1)), self.fc2)


class Stem(nn.ModuleList):
    """What follows the first convolution of MobileCLIP's stem, BatchNorm folded into it: (B, W/4, 4h, 4w) → (B, W, h,
    w). No kernel reaches over a patch's edge."""

    FIRST = 4  # pixels that the first convolution sees

    def __init__(self, width: int) -> None:
        super().__init__([nn.Conv2d(width // 4, out, 2, stride=2) for out in (width // 4, width)])

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self:
            x = convolution(F.gelu(x))
        return x
