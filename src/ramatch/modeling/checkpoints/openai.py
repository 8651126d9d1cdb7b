"""State dicts in OpenAI's names: OpenAI's CLIP, open_clip's ViT (bare or in its folder), the authors' program."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import RamatchError
from ..backbone import Backbone, TowerConfig
from ..preprocess import CLIP_MEAN, CLIP_STD, Preprocess
from .files import Names, Part, Tensors, assemble, logit_scale, need, read_config, read_weights, take, translate
from .tokenizer import Tokenizer

HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}  # open_clip's ViT-H, g and bigG; every other width has heads of 64
LAYERS = "transformer.resblocks.{}."
PARTS = ("ln_1", "ln_2", "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
PATCHES = {"patch.weight": "conv1.weight", "cls": "class_embedding", "positions": "positional_embedding"}
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
        raise RamatchError("this ViT ends in attention pooling (CoCa), which ramatch does not read")
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
    return from_state_dict(
        read_weights(folder),
        name=name,
        act="quick_gelu" if cfg.get("quick_gelu") else "gelu",
        tokenizer=Tokenizer.from_folder(folder, words.get("context_length", 77)),
        heads=(cfg["vision_cfg"].get("head_width", 64), words.get("heads")),
        pixels=(tuple(pre.get("mean", CLIP_MEAN)), tuple(pre.get("std", CLIP_STD))),
    )


def from_state_dict(
    tensors: dict[str, Tensor],
    *,
    name: str,
    act: str | None = None,
    tokenizer: Tokenizer | None = None,
    heads: tuple[int | None, int | None] = (None, None),
    pixels: tuple[tuple, tuple] = (CLIP_MEAN, CLIP_STD),
) -> Backbone:
    """A backbone from OpenAI's names (also open_clip's ViT, with or without its `text.` prefix). `heads`: width of the
    vision tower's and number of the text tower's, where they are known; `pixels`: their mean and deviation."""
    if not any(k.startswith("visual.") for k in tensors):
        raise RamatchError(f"{name}: no tensor starts with 'visual.', so this is not an OpenAI or open_clip state dict")
    act = act or _guess_activation(tensors, name)
    seen, words = take(tensors, "visual."), take(tensors, "text.") or tensors
    state = translate(vision, seen, name)
    width, patch = state["patch.weight"].shape[0], state["patch.weight"].shape[-1]
    side = round((len(state["positions"]) - 1) ** 0.5) * patch
    head_width = heads[0] or HEAD_WIDTHS.get(width, 64)
    tower = _tower(state, width // head_width, act, patch=patch, image=side, stem_norm="stem.weight" in state)
    head, text_part = need(seen, "proj", name).T, None
    if "token_embedding.weight" in words:
        read = translate(text, words, name)
        (vocab, w), context = read["tokens.weight"].shape, len(read["positions"])
        shape = _tower(read, heads[1] or w // 64, act, vocab=vocab, context=context, causal=True)
        text_part = Part(shape, read, need(words, "text_projection", name).T)
        tokenizer = tokenizer or Tokenizer.clip(context)
    elif any(k.startswith("text.") for k in tensors):
        raise RamatchError(
            f"{name}: its text tower is not CLIP's own (a Hugging Face one?), which ramatch does not read here"
        )
    preprocess, scale = Preprocess((side, side), *pixels), logit_scale(tensors)
    return assemble(Part(tower, state, head), text_part, preprocess, tokenizer, name=name, logit_scale=scale)


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
