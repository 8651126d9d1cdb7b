"""SigLIP and SigLIP 2 by Hugging Face's names on disk, the NaFlex ones too, with square pictures.

They have no class token: attention pooling makes the global feature, and that is the joint space. Scale and bias of
their sigmoid make probabilities (`Calibrator.of_sigmoid`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...errors import RamatchError
from ..backbone import Backbone
from .files import Names, Part, Tensors, assemble, logits, read_preprocess, read_weights, take
from .huggingface import CLIP_LAYERS, CLIP_PARTS, CLIP_POSITIONS, CLIP_QKV, CLIP_TEXT, Family, Raw
from .tokenizer import Tokenizer

ENDS = {"patch": "embeddings.patch_embedding", "norm": "post_layernorm"}
POOL = {"out": "attention.out_proj", "norm": "layernorm", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
MODULES = ENDS | {f"pool.{ours}": f"head.{theirs}" for ours, theirs in POOL.items()}
NAMES = Names(CLIP_LAYERS, CLIP_PARTS, CLIP_QKV, MODULES, CLIP_POSITIONS)
PAD = 1  # where the folder does not say: SigLIP's end token


def vision(t: Tensors) -> dict[str, Tensor]:
    if "head.probe" not in t:
        raise RamatchError("this SigLIP has no pooling head (vision_use_head is off), so it has no global feature")
    out, probe = NAMES(t), t["head.probe"].float().flatten()
    if out["patch.weight"].ndim == 2:  # NaFlex gets its patches cut out before: (W, patch · patch · 3)
        side = round((out["patch.weight"].shape[1] / 3) ** 0.5)
        out["patch.weight"] = out["patch.weight"].unflatten(1, (side, side, 3)).permute(0, 3, 1, 2)
    weights, biases = (t[f"head.attention.in_proj_{part}"].float().split(len(probe)) for part in ("weight", "bias"))
    out |= {"pool.query": weights[0] @ probe + biases[0], "pool.key.weight": weights[1]}
    return out | {"pool.value.weight": weights[2], "pool.value.bias": biases[2]}


_BASE: Raw = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_SIGHT = _BASE | {"patch_size": 16, "image_size": 224}
_FLEXIBLE = _BASE | {"patch_size": 16, "num_patches": 256}
_WORDS = _BASE | {"vocab_size": 32000, "max_position_embeddings": 64}
_OWN: Raw = {"class_token": False, "patch_bias": True, "pool_heads": 0}  # as many as the layers have
SEES = Family(vision, "vision_model.", _SIGHT, _OWN)
SEES_FLEXIBLY = Family(vision, "vision_model.", _FLEXIBLE, _OWN | {"resample": "bilinear, smoothed"})
READS = Family(CLIP_TEXT, "text_model.", _WORDS, {"pool": "last", "pad": PAD, "head_bias": True})
VISION = {"siglip": SEES, "siglip_vision_model": SEES, "siglip2": SEES_FLEXIBLY, "siglip2_vision_model": SEES_FLEXIBLY}
TEXT = dict.fromkeys(("siglip", "siglip_text_model", "siglip2", "siglip2_text_model"), READS)


def load(folder: Path, name: str, raw: Raw) -> Backbone:
    """Both towers, or the vision tower alone."""
    sees, tensors = VISION[raw["model_type"]], read_weights(folder)
    config = sees.shape(raw)
    state = sees.read(tensors, name, config)
    vision_part, text_part, tokenizer = Part(config, state, {"weight": torch.eye(config.width)}), None, None
    if (words := take(tensors, "text_model.")) and "head.weight" in words:
        config = READS.shape(raw)
        tokenizer = Tokenizer.from_folder(folder, config.context)
        if tokenizer is not None:
            config = replace(config, pad=tokenizer.for_siglip(folder, PAD).pad)
        head = {part: words[f"head.{part}"].float() for part in ("weight", "bias")}
        text_part = Part(config, READS.read(tensors, name, config), head)
    side = vision_part.config.image
    preprocess, sigmoid = read_preprocess(folder, (side, side), sees.pixels), logits(tensors)
    return assemble(vision_part, text_part, preprocess, tokenizer, name=name, **sigmoid)
