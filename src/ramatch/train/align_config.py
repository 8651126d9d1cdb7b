"""Settings of an alignment."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import RamatchError


@dataclass(frozen=True)
class AlignConfig:
    """Defaults are the ones `ramatch-mini` was aligned with."""

    image_size: int = 196
    dim: int = 384
    global_pool: str = "cls+mean"  # one visual head for class token and patches; global feature is their sum
    saa_layers: int = 0  # last layers whose self-aware attention makes the regions; 0: the tower's final patches
    vision_layers: int = 2  # last vision layers that are tuned
    epochs: int = 30
    batch_size: int = 512
    lr_heads: float = 1e-3
    lr_text: float = 5e-5  # text layers; the word embeddings stay frozen
    lr_vision: float = 3e-5
    lr_scale: float = 1e-2
    weight_decay: float = 0.05
    warmup: float = 0.06
    clip: float = 1.0
    beta: float = 20.0  # log-mean-exp pooling of regions
    caption_weight: float = 1.0
    tag_weight: float = 1.0
    tag_across: float = 0.5  # share of the tag loss that compares images for one tag rather than tags for one image
    even_tags: bool = True  # there every tag counts alike, however many images have it
    leave_out: float = (
        0.003  # share of the negatives, the likeliest ones, left out after a quarter of training: captions omit much
    )
    max_tags: int = 6000
    min_images: int = 5  # a tag must occur in the captions of this many images
    ignore_above: float = 0.6  # tags this close to a positive one (cosine of the untuned text tower) are no negatives
    mosaics: float = 0.5  # pictures of four images, with the tags of all four, for each image of a batch (0: none)
    views: int = 4  # augmented views of each image; their frozen layers are computed once and kept
    crop: float = 0.5  # smallest share of the image a view keeps
    average: float = 0.0  # share of training, at its end, over which weights are averaged (0: off)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 2 or self.views < 1 or self.vision_layers < 0:
            raise RamatchError("epochs and views must be at least 1, batch_size at least 2, vision_layers not negative")
        if not 0 < self.crop <= 1 or not 0 <= self.average < 1 or not 0 <= self.tag_across <= 1:
            raise RamatchError("crop must lie in (0, 1], average in [0, 1), tag_across in [0, 1]")
        if not self.mosaics >= 0:
            raise RamatchError(f"mosaics must not be negative, got {self.mosaics}")
        if not 0 <= self.leave_out < 0.5:
            raise RamatchError(f"leave_out must lie in [0, 0.5), got {self.leave_out}")
        if self.beta <= 0 or self.min_images < 1 or self.max_tags < 1 or self.dim < 1:
            raise RamatchError("beta must be positive, min_images, max_tags and dim at least 1")
        if self.global_pool not in ("cls", "cls+mean"):
            raise RamatchError(f"global_pool must be 'cls' or 'cls+mean', got '{self.global_pool}'")
