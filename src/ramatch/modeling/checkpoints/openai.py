"""State dicts in OpenAI's names: OpenAI's CLIP, open_clip's models (bare or in their folder), the authors' program."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import RamatchError
from ..backbone import Backbone
from ..preprocess import CLIP_MEAN, CLIP_STD, Preprocess
from ..towers import TowerConfig
from . import huggingface, timm
from .files import (
    HEAD_WIDTHS,
    Names,
    Part,
    Tensors,
    assemble,
    logits,
    need,
    read_config,
    read_tensors,
    read_weights,
    take,
    translate,
)
from .tokenizer import Tokenizer

Raw = dict[str, Any]  # of a part of open_clip_config.json

LAYERS = "transformer.resblocks.{}."
PARTS = ("ln_1", "ln_2", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
PATCHES = {"patch.weight": "conv1.weight", "cls": "class_embedding", "positions": "positional_embedding"}
OWN_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
CLIP_VOCAB = 49408
PAD = 1  # of SigLIP, where the folder does not say
WORDS = {"tokens.weight": "token_embedding.weight", "positions": "positional_embedding"}


def _read(names: Names, t: Tensors) -> dict[str, Tensor]:
    """A tower whose query, key and value are one: in_proj (OpenAI, open_clip) or qkv (the authors' program)."""
    out = names(t)
    for i in range(names.count(t)):
        for part in ("weight", "bias"):
            fused, split = (f"{LAYERS.format(i)}attn.{n}{part}" for n in ("in_proj_", "qkv."))
            out[f"blocks.{i}.qkv.{part}"] = t[split] if split in t else t[fused]
    return out


def vision(t: Tensors) -> dict[str, Tensor]:
    """`visual.*`"""
    if "conv1.weight" not in t or "class_embedding" not in t:
        raise RamatchError("the vision tower of this state dict is not a plain ViT (ResNet or timm tower?)")
    if any(name.startswith("attn_pool") for name in t):
        raise RamatchError(
            "this ViT ends in attention pooling (CoCa, or a Perception Encoder in Meta's own form: take open_clip's), "
            "which ramatch does not read"
        )
    if any(name.endswith(".ls_1.gamma") for name in t):
        raise RamatchError("this ViT has LayerScale, which ramatch does not read in open_clip's form")
    stem = {"stem": "ln_pre"} if "ln_pre.weight" in t else {}
    return _read(Names(LAYERS, PARTS, (), stem | {"norm": "ln_post"}, PATCHES), t)


def text(t: Tensors) -> dict[str, Tensor]:
    """The text tower (tensors of the vision tower are ignored)."""
    own = {k: v for k, v in t.items() if not k.startswith("visual.")}
    return _read(Names(LAYERS, PARTS, (), {"norm": "ln_final"}, WORDS), own)


def load(folder: Path, name: str) -> Backbone:
    """An open_clip folder."""
    raw = read_config(folder / "open_clip_config.json")
    cfg, pre = raw["model_cfg"], raw.get("preprocess_cfg", {})
    words = cfg.get("text_cfg", {})
    tokenizer = Tokenizer.from_folder(folder, words.get("context_length", 77))
    if tokenizer is not None and words.get("pool_type") == "last":
        words = words | {"pad_id": tokenizer.for_siglip(folder, PAD).pad}
    # its repositories often hold the same model in another library's form as well
    file = next((folder / name for name in OWN_FILES if (folder / name).is_file()), None)
    return from_state_dict(
        read_weights(folder) if file is None else read_tensors(file),
        name=name,
        act="quick_gelu" if cfg.get("quick_gelu") else "gelu",
        tokenizer=tokenizer,
        pixels=(tuple(pre["mean"]), tuple(pre["std"])) if {"mean", "std"} <= set(pre) else None,
        seen=cfg["vision_cfg"],
        words=words,
    )


def from_state_dict(
    tensors: dict[str, Tensor],
    *,
    name: str,
    act: str | None = None,
    tokenizer: Tokenizer | None = None,
    pixels: tuple[tuple, tuple] | None = None,
    seen: Raw | None = None,
    words: Raw | None = None,
) -> Backbone:
    """A backbone from OpenAI's names (also open_clip's, with or without its `text.` prefix, and with timm's towers).
    `pixels`: their mean and deviation; `seen`, `words`: open_clip's configs of the two towers, where they are known."""
    if not any(k.startswith("visual.") for k in tensors):
        raise RamatchError(f"{name}: no tensor starts with 'visual.', so this is not an OpenAI or open_clip state dict")
    tower, trunk = take(tensors, "visual."), take(tensors, "visual.trunk.")
    if trunk:
        outside = {key.replace("head.proj.", "head."): value for key, value in tower.items() if "head.proj." in key}
        vision_part, act = timm.part(trunk | outside, name, (seen or {}).get("timm_model_name", "")), act or "gelu"
        pixels = pixels or timm.pixels(vision_part.config)
        if words is None and timm.is_clip(vision_part.config):  # of these MobileCLIP2-L reads texts both ways
            raise RamatchError(f"{name} does not tell how it reads texts; give its folder, with open_clip_config.json")
    else:
        act = act or _guess_activation(tensors, name)
        vision_part = _vision_part(tower, name, act, seen or {})
    text_part = _text_part(tensors, name, act, words)
    if text_part is not None and text_part.config.pool == "eot":
        reads = text_part.config
        tokenizer = tokenizer or (Tokenizer.clip(reads.context) if reads.vocab == CLIP_VOCAB else None)
        tokenizer = tokenizer and tokenizer.fill(reads.pad)
    side = vision_part.config.image
    preprocess = Preprocess((side, side), *(pixels or (CLIP_MEAN, CLIP_STD)))
    return assemble(vision_part, text_part, preprocess, tokenizer, name=name, **logits(tensors))


def _vision_part(t: Tensors, name: str, act: str, cfg: Raw) -> Part:
    """open_clip's own ViT."""
    if cfg.get("pool_type", "tok") != "tok" or cfg.get("final_ln_after_pool"):
        raise RamatchError(f"{name}: its vision tower averages its patches (CLIPA), which ramatch does not read")
    state = translate(vision, t, name)
    width, patch = state["patch.weight"].shape[0], state["patch.weight"].shape[-1]
    side = round((len(state["positions"]) - 1) ** 0.5) * patch
    heads = width // cfg.get("head_width", HEAD_WIDTHS.get(width, 64))
    config = _tower(state, heads, act, patch=patch, image=side, stem_norm="stem.weight" in state)
    return Part(config, state, {"weight": need(t, "proj", name).T})


def _text_part(tensors: Tensors, name: str, act: str, cfg: Raw | None) -> Part | None:
    """The text tower, if there is one; `cfg` is open_clip's, if it is known."""
    words, cfg = take(tensors, "text.") or tensors, {"unknown": True} if cfg is None else cfg
    if "token_embedding.weight" not in words:
        return _roberta_part(words, name, cfg) if any(k.startswith("text.") for k in tensors) else None
    siglip, both_ways = cfg.get("pool_type") == "last", bool(cfg.get("no_causal_mask"))
    if "unknown" in cfg and "logit_bias" in tensors:
        raise RamatchError(f"{name} is a SigLIP without its config; give its folder, with open_clip_config.json")
    if "cls_emb" in words:
        raise RamatchError(f"{name}: its text tower has a class token (CoCa), which ramatch does not read")
    state = translate(text, words, name)
    (vocab, width), context = state["tokens.weight"].shape, len(state["positions"])
    more: Raw = {"causal": not both_ways}
    if both_ways:  # what is filled up is read too: SigLIP, MobileCLIP2-L
        more |= {"pool": "last", "pad": cfg.get("pad_id", PAD)} if siglip else {"pad": cfg.get("pad_id", 0)}
    if (cfg.get("act_kwargs") or {}).get("approximate") == "tanh":
        act = "gelu_tanh"
    if cfg.get("proj_type") == "none":  # SigLIP So400m for many languages
        head = {"weight": torch.eye(width)}
    elif "text_projection.weight" in words:  # a module, as SigLIP's
        head = {part: words[f"text_projection.{part}"].float() for part in ("weight", "bias")}
    else:
        head = {"weight": need(words, "text_projection", name).T}
    more |= {"eps": (cfg.get("norm_kwargs") or {}).get("eps", 1e-5), "head_bias": "bias" in head}
    config = _tower(state, cfg.get("heads", width // 64), act, vocab=vocab, context=context, **more)
    return Part(config, state, head)


def _roberta_part(words: Tensors, name: str, cfg: Raw) -> Part:
    """A RoBERTa or XLM-RoBERTa of Hugging Face's with open_clip's projection; all their sizes have heads of 64."""
    kind, pooler = str(cfg.get("hf_model_name", "?")), cfg.get("hf_pooler_type", "mean_pooler")
    if "roberta" not in kind or pooler != "mean_pooler":
        raise RamatchError(
            f"{name}: its text tower is not CLIP's own but Hugging Face's '{kind}' with '{pooler}'; of those, ramatch "
            "reads RoBERTa and XLM-RoBERTa with 'mean_pooler', from a folder with open_clip_config.json"
        )
    state = translate(huggingface.bert, take(words, "transformer."), name)
    state["positions"] = state["positions"][2:]  # RoBERTa's begin after that of its padding token
    (vocab, width), context = state["tokens.weight"].shape, len(state["positions"])
    head = {key.removeprefix("proj."): value.float() for key, value in words.items() if key.startswith("proj.")}
    hidden = len(head["0.weight"]) if "0.weight" in head else 0
    more: Raw = {"norm": "post", "pool": "mean", "head_hidden": hidden}
    config = _tower(state, width // 64, "gelu", vocab=vocab, context=context, **more)
    return Part(config, state, head or {"weight": torch.eye(width)})


def _guess_activation(tensors: Tensors, name: str) -> str:
    if "input_resolution" in tensors:  # OpenAI's archives carry this number, others do not
        return "quick_gelu"
    warnings.warn(
        f"{name} does not tell its activation; assuming GELU, as most of open_clip's models have. For weights "
        "trained by OpenAI give act='quick_gelu'",
        stacklevel=4,
    )
    return "gelu"


def _tower(state: dict[str, Tensor], heads: int, act: str, **extra: Any) -> TowerConfig:
    """Shape of a tower, read off its tensors."""
    mlp, width = state["blocks.0.fc1.weight"].shape
    return TowerConfig(width, sum(name.endswith(".fc1.weight") for name in state), heads, mlp, act, **extra)
