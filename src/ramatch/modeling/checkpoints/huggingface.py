"""Hugging Face models by their names on disk: CLIP, DINOv2 (also with registers), DINOv3's ViT, ViT (also DINO and MAE
in ViT's form), BERT, RoBERTa and XLM-RoBERTa, DistilBERT. Text towers are mean-pooled, as sentence encoders are, and
poolers left out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import RamatchError
from ..backbone import Backbone
from ..preprocess import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD
from ..towers import TowerConfig
from .files import (
    Names,
    Part,
    Reader,
    Tensors,
    assemble,
    join_query,
    logits,
    need,
    read_preprocess,
    read_weights,
    take,
    translate,
)
from .tokenizer import Tokenizer

Raw = dict[str, Any]  # of a config.json
ACTS = {
    **{name: name for name in ("quick_gelu", "gelu", "silu")},
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "gelu_tanh"),
}

# --------------------------------------------------------------------------------------------------------------- names

CLIP_LAYERS = "encoder.layers.{}."
CLIP_PARTS = ("layer_norm1", "layer_norm2", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
CLIP_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
CLIP_ENDS = {"stem": "pre_layrnorm", "norm": "post_layernorm"}
CLIP_POSITIONS = {"positions": "embeddings.position_embedding.weight"}
CLIP_PATCHES = {"patch.weight": "embeddings.patch_embedding.weight", "cls": "embeddings.class_embedding"}
CLIP_WORDS = {"tokens.weight": "embeddings.token_embedding.weight"}
CLIP_VISION = Names(CLIP_LAYERS, CLIP_PARTS, CLIP_QKV, CLIP_ENDS, CLIP_PATCHES | CLIP_POSITIONS)
CLIP_TEXT = Names(CLIP_LAYERS, CLIP_PARTS, CLIP_QKV, {"norm": "final_layer_norm"}, CLIP_WORDS | CLIP_POSITIONS)

LAYERS, OUT = "encoder.layer.{}.", "attention.output.dense"
VIT_QKV = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
VIT_ENDS = {"patch": "embeddings.patch_embeddings.projection", "norm": "layernorm"}
VIT_TENSORS = {"cls": "embeddings.cls_token", "positions": "embeddings.position_embeddings"}
VIT_PARTS = ("layernorm_before", "layernorm_after", OUT, "intermediate.dense", "output.dense")
VIT = Names(LAYERS, VIT_PARTS, VIT_QKV, VIT_ENDS, VIT_TENSORS)
DINOV2 = Names(LAYERS, ("norm1", "norm2", OUT, "mlp.fc1", "mlp.fc2"), VIT_QKV, VIT_ENDS, VIT_TENSORS)
GIANT = Names(LAYERS, ("norm1", "norm2", OUT, "mlp.weights_in", "mlp.weights_out"), VIT_QKV, VIT_ENDS, VIT_TENSORS)
DINOV3_PARTS = ("norm1", "norm2", "attention.o_proj", "mlp.up_proj", "mlp.down_proj")
DINOV3_QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
DINOV3_ENDS = {"patch": "embeddings.patch_embeddings", "norm": "norm"}
DINOV3 = Names("layer.{}.", DINOV3_PARTS, DINOV3_QKV, DINOV3_ENDS, {"cls": "embeddings.cls_token"})

BERT_PARTS = ("attention.output.LayerNorm", "output.LayerNorm", OUT, "intermediate.dense", "output.dense")
BERT_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")
BERT_STEM, BERT_WORDS = {"stem": "embeddings.LayerNorm"}, "embeddings.word_embeddings.weight"
BERT_TENSORS = {"tokens.weight": BERT_WORDS, "positions": "embeddings.position_embeddings.weight"}
BERT = Names(LAYERS, BERT_PARTS, BERT_QKV, BERT_STEM, BERT_TENSORS)
DISTILBERT_PARTS = ("sa_layer_norm", "output_layer_norm", "attention.out_lin", "ffn.lin1", "ffn.lin2")
DISTILBERT_QKV = ("attention.q_lin", "attention.k_lin", "attention.v_lin")
DISTILBERT = Names("transformer.layer.{}.", DISTILBERT_PARTS, DISTILBERT_QKV, BERT_STEM, BERT_TENSORS)


def _vit(t: Tensors, names: Names = VIT) -> dict[str, Tensor]:
    """Class token and positions without the batch axis they are stored with."""
    out = names(t)
    return out | {"cls": out["cls"].flatten(), "positions": out["positions"].flatten(0, 1)}


def _registers(t: Tensors) -> dict[str, Tensor]:
    tokens = t.get("embeddings.register_tokens")
    return {} if tokens is None or not tokens.numel() else {"registers": tokens.flatten(0, 1)}


def _scales(t: Tensors, names: Names) -> dict[str, Tensor]:
    """LayerScale."""
    places = [(i, n) for i in range(names.count(t)) for n in (1, 2)]
    return {f"blocks.{i}.scale{n}": t[f"{names.layers.format(i)}layer_scale{n}.lambda1"] for i, n in places}


def _dinov2(t: Tensors) -> dict[str, Tensor]:
    names = GIANT if "encoder.layer.0.mlp.weights_in.weight" in t else DINOV2
    return _vit(t, names) | _scales(t, names) | _registers(t)


def _dinov3(t: Tensors) -> dict[str, Tensor]:
    """Positions are rotary; the biases that there are not (that of keys) are zero."""
    t, zero = dict(t), torch.zeros(len(t["norm.weight"]))
    for layer in map(DINOV3.layers.format, range(DINOV3.count(t))):
        for part in DINOV3_QKV:
            t.setdefault(f"{layer}{part}.bias", zero)
        for part in ("weight", "bias"):
            if (gate := t.get(f"{layer}mlp.gate_proj.{part}")) is not None:
                t[f"{layer}mlp.up_proj.{part}"] = torch.cat([gate, t[f"{layer}mlp.up_proj.{part}"]])
    return DINOV3(t) | {"cls": t["embeddings.cls_token"].flatten()} | _scales(t, DINOV3) | _registers(t)


def bert(t: Tensors) -> dict[str, Tensor]:
    return BERT(t) | {"types": t["embeddings.token_type_embeddings.weight"][0]}


def _distilbert(t: Tensors) -> dict[str, Tensor]:
    return DISTILBERT(t) | {"types": t[BERT_WORDS].new_zeros(t[BERT_WORDS].shape[1])}  # it has no token types


# ------------------------------------------------------------------------------------------------------------ families

BASE: Raw = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
_CLIP_BASE: Raw = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_CLIP_SIGHT = _CLIP_BASE | {"patch_size": 32, "image_size": 224}
_CLIP_SIZES = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
_CLIP_WORDS = _CLIP_BASE | _CLIP_SIZES | {"vocab_size": 49408, "max_position_embeddings": 77}
_DINOV2_BASE = {"layer_norm_eps": 1e-6, "mlp_ratio": 4, "patch_size": 14, "image_size": 518}
_REGISTERS_BASE = _DINOV2_BASE | {"num_register_tokens": 4}
_DINOV3_SIZES = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
_DINOV3_BASE: Raw = _DINOV3_SIZES | {"layer_norm_eps": 1e-5, "patch_size": 16, "image_size": 224}
_DINOV3_BASE |= {"rope_theta": 100.0, "use_gated_mlp": False, "num_register_tokens": 0}
_BERT_BASE = {"vocab_size": 30522, "max_position_embeddings": 512}
_ROBERTA_BASE = {"vocab_size": 50265, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}
_DINOV2_OWN, _BERT_OWN = {"layer_scale": True, "patch_bias": True}, {"norm": "post", "pool": "mean"}
_REGISTERS_OWN = _DINOV2_OWN | {"resample": "bicubic, smoothed"}
# positions are of patches' middles, from -1 to 1 across the image, times 2 π
_DINOV3_OWN = _DINOV2_OWN | {"learned_positions": False, "rope_span": 4 * math.pi, "rope_start": 0.5, "rope_zero": 0.5}
WHOLE = ("clip", "siglip", "siglip2")  # model types with a section for each tower
ROBERTAS = ("roberta", "xlm-roberta", "camembert")
ALIASES = {  # DistilBERT's names of these fields
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}


@dataclass(frozen=True)
class Family:
    """A kind of tower (`model_type`): its tensors, the prefix that a larger model puts before their names, what
    `transformers` assumes where config.json says nothing (beside BASE), the fields of `TowerConfig` that are its own,
    and what its pixels are normalized with unless the folder says otherwise."""

    reader: Reader
    prefix: str
    base: Raw
    own: Raw
    pixels: tuple[tuple, tuple] = (HALF, HALF)

    def shape(self, raw: Raw) -> TowerConfig:
        """From the config.json of a tower alone or of a whole CLIP."""
        section = "vision_config" if "patch_size" in self.base else "text_config"
        if raw.get("model_type") in WHOLE:  # early ones have each section twice
            raw = (raw.get(section) or {}) | (raw.get(f"{section}_dict") or {})
        c = BASE | self.base | {ALIASES.get(name, name): value for name, value in raw.items()}
        if c["hidden_act"] not in ACTS:
            raise RamatchError(f"activation '{c['hidden_act']}' is not known to ramatch (known: {', '.join(ACTS)})")
        act, mlp = ACTS[c["hidden_act"]], c["intermediate_size"]
        if "mlp_ratio" in self.base:
            mlp = int(c["mlp_ratio"] * c["hidden_size"])
        if section == "vision_config":
            own = self.own | self._sight(c, mlp)
        else:
            own = self.own | {"vocab": c["vocab_size"], "context": c["max_position_embeddings"] - first_position(raw)}
        if c.get("use_swiglu_ffn"):  # DINOv2's giant: two thirds as wide, a multiple of 8, with a gate
            act, mlp, own = "silu", (int(mlp * 2 / 3) + 7) // 8 * 8, own | {"gated": True}
        sizes = (c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], mlp)
        return TowerConfig(*sizes, act, c["layer_norm_eps"], **own)

    def _sight(self, c: Raw, mlp: int) -> Raw:
        """Fields of a vision tower that config.json tells."""
        side = math.isqrt(c["num_patches"]) * c["patch_size"] if "num_patches" in self.base else c["image_size"]
        found: Raw = {"patch": c["patch_size"], "image": side}
        if "num_register_tokens" in self.base:
            found["registers"] = c["num_register_tokens"]
        if "rope_theta" in self.base:
            found |= {"rope_base": c["rope_theta"], "gated": c["use_gated_mlp"]}
        if "pool_heads" in self.own:
            found |= {"pool_heads": c["num_attention_heads"], "pool_mlp": mlp}
        return found

    def read(self, tensors: Tensors, where: str, config: TowerConfig) -> dict[str, Tensor]:
        """Tensors of a file, with the prefix or without it: some releases and models with heads write it."""
        return join_query(translate(self.reader, take(tensors, self.prefix) or tensors, where), config.pool_heads)


def first_position(raw: Raw) -> int:
    """RoBERTa's positions begin after that of the padding token."""
    padding = raw.get("pad_token_id")
    return 0 if raw.get("model_type") not in ROBERTAS else 2 if padding is None else padding + 1


_IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)
CLIP_SEES = Family(CLIP_VISION, "vision_model.", _CLIP_SIGHT, {"stem_norm": True}, (CLIP_MEAN, CLIP_STD))
CLIP_READS = Family(CLIP_TEXT, "text_model.", _CLIP_WORDS, {"causal": True})
VISION = {
    "dinov2": Family(_dinov2, "dinov2.", _DINOV2_BASE, _DINOV2_OWN, _IMAGENET),
    "dinov2_with_registers": Family(_dinov2, "dinov2_with_registers.", _REGISTERS_BASE, _REGISTERS_OWN, _IMAGENET),
    "dinov3_vit": Family(_dinov3, "dinov3_vit.", _DINOV3_BASE, _DINOV3_OWN, _IMAGENET),
    "vit": Family(_vit, "vit.", {"patch_size": 16, "image_size": 224}, {"patch_bias": True}),
    "clip": CLIP_SEES,
    "clip_vision_model": CLIP_SEES,
}
TEXT = {
    "bert": Family(bert, "bert.", _BERT_BASE, _BERT_OWN),
    **dict.fromkeys(ROBERTAS, Family(bert, "roberta.", _ROBERTA_BASE, _BERT_OWN)),
    "distilbert": Family(_distilbert, "distilbert.", _BERT_BASE | {"num_hidden_layers": 6}, _BERT_OWN),
    "clip": CLIP_READS,
    "clip_text_model": CLIP_READS,
}


def load(folder: Path, name: str, raw: Raw) -> Backbone:
    """A CLIP, a CLIP's vision tower alone that has its projection, or a dual encoder of a DINOv2 and a BERT as
    `transformers` writes it, with our pooling in the `ramatch` section of its config.json."""
    dual = raw["model_type"] == "vision-text-dual-encoder"
    ours = _pooling(raw, name) if dual else {}
    sees, reads = (VISION["dinov2"], TEXT["bert"]) if dual else (CLIP_SEES, CLIP_READS)
    tensors = read_weights(folder)
    if "visual_projection.weight" not in tensors:
        raise RamatchError(f"'{name}' has no visual projection, so its features do not live in a joint space")

    def part(family: Family, section: str, prefix: str, head: str) -> Part:
        state = translate(family.reader, take(tensors, prefix), name)
        return Part(family.shape(raw[section] if dual else raw), state, {"weight": need(tensors, head, name)})

    vision = part(sees, "vision_config", "vision_model.", "visual_projection.weight")
    text, tokenizer, side = None, None, vision.config.image
    if dual or (raw["model_type"] == "clip" and "text_projection.weight" in tensors):
        text = part(reads, "text_config", "text_model.", "text_projection.weight")
        # MiniLM's longest position is 512 but its sentences are short; labels never need more than 128 tokens
        tokenizer = Tokenizer.from_folder(folder, min(text.config.context, 128 if dual else text.config.context))
    preprocess = read_preprocess(folder, ours.pop("image_size", (side, side)), sees.pixels)
    return assemble(vision, text, preprocess, tokenizer, name=name, **logits(tensors) | ours)


def _pooling(raw: Raw, name: str) -> Raw:
    """Our section of a dual encoder's config.json."""
    if raw.get("ramatch") is None:
        raise RamatchError(
            f"'{name}' pools its text with BERT's own pooler; ramatch reads mean-pooled dual encoders, as "
            "`ramatch align` writes them"
        )
    wanted = ("global_pool", "image_size", "logit_scale")
    if missing := [key for key in wanted if key not in raw["ramatch"]]:
        raise RamatchError(f"'{name}': the 'ramatch' section of config.json lacks {', '.join(missing)}")
    kinds = raw["vision_config"].get("model_type"), raw["text_config"].get("model_type")
    if kinds != ("dinov2", "bert"):
        raise RamatchError(f"'{name}' joins {kinds[0]} and {kinds[1]}; ramatch reads DINOv2 with BERT")
    return {key: raw["ramatch"][key] for key in wanted}
