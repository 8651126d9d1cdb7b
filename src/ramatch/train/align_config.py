"""Settings of an alignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..settings import Bound, Count, Natural, NotNegative, OneOf, Positive, Settings, Share


@dataclass(frozen=True)
class AlignConfig(Settings):
    """Defaults are the ones `ramatch-mini` was aligned with."""

    image_size: Count = 196
    dim: Count = 384
    global_pool: Annotated[str, OneOf(("cls", "cls+mean"))] = (
        "cls+mean"  # one visual head for class token and patches; global feature is their sum
    )
    saa_layers: Annotated[int, Bound(-1)] = (
        0  # last layers whose self-aware attention makes the regions; 0: the tower's final patches
    )
    vision_layers: Natural = 2  # last vision layers that are tuned
    epochs: Count = 30
    batch_size: Annotated[int, Bound(2)] = 512
    lr_heads: NotNegative = 1e-3
    lr_text: NotNegative = 5e-5  # text layers; the word embeddings stay frozen
    lr_vision: NotNegative = 3e-5
    lr_scale: NotNegative = 1e-2
    weight_decay: NotNegative = 0.05
    warmup: NotNegative = 0.06
    clip: Positive = 1.0
    beta: Positive = 20.0  # log-mean-exp pooling of regions
    caption_weight: NotNegative = 1.0
    tag_weight: NotNegative = 1.0
    tag_across: Share = 0.5  # share of the tag loss that compares images for one tag rather than tags for one image
    even_tags: bool = True  # there every tag counts alike, however many images have it
    # share of the negatives, the likeliest ones, left out after a quarter of training: captions omit much
    leave_out: Annotated[float, Bound(0, 0.5, below=True)] = 0.003
    max_tags: Count = 6000
    min_images: Count = 5  # a tag must occur in the captions of this many images
    ignore_above: NotNegative = (
        0.6  # tags this close to a positive one (cosine of the untuned text tower) are no negatives
    )
    mosaics: NotNegative = (
        0.5  # pictures of four images, with the tags of all four, for each image of a batch (0: none)
    )
    views: Count = 4  # augmented views of each image; their frozen layers are computed once and kept
    crop: Annotated[float, Bound(0, 1, above=True)] = 0.5  # smallest share of the image a view keeps
    average: Annotated[float, Bound(0, 1, below=True)] = (
        0.0  # share of training, at its end, over which weights are averaged (0: off)
    )
    seed: int = 0
