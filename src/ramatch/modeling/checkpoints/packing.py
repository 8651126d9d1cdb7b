"""Weights on disk in fewer bits: as halves, or as int8 with one scale for each output channel.

A tensor in int8 is two in its file, `NAME.int8` and `NAME.scale`, and one again when `read_tensors` has read it.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...config import WEIGHTS
from ...errors import RamatchError
from ...files import write_atomic

WORDS = "text.tokens.weight"  # large, and they keep their meaning in 8 bits: with fp16 too
IN_INT8 = {"fp32": "", "fp16": re.escape(WORDS), "int8": r".*\.weight"}
SHORTEST = 16  # numbers that share a scale: a mask's kernel is not worth one
MOST_LOST = 0.014  # of a tensor's norm; some have outliers for which all others lose their bits, and stay halves


def pack(tensors: dict[str, Tensor], weights: str) -> dict[str, Tensor]:
    """Tensors as they are stored in one of `WEIGHTS`. Vectors stay float32: they are few, and want the range."""
    if weights not in WEIGHTS:
        raise RamatchError(f"weights '{weights}' are not known; choose one of {', '.join(WEIGHTS)}")
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point():
            tensor = tensor.float()
        if not tensor.is_floating_point() or tensor.ndim < 2 or not tensor.numel() or weights == "fp32":
            out[name] = tensor.contiguous()
            continue
        out[name] = tensor.half().contiguous()
        if tensor[0].numel() >= SHORTEST and re.fullmatch(IN_INT8[weights], name):
            steps, scale = quantize(tensor, name)
            if name == WORDS or (steps * scale - tensor).norm() <= MOST_LOST * tensor.norm():
                del out[name]
                out[f"{name}.int8"], out[f"{name}.scale"] = steps, scale
    return out


def quantize(tensor: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """A tensor (C, …) as int8 and its scales (C, 1, …), in which no number is off by more than half a step."""
    largest = tensor.abs().amax(tuple(range(1, tensor.ndim)), keepdim=True)
    if not largest.isfinite().all():
        raise RamatchError(f"tensor '{name}' holds numbers that are not finite, which int8 cannot store")
    # of 17 bits, so that 127 times it is exact: what was read and is stored again stays what it is
    mantissa, exponent = torch.frexp((largest / 127).clamp(min=1e-30))
    scale = torch.ldexp((mantissa * 2**17).round() / 2**17, exponent)
    return (tensor / scale).round().to(torch.int8), scale


def unpack(tensors: dict[str, Tensor], where: object, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors of a file, those in int8 in `dtype`; a scale that is missing or damaged is an error that names it. One by
    one: all of them in float32 at once would take more memory than the model does later in half precision."""
    out = dict(tensors)
    for name in [name.removesuffix(".int8") for name in tensors if name.endswith(".int8")]:
        steps, scale = out.pop(f"{name}.int8"), out.pop(f"{name}.scale", None)
        if scale is None:
            raise RamatchError(f"{where}: tensor '{name}.scale' is missing, without which '{name}' cannot be read")
        expected = (*steps.shape[:1], *[1] * (steps.ndim - 1))
        if scale.shape != expected:
            raise RamatchError(f"{where}: tensor '{name}.scale' is {tuple(scale.shape)}, expected {expected}")
        if not (scale.isfinite() & (scale >= 0)).all():
            raise RamatchError(f"{where}: tensor '{name}.scale' is damaged: a scale is finite and not negative")
        out[name] = steps.float().mul_(scale.float()).to(dtype)
    return out


def write_tensors(tensors: dict[str, Tensor], path: Path, weights: str) -> None:
    state = pack(tensors, weights)
    write_atomic(path, lambda temporary: save_file(state, temporary, metadata={"format": "pt"}))
