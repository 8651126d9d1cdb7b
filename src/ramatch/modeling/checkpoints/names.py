"""Names of tensors on disk → names in our towers, for each family of checkpoint.

Each reader takes the tensors of a file (already without the tower's prefix) and returns our names; shapes that the config
does not tell are read off the tensors. Names on disk are stable where the libraries' in-memory names are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...errors import RamatchError

Tensors = Mapping[str, Tensor]


def take(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The tensors below `prefix`, without it."""
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def _count(tensors: Tensors, pattern: str) -> int:
    """Number of layers: one more than the highest index matched by `pattern`."""
    found = [int(m.group(1)) for name in tensors if (m := re.match(pattern, name))]
    return max(found, default=-1) + 1


def _layers(
    tensors: Tensors, count: int, source: str, pairs: Mapping[str, str], qkv: tuple[str, str, str] | None
) -> dict[str, Tensor]:
    """Blocks of a tower: `pairs` maps our part to its part on disk; `qkv` names three separate projections to fuse."""
    out = {}
    for i in range(count):
        there = source.format(i)
        for part in ("weight", "bias"):
            for ours, theirs in pairs.items():
                out[f"blocks.{i}.{ours}.{part}"] = tensors[f"{there}{theirs}.{part}"]
            if qkv:
                out[f"blocks.{i}.qkv.{part}"] = torch.cat([tensors[f"{there}{p}.{part}"] for p in qkv])
    return out


def _affine(ours: str, theirs: str, tensors: Tensors) -> dict[str, Tensor]:
    return {f"{ours}.{p}": tensors[f"{theirs}.{p}"] for p in ("weight", "bias")}


HF_CLIP = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "out": "self_attn.out_proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
HF_CLIP_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def hf_clip_vision(t: Tensors) -> dict[str, Tensor]:
    """`vision_model.*` of a Hugging Face CLIP."""
    return {
        "patch.weight": t["embeddings.patch_embedding.weight"],
        "cls": t["embeddings.class_embedding"],
        "positions": t["embeddings.position_embedding.weight"],
        **_affine("stem", "pre_layrnorm", t),
        **_affine("norm", "post_layernorm", t),
        **_layers(t, _count(t, r"encoder\.layers\.(\d+)\."), "encoder.layers.{}.", HF_CLIP, HF_CLIP_QKV),
    }


def hf_clip_text(t: Tensors) -> dict[str, Tensor]:
    """`text_model.*` of a Hugging Face CLIP."""
    return {
        "tokens.weight": t["embeddings.token_embedding.weight"],
        "positions": t["embeddings.position_embedding.weight"],
        **_affine("norm", "final_layer_norm", t),
        **_layers(t, _count(t, r"encoder\.layers\.(\d+)\."), "encoder.layers.{}.", HF_CLIP, HF_CLIP_QKV),
    }


def dinov2(t: Tensors) -> dict[str, Tensor]:
    """A Hugging Face DINOv2 (without registers)."""
    if any("weights_in" in name for name in t):
        raise RamatchError("this DINOv2 has SwiGLU layers (the giant size), which ramatch does not read; use S, B or L")
    if any("register_tokens" in name for name in t):
        raise RamatchError("this DINOv2 has register tokens, which ramatch does not read; use one without registers")
    count = _count(t, r"encoder\.layer\.(\d+)\.")
    pairs = {
        "ln1": "norm1",
        "ln2": "norm2",
        "out": "attention.output.dense",
        "fc1": "mlp.fc1",
        "fc2": "mlp.fc2",
    }
    qkv = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
    out = {
        **_affine("patch", "embeddings.patch_embeddings.projection", t),
        "cls": t["embeddings.cls_token"].flatten(),
        "positions": t["embeddings.position_embeddings"].flatten(0, 1),
        **_affine("norm", "layernorm", t),
        **_layers(t, count, "encoder.layer.{}.", pairs, qkv),
    }
    for i in range(count):
        for n in (1, 2):
            out[f"blocks.{i}.scale{n}"] = t[f"encoder.layer.{i}.layer_scale{n}.lambda1"]
    return out


def bert(t: Tensors) -> dict[str, Tensor]:
    """A Hugging Face BERT (its pooler is left out)."""
    pairs = {
        "ln1": "attention.output.LayerNorm",
        "ln2": "output.LayerNorm",
        "out": "attention.output.dense",
        "fc1": "intermediate.dense",
        "fc2": "output.dense",
    }
    qkv = ("attention.self.query", "attention.self.key", "attention.self.value")
    return {
        "tokens.weight": t["embeddings.word_embeddings.weight"],
        "positions": t["embeddings.position_embeddings.weight"],
        "types": t["embeddings.token_type_embeddings.weight"][0],
        **_affine("stem", "embeddings.LayerNorm", t),
        **_layers(t, _count(t, r"encoder\.layer\.(\d+)\."), "encoder.layer.{}.", pairs, qkv),
    }


def vit(t: Tensors) -> dict[str, Tensor]:
    """A Hugging Face ViT (its pooler is left out)."""
    pairs = {
        "ln1": "layernorm_before",
        "ln2": "layernorm_after",
        "out": "attention.output.dense",
        "fc1": "intermediate.dense",
        "fc2": "output.dense",
    }
    qkv = ("attention.attention.query", "attention.attention.key", "attention.attention.value")
    return {
        **_affine("patch", "embeddings.patch_embeddings.projection", t),
        "cls": t["embeddings.cls_token"].flatten(),
        "positions": t["embeddings.position_embeddings"].flatten(0, 1),
        **_affine("norm", "layernorm", t),
        **_layers(t, _count(t, r"encoder\.layer\.(\d+)\."), "encoder.layer.{}.", pairs, qkv),
    }


def distilbert(t: Tensors) -> dict[str, Tensor]:
    """A Hugging Face DistilBERT, which has no token types."""
    pairs = {
        "ln1": "sa_layer_norm",
        "ln2": "output_layer_norm",
        "out": "attention.out_lin",
        "fc1": "ffn.lin1",
        "fc2": "ffn.lin2",
    }
    qkv = ("attention.q_lin", "attention.k_lin", "attention.v_lin")
    words = t["embeddings.word_embeddings.weight"]
    return {
        "tokens.weight": words,
        "positions": t["embeddings.position_embeddings.weight"],
        "types": words.new_zeros(words.shape[1]),
        **_affine("stem", "embeddings.LayerNorm", t),
        **_layers(t, _count(t, r"transformer\.layer\.(\d+)\."), "transformer.layer.{}.", pairs, qkv),
    }


OPENAI = {"ln1": "ln_1", "ln2": "ln_2", "out": "attn.out_proj", "fc1": "mlp.c_fc", "fc2": "mlp.c_proj"}


def _openai_blocks(t: Tensors) -> dict[str, Tensor]:
    """`transformer.resblocks.*`: fused in_proj (OpenAI, open_clip) or qkv (the authors' program)."""
    count = _count(t, r"transformer\.resblocks\.(\d+)\.")
    out = _layers(t, count, "transformer.resblocks.{}.", OPENAI, None)
    for i in range(count):
        for part in ("weight", "bias"):
            fused, split = (f"transformer.resblocks.{i}.attn.{n}{part}" for n in ("in_proj_", "qkv."))
            out[f"blocks.{i}.qkv.{part}"] = t[split] if split in t else t[fused]
    return out


def openai_vision(t: Tensors) -> dict[str, Tensor]:
    """`visual.*` of OpenAI's, open_clip's ViT or the authors' state dict."""
    if "conv1.weight" not in t or "class_embedding" not in t:
        raise RamatchError("the vision tower of this state dict is not a plain ViT (ResNet or timm tower?)")
    if any(name.startswith("attn_pool") for name in t):
        raise RamatchError("this ViT ends in attention pooling (CoCa), which ramatch does not read")
    if any(name.endswith(".ls_1.gamma") for name in t):
        raise RamatchError("this ViT has LayerScale, which ramatch does not read in open_clip's form")
    stem = _affine("stem", "ln_pre", t) if "ln_pre.weight" in t else {}
    return {
        "patch.weight": t["conv1.weight"],
        "cls": t["class_embedding"],
        "positions": t["positional_embedding"],
        **stem,
        **_affine("norm", "ln_post", t),
        **_openai_blocks(t),
    }


def openai_text(t: Tensors) -> dict[str, Tensor]:
    """The text tower of OpenAI's, open_clip's or the authors' state dict (tensors of the vision tower are ignored)."""
    return {
        "tokens.weight": t["token_embedding.weight"],
        "positions": t["positional_embedding"],
        **_affine("norm", "ln_final", t),
        **_openai_blocks({k: v for k, v in t.items() if not k.startswith("visual.")}),
    }


def read(reader: Callable[[Tensors], dict[str, Tensor]], tensors: Tensors, what: str) -> dict[str, Tensor]:
    """Run a reader; a missing name becomes an error that says which file part is not what it claims to be."""
    try:
        return {name: value.float() for name, value in reader(tensors).items()}
    except KeyError as error:
        raise RamatchError(
            f"{what}: tensor {error} is missing, so this is not the architecture its config says"
        ) from None
    except RamatchError as error:
        raise RamatchError(f"{what}: {error}") from None
