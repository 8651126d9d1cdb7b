"""Models of real size with random weights, a tokenizer and labels of realistic length: speed needs no download."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ramatch.config import RAMConfig, preset
from ramatch.modeling.backbone import Backbone, TowerConfig
from ramatch.modeling.checkpoints.tokenizer import Tokenizer
from ramatch.modeling.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from ramatch.modeling.ram import RAM, Labels

from .measure import Row, seconds_per_call

CLIP_VISION = TowerConfig(768, 12, 12, 3072, patch=16, image=224, stem_norm=True)
CLIP_TEXT = TowerConfig(512, 12, 8, 2048, vocab=49408, context=77, causal=True)
DINO_VISION = TowerConfig(
    384, 12, 6, 1536, act="gelu", eps=1e-6, layer_scale=True, patch=14, image=196, patch_bias=True
)
MINI_TEXT = TowerConfig(384, 6, 12, 1536, act="gelu", eps=1e-12, norm="post", vocab=30522, context=128, pool="mean")
TINY_VISION = TowerConfig(64, 4, 2, 128, patch=16, image=64, stem_norm=True)  # for trying the bench itself
TINY_TEXT = TowerConfig(64, 4, 2, 128, vocab=49408, context=77, causal=True)
SIZES = {
    "clip-b16": (CLIP_VISION, CLIP_TEXT, 512),
    "mini": (DINO_VISION, MINI_TEXT, 384),
    "tiny": (TINY_VISION, TINY_TEXT, 64),
}
WORDS = 9000


def word_tokenizer(config: TowerConfig) -> Tokenizer:
    """Whole words, so that "A photo of a w17 w4." has as many tokens as a label of two common words has with CLIP's
    own."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "A", "photo", "of", "a", ".", *(f"w{i}" for i in range(WORDS))]
    start, end = config.vocab - 2, config.vocab - 1
    ids = {word: i for i, word in enumerate(words)} | {"<s>": start, "</s>": end}
    inner = Inner(models.WordLevel(ids, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    return Tokenizer(inner, config.context)


def label_names(count: int, seed: int = 0) -> list[str]:
    """Different labels of one to three words, mostly one."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), count, replacement=True, generator=g) + 1
    found: dict[str, None] = {}
    while len(found) < count:
        words = torch.randint(WORDS, (int(lengths[len(found)]),), generator=g).tolist()
        found[" ".join(f"w{w}" for w in words)] = None
    return list(found)


def random_ram(
    size: str,
    config: str | RAMConfig,
    device: torch.device,
    *,
    text: bool = True,
    backbone_dtype: torch.dtype = torch.float32,
) -> RAM:
    """RAM in evaluation mode whose parts are all alive."""
    vision, words, dim = SIZES[size]
    dino = vision.layer_scale
    pixels = Preprocess((vision.image, vision.image), *((IMAGENET_MEAN, IMAGENET_STD) if dino else ()))
    torch.manual_seed(0)
    with device:  # weights are made where they are used
        backbone = Backbone(
            vision,
            words if text else None,
            dim,
            pixels,
            word_tokenizer(words) if text else None,
            global_pool="cls+mean" if dino else "cls",
            name=f"random-{size}",
        )
        ram = RAM(backbone, preset(config) if isinstance(config, str) else config)
        with torch.no_grad():
            for name, p in ram.named_parameters():
                if name.endswith(("positions", "vision.cls", "text.types")):
                    p.normal_(std=0.1)
                elif name.endswith("back.weight"):  # zero at first in some presets, which would hide what it does
                    p.normal_(std=p.shape[1] ** -0.5)
    ram.to(device).eval()
    backbone.to(backbone_dtype)
    return ram


def random_labels(count: int, dim: int, device: torch.device) -> Labels:
    """A vocabulary of random unit features: regions differ in what they resemble, so transport has work to do."""
    g = torch.Generator().manual_seed(count)
    raw = torch.randn(count, dim, generator=g).to(device)
    return Labels(tuple(f"label {i}" for i in range(count)), normalize(raw, dim=-1), raw)


def random_images(batch: int, size: Sequence[int], device: torch.device, sets: int = 2) -> list[Tensor]:
    """Several batches of uint8 noise (B, 3, H, W), to be used in turn so that no cache holds them."""
    return [torch.randint(0, 256, (batch, 3, *size), dtype=torch.uint8, device=device) for _ in range(sets)]


@dataclass
class Bench:
    """What lines share: sizes, and rates that later lines compare with."""

    device: torch.device
    size: str = "clip-b16"
    batches: tuple[int, int] = (32, 512)
    train_batches: tuple[int, int] = (32, 256)
    labels: int = 1006
    many_labels: int = 20_000
    train_labels: int = 925
    new_labels: int = 1000
    budget: float = 1.0  # seconds a measurement may take
    compiled: bool = False  # also measure plain CLIP under torch.compile (takes a minute to compile)
    model: str | None = None  # for the lines that start `ramatch tag`; None: the bundled one if it is there
    rates: dict[Any, float] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        return SIZES[self.size][2]

    @property
    def pixels(self) -> tuple[int, int]:
        side = SIZES[self.size][0].image
        return side, side

    @property
    def half(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def rate(self, call: Callable[[], object], images: int) -> float:
        """Images per second."""
        return images / seconds_per_call(call, self.device, budget=self.budget)

    def images(self, batch: int) -> Iterator[Tensor]:
        """Batches of uint8 images without end, two in turn."""
        return itertools.cycle(random_images(batch, self.pixels, self.device))

    def vocabulary(self, count: int | None = None) -> Labels:
        return random_labels(count or self.labels, self.dim, self.device)


Line = Callable[[Bench], Iterator[Row]]
