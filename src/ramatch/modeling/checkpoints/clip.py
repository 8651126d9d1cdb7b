"""Hugging Face CLIP: both towers, or one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import RamatchError
from ..backbone import Backbone, TowerConfig
from ..preprocess import CLIP_MEAN, CLIP_STD
from .files import Names, activation, fill, logit_scale, read_preprocess, read_weights, take, translate
from .tokenizer import Tokenizer

LAYERS = "encoder.layers.{}."
PARTS = {"ln1": "layer_norm1", "ln2": "layer_norm2", "out": "self_attn.out_proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
POSITIONS = {"positions": "embeddings.position_embedding.weight"}
PATCHES = {"patch.weight": "embeddings.patch_embedding.weight", "cls": "embeddings.class_embedding"}
VISION = Names(LAYERS, PARTS, QKV, {"stem": "pre_layrnorm", "norm": "post_layernorm"}, PATCHES | POSITIONS)
WORDS = {"tokens.weight": "embeddings.token_embedding.weight"}
TEXT = Names(LAYERS, PARTS, QKV, {"norm": "final_layer_norm"}, WORDS | POSITIONS)


def _tower(c: Any, **extra: Any) -> TowerConfig:
    sizes = (c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.intermediate_size)
    return TowerConfig(*sizes, activation(c.hidden_act), c.layer_norm_eps, **extra)


def vision_config(raw: dict[str, Any]) -> TowerConfig:
    """From the config.json of a CLIP or of its vision tower alone."""
    from transformers import CLIPConfig, CLIPVisionConfig

    both = raw["model_type"] == "clip"
    c: Any = CLIPConfig.from_dict(raw).vision_config if both else CLIPVisionConfig.from_dict(raw)
    return _tower(c, patch=c.patch_size, image=c.image_size, stem_norm=True)


def text_config(raw: dict[str, Any]) -> TowerConfig:
    """From the config.json of a CLIP or of its text tower alone."""
    from transformers import CLIPConfig, CLIPTextConfig

    both = raw["model_type"] == "clip"
    c: Any = CLIPConfig.from_dict(raw).text_config if both else CLIPTextConfig.from_dict(raw)
    return _tower(c, vocab=c.vocab_size, context=c.max_position_embeddings, causal=True)


def load(folder: Path, name: str, raw: dict[str, Any]) -> Backbone:
    """A CLIP (`model_type: clip`), or a vision tower alone (`clip_vision_model`) that has its projection."""
    tensors: dict[str, Tensor] = read_weights(folder)
    text = text_config(raw) if raw["model_type"] == "clip" and "text_projection.weight" in tensors else None
    vision = vision_config(raw)
    if "visual_projection.weight" not in tensors:
        raise RamatchError(f"'{name}' has no visual projection, so its features do not live in a joint space")
    preprocess = read_preprocess(folder, (vision.image, vision.image), (CLIP_MEAN, CLIP_STD))
    tokenizer = Tokenizer.from_folder(folder, text.context) if text else None
    dim, scale = tensors["visual_projection.weight"].shape[0], logit_scale(tensors)
    model = Backbone(vision, text, dim, preprocess, tokenizer, logit_scale=scale, name=name)
    fill(model.vision, translate(VISION, take(tensors, "vision_model."), name), name)
    fill(model.visual_projection, {"weight": tensors["visual_projection.weight"]}, name)
    if model.text is not None and model.text_projection is not None:
        fill(model.text, translate(TEXT, take(tensors, "text_model."), name), name)
        fill(model.text_projection, {"weight": tensors["text_projection.weight"]}, name)
    return model
