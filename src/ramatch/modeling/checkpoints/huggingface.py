"""Hugging Face models by their names on disk: CLIP, DINOv2, ViT (also DINO and MAE in ViT's form), BERT, RoBERTa and
XLM-RoBERTa, DistilBERT. Text towers are mean-pooled, as sentence encoders are, and poolers left out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import RamatchError
from ..backbone import Backbone, TowerConfig
from ..preprocess import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD
from .files import (
    Names,
    Part,
    Reader,
    Tensors,
    assemble,
    logit_scale,
    need,
    read_preprocess,
    read_weights,
    take,
    translate,
)
from .tokenizer import Tokenizer

Raw = dict[str, Any]  # of a config.json
ACTS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

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


def _dinov2(t: Tensors) -> dict[str, Tensor]:
    if any("weights_in" in name for name in t):
        raise RamatchError("this DINOv2 has SwiGLU layers (the giant size), which ramatch does not read; use S, B or L")
    if any("register_tokens" in name for name in t):
        raise RamatchError("this DINOv2 has register tokens, which ramatch does not read; use one without registers")
    places = [(i, n) for i in range(DINOV2.count(t)) for n in (1, 2)]
    scales = {f"blocks.{i}.scale{n}": t[f"encoder.layer.{i}.layer_scale{n}.lambda1"] for i, n in places}
    return _vit(t, DINOV2) | scales


def _bert(t: Tensors) -> dict[str, Tensor]:
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
_BERT_BASE = {"vocab_size": 30522, "max_position_embeddings": 512}
_ROBERTA_BASE = {"vocab_size": 50265, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}
_DINOV2_OWN, _BERT_OWN = {"layer_scale": True, "patch_bias": True}, {"norm": "post", "pool": "mean"}
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
        if raw.get("model_type") == "clip":  # early ones have each section twice
            raw = (raw.get(section) or {}) | (raw.get(f"{section}_dict") or {})
        c = BASE | self.base | {ALIASES.get(name, name): value for name, value in raw.items()}
        if c["hidden_act"] not in ACTS:
            raise RamatchError(f"activation '{c['hidden_act']}' is not known to ramatch (known: {', '.join(ACTS)})")
        if section == "vision_config":
            own = self.own | {"patch": c["patch_size"], "image": c["image_size"]}
        else:
            own = self.own | {"vocab": c["vocab_size"], "context": c["max_position_embeddings"] - first_position(raw)}
        mlp = int(c["mlp_ratio"] * c["hidden_size"]) if "mlp_ratio" in self.base else c["intermediate_size"]
        sizes = (c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], mlp)
        return TowerConfig(*sizes, ACTS[c["hidden_act"]], c["layer_norm_eps"], **own)

    def read(self, tensors: Tensors, where: str) -> dict[str, Tensor]:
        """Tensors of a file, with the prefix or without it: some releases and models with heads write it."""
        return translate(self.reader, take(tensors, self.prefix) or tensors, where)


def first_position(raw: Raw) -> int:
    """RoBERTa's positions begin after that of the padding token."""
    padding = raw.get("pad_token_id")
    return 0 if raw.get("model_type") not in ROBERTAS else 2 if padding is None else padding + 1


CLIP_SEES = Family(CLIP_VISION, "vision_model.", _CLIP_SIGHT, {"stem_norm": True}, (CLIP_MEAN, CLIP_STD))
CLIP_READS = Family(CLIP_TEXT, "text_model.", _CLIP_WORDS, {"causal": True})
VISION = {
    "dinov2": Family(_dinov2, "dinov2.", _DINOV2_BASE, _DINOV2_OWN, (IMAGENET_MEAN, IMAGENET_STD)),
    "vit": Family(_vit, "vit.", {"patch_size": 16, "image_size": 224}, {"patch_bias": True}),
    "clip": CLIP_SEES,
    "clip_vision_model": CLIP_SEES,
}
TEXT = {
    "bert": Family(_bert, "bert.", _BERT_BASE, _BERT_OWN),
    **dict.fromkeys(ROBERTAS, Family(_bert, "roberta.", _ROBERTA_BASE, _BERT_OWN)),
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
        return Part(family.shape(raw[section] if dual else raw), state, need(tensors, head, name))

    vision = part(sees, "vision_config", "vision_model.", "visual_projection.weight")
    text, tokenizer, side = None, None, vision.config.image
    if dual or (raw["model_type"] == "clip" and "text_projection.weight" in tensors):
        text = part(reads, "text_config", "text_model.", "text_projection.weight")
        # MiniLM's longest position is 512 but its sentences are short; labels never need more than 128 tokens
        tokenizer = Tokenizer.from_folder(folder, min(text.config.context, 128 if dual else text.config.context))
    preprocess = read_preprocess(folder, ours.pop("image_size", (side, side)), sees.pixels)
    return assemble(vision, text, preprocess, tokenizer, name=name, **{"logit_scale": logit_scale(tensors)} | ours)


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
