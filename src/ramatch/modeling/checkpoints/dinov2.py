"""Hugging Face vision towers without a text tower: DINOv2, and ViT (also DINO and MAE in ViT's form)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import RamatchError
from ..backbone import TowerConfig
from .files import Names, Tensors, transformer_sizes

LAYERS = "encoder.layer.{}."
QKV = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
MODULES = {"patch": "embeddings.patch_embeddings.projection", "norm": "layernorm"}
TENSORS = {"cls": "embeddings.cls_token", "positions": "embeddings.position_embeddings"}
OUT = {"out": "attention.output.dense"}
DINOV2 = Names(
    LAYERS, {"ln1": "norm1", "ln2": "norm2", "fc1": "mlp.fc1", "fc2": "mlp.fc2"} | OUT, QKV, MODULES, TENSORS
)
VIT_PARTS = {"ln1": "layernorm_before", "ln2": "layernorm_after", "fc1": "intermediate.dense", "fc2": "output.dense"}
VIT = Names(LAYERS, VIT_PARTS | OUT, QKV, MODULES, TENSORS)


def dinov2_config(raw: dict[str, Any]) -> TowerConfig:
    """From a DINOv2 config.json (its defaults are the base size)."""
    sizes = transformer_sizes(raw, 1e-6)
    sizes["mlp"] = int(raw.get("mlp_ratio", 4) * sizes["width"])
    patch, image = raw.get("patch_size", 14), raw.get("image_size", 518)
    return TowerConfig(**sizes, layer_scale=True, patch=patch, image=image, patch_bias=True)


def vit_config(raw: dict[str, Any]) -> TowerConfig:
    """From a ViT config.json (its defaults are the base size)."""
    patch, image = raw.get("patch_size", 16), raw.get("image_size", 224)
    return TowerConfig(**transformer_sizes(raw), patch=patch, image=image, patch_bias=True)


def dinov2(t: Tensors) -> dict[str, Tensor]:
    """A DINOv2 (without registers)."""
    if any("weights_in" in name for name in t):
        raise RamatchError("this DINOv2 has SwiGLU layers (the giant size), which ramatch does not read; use S, B or L")
    if any("register_tokens" in name for name in t):
        raise RamatchError("this DINOv2 has register tokens, which ramatch does not read; use one without registers")
    scales = {
        f"blocks.{i}.scale{n}": t[f"encoder.layer.{i}.layer_scale{n}.lambda1"]
        for i in range(DINOV2.count(t))
        for n in (1, 2)
    }
    return _flat(DINOV2(t)) | scales


def vit(t: Tensors) -> dict[str, Tensor]:
    """A ViT (its pooler is left out)."""
    return _flat(VIT(t))


def _flat(out: dict[str, Tensor]) -> dict[str, Tensor]:
    """Class token and positions without the batch axis they are stored with."""
    return out | {"cls": out["cls"].flatten(), "positions": out["positions"].flatten(0, 1)}
