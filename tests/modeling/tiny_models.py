"""Tiny random backbones of both kinds, with a word tokenizer, and counters for the layers that run."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import get_args

import torch
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, processors

from ramatch.config import RAMConfig, preset
from ramatch.modeling.backbone import Backbone, TowerConfig
from ramatch.modeling.checkpoints.tokenizer import Tokenizer
from ramatch.modeling.preprocess import Preprocess
from ramatch.modeling.ram import RAM
from ramatch.settings import OneOf, field_types

VOCAB = 80
WORDS = (
    "A photo of a . cat dog red blue traffic light person riding bicycle small large very old kite in the rain".split()
)
# the names that each setting with a choice may take
CHOICES = {
    name: rule.names
    for name, kind in field_types(RAMConfig).items()
    for rule in get_args(kind)[1:]
    if isinstance(rule, OneOf)
}


def word_tokenizer(context: int) -> Tokenizer:
    """Known words, letters of unknown ones as [UNK]; `<s>` and `</s>` around each text."""
    ids = {w: i for i, w in enumerate(dict.fromkeys(["[PAD]", "[UNK]", *WORDS]))} | {
        "<s>": VOCAB - 2,
        "</s>": VOCAB - 1,
    }
    inner = Inner(models.WordLevel(ids, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", VOCAB - 2), ("</s>", VOCAB - 1)]
    )
    return Tokenizer(inner, context)


VISION = TowerConfig(64, 4, 4, 96, patch=8, image=32, stem_norm=True)  # a 4×4 grid
TEXT = TowerConfig(48, 4, 3, 96, vocab=VOCAB, context=77, causal=True)
DINO = TowerConfig(64, 4, 4, 96, act="gelu", eps=1e-6, layer_scale=True, patch=8, image=40, patch_bias=True)
BERT = TowerConfig(48, 4, 3, 96, act="gelu", eps=1e-12, norm="post", vocab=VOCAB, context=64, pool="mean")
DIM = 32


def backbone(kind: str = "clip", *, text: bool = True, seed: int = 0) -> Backbone:
    """A frozen tiny CLIP, or DINOv2 + BERT (`dual`), with weights large enough for every part to matter."""
    vision, words = (VISION, TEXT) if kind == "clip" else (DINO, BERT)
    model = Backbone(
        vision,
        words if text else None,
        DIM,
        Preprocess((32, 32)),
        word_tokenizer(words.context) if text else None,
        logit_scale=20.0,
        global_pool="cls" if kind == "clip" else "cls+mean",
        name=f"tiny-{kind}",
    )
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        one = (
            1.0
            if name.endswith(("norm.weight", "ln1.weight", "ln2.weight", "stem.weight", "scale1", "scale2"))
            else 0.0
        )
        std = 0.15 if p.ndim < 2 else p[0].numel() ** -0.5
        p.data.copy_(torch.randn(p.shape, generator=g) * std + one)
    return model.eval()


def tiny_ram(name: str | RAMConfig = "ramatch", kind: str = "clip", **changes) -> RAM:
    """RAM in eval mode whose adapters are all alive (zero-initialised ones too)."""
    changes = {"adapted_layers": 2, "prompt_layers": 2, "visual_prompts": 3} | changes
    if name != "reference":
        changes = {"saa_layers": 2} | changes
    ram = RAM(backbone(kind), preset(name, **changes) if isinstance(name, str) else name)
    g = torch.Generator().manual_seed(1)
    for key, p in ram.named_parameters():
        if not key.startswith(("backbone.", "tau")):
            p.data.add_(torch.randn(p.shape, generator=g) * (0.5 if p.ndim < 4 else p[0].numel() ** -0.5))
    return ram.eval()


def pixels(batch: int = 2, height: int = 32, width: int = 32, seed: int = 5) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))


@contextmanager
def counted(blocks):
    """Counter of calls per layer of a tower (through its feed-forward part, whichever step is used)."""
    calls: Counter[int] = Counter()
    hooks = [block.fc1.register_forward_hook(lambda *_, i=i: calls.update([i])) for i, block in enumerate(blocks)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert a.shape == b.shape
    gap = (a - b).abs().max().item()
    assert gap <= tolerance * max(1.0, b.abs().max().item()), f"largest difference {gap:.2e}"
