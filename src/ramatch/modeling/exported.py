"""Parts of the pass as plain functions of tensors, which other runtimes can take over.

`ImagePart` is the trunk, in float32 and of one image size. `in_int8` gives one whose products with weights are rounded
to 8 bits at their inputs and weights: what an int8 runtime computes, and finds marked in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import RamatchError, require
from .backbone import Block
from .fuse import CENTER, fuse
from .kernels.ops import spatial_selection
from .matching import presence, transport_cost
from .ram import RAM, TSS
from .types import Trunk

PRODUCTS = (F.linear, torch.conv2d, F.conv2d)
SHARE = 0.7  # of a channel's range that moves from activations into weights, as a power
ONE_SIDED = 8  # times further up than down: then the range starts at its lowest value instead of being symmetric


class Step(NamedTuple):
    """How one tensor is rounded: numbers are `low` plus whole steps, 0…255 of them, or −128…127 where `low` is 0."""

    size: float
    low: float = 0.0


class ImagePart(nn.Module):
    """uint8 images (B, 3, H, W) → tensors of their `Trunk`: image, local, then the streams of TSS.

    `steps`: of the inputs of the products with weights, in their order; none: everything in float32.
    """

    def __init__(self, ram: RAM) -> None:
        super().__init__()
        self.ram, self.steps = fuse(ram, torch.float32), tuple[Step, ...]()
        self.ram.backbone.vision.offset = None  # a convolution, which runtimes know, instead of a product of bytes
        self.grid = ram.backbone.vision.grid(*ram.preprocess.size)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        if not self.steps:
            return self._trunk(pixels)
        with _Products(_Rounding(self.steps)):
            return self._trunk(pixels)

    def _trunk(self, pixels: Tensor) -> tuple[Tensor, ...]:
        trunk, _ = self.ram.region_set.trunk(self.ram.backbone, pixels.float() - CENTER)
        return trunk.image, trunk.local, *trunk.streams


def trunk_names(ram: RAM) -> list[str]:
    """Of the tensors of a trunk."""
    layers = range(len(ram.region_set.tss))
    return ["image", "local", *(f"{stream}{i}" for i in layers for stream in ("point", "area"))]


def trunk_of(outputs: Sequence[Tensor], grid: tuple[int, int]) -> Trunk:
    """Outputs of an `ImagePart` as what they are."""
    image, local, *streams = outputs
    return Trunk(image, local, tuple(streams), grid)


class TextPart(nn.Module):
    """Token ids (N, T) and 1 where they are real (N, T) → unit features (N, D) of these sentences, in float32."""

    def __init__(self, ram: RAM) -> None:
        super().__init__()
        self.backbone = ram.backbone
        self.text = ram.backbone.require_text("exporting the label part")
        if ram.label_set.mode != "none":
            raise RamatchError(f"a label part with learned prompts ('{ram.label_set.mode}') cannot be exported yet")

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.text.run(self.text.embed(ids), mask.sum(-1))
        return F.normalize(self.backbone.project_text(self.text.pool(x, mask.sum(-1))), dim=-1)


class MatchPart(nn.Module):
    """Tensors of a trunk, unit features of labels and what TSS looks at (N, D) each → s_R, s_G and cosine of each
    label's best region, (B, N) each: `RAM.recognize` in float32. Background labels are given like all others, and
    their columns left out of the answer. Transport always takes `max_iter` steps: no loop that asks when to stop.
    """

    def __init__(self, ram: RAM) -> None:
        super().__init__()
        wanted = {"matcher": "kcot", "plan_scale": "labels", "cost": "softmax", "relax": None}
        if other := [f"{k} is {v}" for k, v in ram.config.to_dict().items() if k in wanted and v != wanted[k]]:
            raise RamatchError(f"matching cannot be exported where {', '.join(other)}, only with {wanted}")
        self.ram, self.grid = fuse(ram, torch.float32), ram.backbone.vision.grid(*ram.preprocess.size)

    def forward(self, unit: Tensor, looked_at: Tensor, image: Tensor, local: Tensor, *streams: Tensor) -> Any:
        ram, config = self.ram, self.ram.config
        for tss, point, area in zip(ram.region_set.tss, streams[::2], streams[1::2], strict=True):
            local = local + self._selected(cast(TSS, tss), point, area, looked_at)
        regions = ram.backbone.project(local)
        pooled = ram.backbone.pool(image, regions) if config.pooled == "adapted" else image
        sim = F.normalize(regions, dim=-1) @ unit.T
        best = sim.amax(1)
        region = (self._plan(sim) * sim).sum(1)
        return torch.lerp(region, best, config.max_weight), F.normalize(pooled, dim=-1) @ unit.T, best

    def _selected(self, tss: TSS, point: Tensor, area: Tensor, labels: Tensor) -> Tensor:
        keys = tss.norm_labels(labels)

        def look(stream: Tensor, norm: nn.LayerNorm) -> Tensor:
            return (norm(stream) @ keys.T * keys.shape[-1] ** -0.5).softmax(-1) @ keys

        streams = point, look(point, tss.norm_point), area, look(area, tss.norm_area)
        chosen = spatial_selection(streams, tss.mask.weight, tss.mask.groups, self.grid)
        return F.linear(chosen, tss.back.weight.flatten(1))

    def _plan(self, sim: Tensor) -> Tensor:
        """KCOT's plan (B, M, N), its columns scaled to 1."""
        config, scale = self.ram.config, self.ram.backbone.logit_scale
        cost = transport_cost(sim, scale)
        kernel = torch.exp((cost.amin(2, keepdim=True) - cost) / config.lambda1)
        flat = torch.full_like(sim[..., 0], 1 / sim.shape[1])
        rows = presence(sim, config.tau_u or 1 / scale) if config.lpd else flat
        share = sim.new_ones(()) / sim.shape[2]  # of each label in the mass
        columns = torch.ones_like(sim[:, 0])
        for _ in range(config.max_iter):
            found = rows / (kernel @ columns[..., None])[..., 0]
            columns = share / (found[:, None] @ kernel)[:, 0]
        return found[..., None] * kernel * columns[:, None] / share


def write_image_part(part: ImagePart, file: Path) -> None:
    example = torch.zeros(3, 3, *part.ram.preprocess.size, dtype=torch.uint8)
    _write(part, {"pixels": (example, {0: "images"})}, trunk_names(part.ram), file)


def write_text_part(part: TextPart, file: Path) -> None:
    """Of 2 to all tokens that the tower has positions for."""
    axes = {0: "sentences", 1: "tokens"}
    ids, mask = (torch.ones(3, 5, dtype=torch.long) for _ in range(2))  # one for both would be taken for one input
    _write(part, {"ids": (ids, axes), "mask": (mask, axes)}, ["features"], file)


def write_match_part(part: MatchPart, example: Trunk, file: Path) -> None:
    """`example`: a trunk of a few images."""
    unit, looked_at = (torch.zeros(count, part.ram.backbone.dim) for count in (5, 7))
    inputs = {"unit": (unit, {0: "labels"}), "looked_at": (looked_at, {0: "words"})}
    names = trunk_names(part.ram)
    inputs |= {name: (value, {0: "images"}) for name, value in zip(names, example.tensors, strict=True)}
    _write(part, inputs, ["region", "image_score", "best"], file)


def _write(part: nn.Module, inputs: dict[str, tuple[Tensor, dict[int, str]]], outputs: list[str], file: Path) -> None:
    """By torch's exporter; of each input, an example and the names of its axes of any length."""
    require("onnxscript", "onnx")
    shapes = {name: dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for name, (_, axes) in inputs.items()}
    listed = list(shapes.values())
    if isinstance(part, MatchPart):  # *streams
        listed = [*listed[:4], tuple(listed[4:])]  # type: ignore[list-item]
    options: dict[str, Any] = {"dynamo": True, "verbose": False, "dynamic_shapes": tuple(listed)}
    options |= {"input_names": list(inputs), "output_names": outputs}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, of what it will change in other releases
        program = torch.onnx.export(part.eval(), tuple(value for value, _ in inputs.values()), **options)
    assert program is not None
    program.save(str(file))


@torch.no_grad()
def in_int8(ram: RAM, photos: Tensor) -> ImagePart:
    """An `ImagePart` rounded to 8 bits: one step for each tensor that flows, measured on photographs uint8 (B, 3, H,
    W), and one for each output channel of a weight.

    A few channels of a transformer are ten times the others and would take all the steps. So channels after a
    LayerNorm are first brought closer together, and the next weights changed the other way round: the same function.
    """
    part = ImagePart(ram)
    _even_out(part, _Measuring.of(part, photos))
    part.steps = tuple(_Measuring.of(part, photos).steps)
    return part


def _even_out(part: ImagePart, found: _Measuring) -> None:
    """Divide what LayerNorms give by a factor for each channel, and multiply the following weights by it."""
    for block in part.ram.backbone.vision.blocks:
        block = cast(Block, block)
        for norm, linear in () if block.post else ((block.ln1, block.qkv), (block.ln2, block.fc1)):
            largest, weight = found.channels[_place(linear.weight)], linear.weight.abs().amax(0)
            factor = largest.clamp(min=1e-5) ** SHARE / weight.clamp(min=1e-5) ** (1 - SHARE)
            _replace(norm, {"weight": norm.weight / factor, "bias": norm.bias / factor})
            _replace(linear, {"weight": linear.weight * factor})


def _replace(module: nn.Module, values: dict[str, Tensor]) -> None:
    """New parameters: the old ones may be shared with the model."""
    for name, value in values.items():
        setattr(module, name, nn.Parameter(value, requires_grad=False))


Change = Callable[[Tensor, Tensor, "Tensor | None"], tuple[Tensor, Tensor, "Tensor | None"]]


class _Products(TorchFunctionMode):
    """Within it, input, weight and bias of every product with weights pass through `change`."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS:
            x, weight, bias, *rest = (*args, None)[: max(3, len(args))]
            args = (*self.change(x, weight, bias), *rest)
        return function(*args, **(kwargs or {}))


def _place(weight: Tensor) -> int:
    """What a weight and parts of it have in common."""
    return weight.untyped_storage().data_ptr()


@dataclass
class _Measuring:
    """steps: of each product's input. channels: of each weight, the largest of each channel of its input."""

    steps: list[Step]
    channels: dict[int, Tensor]

    @classmethod
    def of(cls, part: ImagePart, photos: Tensor) -> _Measuring:
        found = cls([], {})
        with _Products(found):
            part(photos)
        return found

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        low, high = float(x.amin()), float(x.amax())
        one_sided = bias is not None and x.ndim == 3 and high > ONE_SIDED * -low > 0
        self.steps.append(Step((high - low) / 255, low) if one_sided else Step(max(-low / 128, high / 127, 1e-12)))
        if x.ndim < 4:
            largest, before = x.abs().flatten(0, -2).amax(0), self.channels.get(_place(weight))
            self.channels[_place(weight)] = largest if before is None else torch.maximum(largest, before)
        return x, weight, bias


class _Rounding:
    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps: Iterator[Step] = iter(steps)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        step = next(self.steps)
        if step.low and bias is not None:  # W x + b = W (x − low) + (b + low · W 1): runtimes like ranges from 0
            bias = bias + step.low * weight.sum(1)
            x = torch.fake_quantize_per_tensor_affine(x - step.low, step.size, 0, 0, 255)
        else:
            x = torch.fake_quantize_per_tensor_affine(x, step.size, 0, -128, 127)
        scale = weight.abs().flatten(1).amax(1).clamp(min=1e-12) / 127
        zeros = torch.zeros_like(scale, dtype=torch.int32)
        return x, torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -127, 127), bias
