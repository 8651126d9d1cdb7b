"""The towers that can be joined: vision and text transformers of several families, read from their own folders.

Vision: DINOv2, ViT (also DINO and MAE in ViT's form), the image tower of any CLIP. Text: BERT, RoBERTa and XLM-RoBERTa, DistilBERT (sentence
encoders are one of these, mean-pooled), the text tower of any CLIP. Whatever else `load_backbone` reads gives its tower too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import RamatchError
from ..preprocess import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD
from ..tokenizer import Tokenizer
from ..backbone import TowerConfig
from . import names as _names
from .loading import (
    _act,
    _clip_tower,
    _download,
    _preprocess,
    _weights,
    bert_config,
    dinov2_config,
    load_backbone,
    read_json,
)

LONGEST = 64  # tokens of a caption


@dataclass(frozen=True)
class Vision:
    """A vision tower: its shape, its weights under our names, and what its pixels are normalised with."""

    name: str
    config: TowerConfig
    state: dict[str, Tensor]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Text:
    """A text tower: its shape, its weights under our names, and its tokenizer."""

    name: str
    config: TowerConfig
    state: dict[str, Tensor]
    tokenizer: Tokenizer | None


Reader = Callable[[_names.Tensors], dict[str, Tensor]]


def vit_config(raw: dict[str, Any]) -> TowerConfig:
    """From a ViT config.json (its defaults are the base size)."""
    return TowerConfig(
        raw.get("hidden_size", 768), raw.get("num_hidden_layers", 12), raw.get("num_attention_heads", 12),
        raw.get("intermediate_size", 3072), _act(raw.get("hidden_act", "gelu")), raw.get("layer_norm_eps", 1e-12),
        patch=raw.get("patch_size", 16), image=raw.get("image_size", 224), patch_bias=True,
    )  # fmt: skip


def roberta_config(raw: dict[str, Any]) -> TowerConfig:
    """From a RoBERTa or XLM-RoBERTa config.json, whose positions begin after that of the padding token."""
    base = bert_config({"vocab_size": 50265, "max_position_embeddings": 514, "layer_norm_eps": 1e-5} | raw)
    return TowerConfig(**{**vars(base), "context": base.context - _first_position(raw)})


def _first_position(raw: dict[str, Any]) -> int:
    padding = raw.get("pad_token_id")
    return (1 if padding is None else padding) + 1


def distilbert_config(raw: dict[str, Any]) -> TowerConfig:
    """From a DistilBERT config.json."""
    return TowerConfig(
        raw.get("dim", 768), raw.get("n_layers", 6), raw.get("n_heads", 12), raw.get("hidden_dim", 3072),
        _act(raw.get("activation", "gelu")), 1e-12, norm="post", vocab=raw.get("vocab_size", 30522),
        context=raw.get("max_position_embeddings", 512), pool="mean",
    )  # fmt: skip


def read_vision(name: str | Path) -> Vision:
    """The vision tower of a folder, a hub id or a state-dict file."""
    folder, raw, kind = _open(name)
    here = folder.name
    if kind in ("dinov2", "vit"):
        reader: Reader = {"dinov2": _names.dinov2, "vit": _names.vit}[kind]
        config = dinov2_config(raw) if kind == "dinov2" else vit_config(raw)
        own = (IMAGENET_MEAN, IMAGENET_STD) if kind == "dinov2" else (HALF, HALF)
        state = _names.read(reader, _bare(_weights(folder), kind), here)
    elif kind in ("clip", "clip_vision_model"):
        from transformers import CLIPConfig, CLIPVisionConfig

        c: Any = CLIPConfig.from_dict(raw).vision_config if kind == "clip" else CLIPVisionConfig.from_dict(raw)
        config = _clip_tower(c, patch=c.patch_size, image=c.image_size, stem_norm=True)
        own = (CLIP_MEAN, CLIP_STD)
        state = _names.read(_names.hf_clip_vision, _part(_weights(folder), "vision_model."), here)
    elif kind in TEXT or kind == "clip_text_model":
        raise RamatchError(f"{here} is a '{kind}' model, which has no vision tower; give it as --text")
    else:
        whole = load_backbone(name)
        pre, tower = whole.preprocess, whole.vision
        return Vision(here, tower.config, dict(tower.state_dict()), pre.mean, pre.std)
    pre = _preprocess(folder, (config.image, config.image), *own)
    return Vision(here, config, state, pre.mean, pre.std)


def read_text(name: str | Path) -> Text:
    """The text tower of a folder, a hub id or a state-dict file."""
    folder, raw, kind = _open(name)
    here = folder.name
    if kind in TEXT:
        shape, reader, prefix = TEXT[kind]
        config, tensors = shape(raw), _bare(_weights(folder), prefix)
        state = _names.read(reader, tensors, here)
        if shape is roberta_config:
            state["positions"] = state["positions"][_first_position(raw) :]
    elif kind in ("clip", "clip_text_model"):
        from transformers import CLIPConfig, CLIPTextConfig

        c: Any = CLIPConfig.from_dict(raw).text_config if kind == "clip" else CLIPTextConfig.from_dict(raw)
        config = _clip_tower(c, vocab=c.vocab_size, context=c.max_position_embeddings, causal=True)
        state = _names.read(_names.hf_clip_text, _part(_weights(folder), "text_model."), here)
    elif kind in ("dinov2", "vit", "clip_vision_model"):
        raise RamatchError(f"{here} is a '{kind}' model, which has no text tower; give it as --vision")
    else:
        whole = load_backbone(name)
        tower = whole.require_text("--text")
        return Text(here, tower.config, dict(tower.state_dict()), whole.tokenizer)
    return Text(here, config, state, Tokenizer.from_folder(folder, min(config.context, LONGEST)))


TEXT: dict[str, tuple[Callable[[dict[str, Any]], TowerConfig], Reader, str]] = {
    "bert": (bert_config, _names.bert, "bert"),
    "roberta": (roberta_config, _names.bert, "roberta"),
    "xlm-roberta": (roberta_config, _names.bert, "roberta"),
    "camembert": (roberta_config, _names.bert, "roberta"),
    "distilbert": (distilbert_config, _names.distilbert, "distilbert"),
}


def _open(name: str | Path) -> tuple[Path, dict[str, Any], str]:
    """Folder, config and kind of model ('' where there is no config.json)."""
    path = Path(name)
    if path.is_file():
        return path, {}, ""
    folder = path if path.is_dir() else _download(str(name))
    raw = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return folder, raw, raw.get("model_type", "")


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """One tower of two; a tower alone is written with the prefix by some releases and without it by others."""
    return _names.take(tensors, prefix) or tensors


def _bare(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Without the prefix that a model with a head puts before its tower's names."""
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items()}
