"""Random Hugging Face models on disk, and comparison with our backbone's features."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn


def lively(model: nn.Module, std: float = 0.1, seed: int = 0) -> nn.Module:
    """Weights large enough that norms, biases, LayerScale and positions all matter."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim:  # the logit scale stays
                p.add_(torch.randn(p.shape, generator=g), alpha=std)
    return model.eval()


def word_tokenizer(words: str, start: str, end: str, vocab: int) -> Tokenizer:
    """Words split at spaces; `start` and `end` are the last two ids."""
    names = dict.fromkeys(["[PAD]", "[UNK]", *words.split()])
    ids = {w: i for i, w in enumerate(names)} | {start: vocab - 2, end: vocab - 1}
    inner = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(start, vocab - 2), (end, vocab - 1)]
    )
    return inner


def dual_encoder(
    folder: Path, dinov2, bert, *, image_size=(28, 28), dim=24, pool="cls", tokenizer=None
) -> dict[str, Tensor]:
    """A folder of a DINOv2 and a BERT, both of `transformers`, joined under their names on disk; the projections."""
    heads = {
        "visual_projection.weight": torch.randn(dim, dinov2.config.hidden_size) * 0.2,
        "text_projection.weight": torch.randn(dim, bert.config.hidden_size) * 0.2,
    }
    tensors = dict(heads)
    for part, model in (("vision_model", dinov2), ("text_model", bert)):
        model.save_pretrained(folder / part)
        tensors |= {f"{part}.{k}": v for k, v in load_file(folder / part / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "vision-text-dual-encoder",
        "projection_dim": dim,
        "vision_config": json.loads((folder / "vision_model" / "config.json").read_text()),
        "text_config": json.loads((folder / "text_model" / "config.json").read_text()),
        "ramatch": {"image_size": list(image_size), "logit_scale": 50.0, "global_pool": pool},
    }
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return heads


def near(ours: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Largest difference within `tolerance` of the largest value (and of 1)."""
    assert ours.shape == expected.shape
    gap = (ours - expected).abs().max().item()
    assert gap <= tolerance * max(1.0, expected.abs().max().item()), f"largest difference {gap:.2e}"


def clip_vision_head(hidden: Tensor, tensors: dict[str, Tensor], eps: float = 1e-5) -> Tensor:
    """post_layernorm and projection of every token, from the tensors on disk."""
    weight, bias = (tensors[f"vision_model.post_layernorm.{p}"] for p in ("weight", "bias"))
    return F.layer_norm(hidden, weight.shape, weight, bias, eps) @ tensors["visual_projection.weight"].T
