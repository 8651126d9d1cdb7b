"""Vision towers in timm's names, alone or as `visual.trunk` of an open_clip model: EVA02-CLIP, Perception Encoder
(core), SigLIP, MobileCLIP-B, and CLIP's own ViT. timm itself is not needed.

What a tower is shows in the tensors it has. Only where its activation is an approximation (newer SigLIPs) the name of
the architecture must say so.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import RamatchError
from ..backbone import Backbone
from ..preprocess import CLIP_MEAN, CLIP_STD, HALF, Preprocess
from ..towers import TowerConfig
from .files import HEAD_WIDTHS, Names, Part, Tensors, assemble, join_query, read_weights, translate

POOL_HEADS = 8  # of Perception Encoder; SigLIP's pooling has as many as its layers
TANH = re.compile(r"vit_(base_patch32|so400m_patch16|giantopt_patch16)_siglip|vit_large_patch16_siglip_512")
PARTS = ("norm1", "norm2", "attn.proj", "mlp.fc1", "mlp.fc2")
NAMES = Names("blocks.{}.", PARTS, ("attn.q", "attn.k", "attn.v"))
POOL = {"value": "v", "out": "proj", "norm": "norm", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
# EVA02: places in a grid of 16 × 16, whatever the image; PE: in its own grid, counted from 1
EVA02: dict[str, Any] = {"gated": True, "sub_norm": True, "act": "silu", "rope_base": 1e4, "rope_span": 16.0}
NO_VIT = ("stages.", "stem.", "layers.", "embeds.", "patch_embed.backbone.st")
UNREAD = re.compile(r"\.(q_norm|gate|gamma_1|ls1)\.|^reg_token")


def _refuse(t: Tensors) -> None:
    """Say why a tower is not read."""
    if any(name.startswith(NO_VIT) for name in t):
        why = "is not a plain ViT (FastViT as in MobileCLIP's S sizes, ConvNeXt, ViTamin, Swin, NaFlexViT)"
    elif "blocks.0.attn.q_bias" in t:
        why = "is an EVA01, or an EVA02-E, which normalizes after its layers"
    elif any(UNREAD.search(name) for name in t):
        why = "has LayerScale, registers or norms of queries (DINOv2 and DINOv3 are read in Hugging Face's form)"
    elif "cls_token" not in t and "attn_pool.latent" not in t:
        why = "averages its patches: it has neither a class token nor attention pooling"
    else:
        return
    raise RamatchError(f"this vision tower of timm's {why}, which ramatch does not read")


def _halves(weight: Tensor, heads: int, columns_first: bool) -> Tensor:
    """Rows of a query or key (W, ...), whose rotary pairs are neighbors, in our order: the first of each pair, then the
    second; of the pairs, those that turn with the row first."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    if columns_first:
        pairs = pairs.roll(pairs.shape[1] // 2, 1)
    return pairs.transpose(1, 2).flatten(0, 2)


def _with_joined(t: Tensors) -> dict[str, Tensor]:
    """Tensors with query, key and value apart, a gate joined with its value, and the pooling's likewise."""
    out = dict(t)
    for i in range(NAMES.count(t)):
        attn, mlp = f"blocks.{i}.attn.", f"blocks.{i}.mlp."
        for part in ("weight", "bias"):
            if f"{attn}qkv.{part}" in t:
                split = t[f"{attn}qkv.{part}"].chunk(3)
            else:  # EVA02, whose keys have no bias
                first = t[f"{attn}q_proj.{part}"]
                split = (first, t.get(f"{attn}k_proj.{part}", torch.zeros_like(first)), t[f"{attn}v_proj.{part}"])
            out |= {f"{attn}{name}.{part}": tensor for name, tensor in zip("qkv", split, strict=True)}
            if f"{mlp}fc1_g.{part}" in t:
                out[f"{mlp}fc1.{part}"] = torch.cat([t[f"{mlp}fc1_g.{part}"], t[f"{mlp}fc1_x.{part}"]])
    for part in ("weight", "bias"):
        if f"attn_pool.kv.{part}" in t:
            out |= {f"attn_pool.{k}.{part}": v for k, v in zip("kv", t[f"attn_pool.kv.{part}"].chunk(2), strict=True)}
    return out


def _stem(t: Tensors) -> dict[str, Tensor]:
    """The patch embedding; MobileCLIP's three convolutions with BatchNorm folded in."""
    if "patch_embed.proj.weight" in t:
        return {name.replace("patch_embed.proj", "patch"): t[name] for name in t if name.startswith("patch_embed.proj")}
    out: dict[str, Tensor] = {}
    for i, ours in enumerate(("patch", "deeper.0", "deeper.1")):
        theirs = f"patch_embed.backbone.{i}"
        weight, bias = t[f"{theirs}.conv.weight"].double(), t.get(f"{theirs}.conv.bias")
        if f"{theirs}.bn.weight" in t:
            gain, shift, mean, var = (
                t[f"{theirs}.bn.{k}"].double() for k in ("weight", "bias", "running_mean", "running_var")
            )
            gain = gain * (var + 1e-5).rsqrt()
            weight, bias = weight * gain.view(-1, 1, 1, 1), shift - mean * gain
        out |= {f"{ours}.weight": weight} | ({} if bias is None else {f"{ours}.bias": bias})
    return out


def vision(t: Tensors) -> dict[str, Tensor]:
    """A tower's tensors under our names, rotary pairs and the pooling's query still as they are on disk."""
    _refuse(t)
    t = _with_joined(t)
    sub_norm, pooled = "blocks.0.attn.norm.weight" in t, "attn_pool.latent" in t
    modules = {"norm": "norm"} | ({"stem": "norm_pre"} if "norm_pre.weight" in t else {})
    modules |= {f"pool.{ours}": f"attn_pool.{theirs}" for ours, theirs in POOL.items() if pooled}
    for i in range(NAMES.count(t) if sub_norm else 0):
        modules |= {f"blocks.{i}.norm_out": f"blocks.{i}.attn.norm", f"blocks.{i}.norm_fc2": f"blocks.{i}.mlp.norm"}
    out = replace(NAMES, modules=modules)(t) | _stem(t)
    if pooled:
        latent = t["attn_pool.latent"].float().flatten()
        out["pool.query"] = t["attn_pool.q.weight"].float() @ latent + t["attn_pool.q.bias"].float()
        out["pool.key.weight"] = t["attn_pool.k.weight"]
    positions = t["pos_embed"].flatten(0, 1)
    if "cls_token" in t:
        out["cls"] = t["cls_token"].flatten()
        if math.isqrt(len(positions)) ** 2 == len(positions):  # MobileCLIP: the class token has no position
            positions = torch.cat([torch.zeros_like(positions[:1]), positions])
    return out | {"positions": positions}


def tower(t: Tensors, name: str, architecture: str = "") -> tuple[TowerConfig, dict[str, Tensor]]:
    """Shape and tensors of a tower, whose names are without a prefix."""
    state = translate(vision, t, name)
    (width, mlp), patch = state["blocks.0.fc2.weight"].shape, state["patch.weight"].shape[-1]
    heads, class_token = width // HEAD_WIDTHS.get(width, 64), "cls" in state
    stem_norm, conv_stem = "stem.weight" in state, "deeper.0.weight" in state
    patch, side = patch * (4 if conv_stem else 1), math.isqrt(len(state["positions"]) - class_token)
    pooled, eva = "pool.query" in state, "blocks.0.norm_out.weight" in state
    more: dict[str, Any] = {"act": "gelu_tanh" if TANH.match(architecture) else "gelu"}
    if pooled:
        pool_heads = POOL_HEADS if stem_norm else heads
        more |= {"pool_heads": pool_heads, "pool_mlp": len(state["pool.fc1.weight"])}
    if eva:
        more |= EVA02
    elif pooled and stem_norm:  # Perception Encoder, whose class token is at 0
        more |= {"rope_base": 1e4, "rope_span": float(side), "rope_start": float(class_token)}
    config = TowerConfig(
        *(width, NAMES.count(t), heads, mlp),
        eps=1e-5 if stem_norm else 1e-6,
        patch=patch,
        image=side * patch,
        patch_bias="patch.bias" in state,
        stem_norm=stem_norm,
        conv_stem=conv_stem,
        class_token=class_token,
        resample="bicubic, smoothed",
        head_bias="head.bias" in t,
        **more,
    )
    for key in [k for k in state if config.rope_base and ".qkv." in k]:
        q, k, v = state[key].chunk(3)
        state[key] = torch.cat([_halves(q, heads, not eva), _halves(k, heads, not eva), v])
    return config, join_query(state, config.pool_heads)


def is_clip(config: TowerConfig) -> bool:
    """CLIP's own ViT, and none of the families with a mark."""
    return not (config.pool_heads or config.sub_norm or config.conv_stem)


def pixels(config: TowerConfig) -> tuple[tuple, tuple]:
    """Mean and deviation that a family was trained with."""
    if config.conv_stem:
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return (HALF, HALF) if config.pool_heads else (CLIP_MEAN, CLIP_STD)


def part(t: Tensors, name: str, architecture: str = "") -> Part:
    """A tower with its projection: its head, or where the pooled feature is the joint space (SigLIP), none."""
    config, state = tower(t, name, architecture)
    head = {key: t[f"head.{key}"].float() for key in ("weight", "bias") if f"head.{key}" in t}
    if not head and not config.pool_heads:
        raise RamatchError(f"{name}: this vision tower has no head, so its features do not live in a joint space")
    return Part(config, state, head or {"weight": torch.eye(config.width)})


def preprocess(config: TowerConfig, raw: dict[str, Any]) -> Preprocess:
    """By timm's config.json."""
    told, own = raw.get("pretrained_cfg", {}), pixels(config)
    mean, std = (tuple(told.get(key, other)) for key, other in zip(("mean", "std"), own, strict=True))
    return Preprocess((config.image, config.image), mean, std)


def load(folder: Path, name: str, raw: dict[str, Any]) -> Backbone:
    """timm's folder of a vision tower alone."""
    own = part(read_weights(folder), name, str(raw["architecture"]))
    return assemble(own, None, preprocess(own.config, raw), None, name=name)
