"""Dual encoders of a DINOv2 and a BERT (`vision-text-dual-encoder` as written by `transformers`), with our pooling in
the `ramatch` section of their config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import RamatchError
from ..backbone import Backbone
from ..preprocess import IMAGENET_MEAN, IMAGENET_STD
from .bert import bert, bert_config
from .dinov2 import dinov2, dinov2_config
from .files import fill, need, read_preprocess, read_weights, take, translate
from .tokenizer import Tokenizer


def load(folder: Path, name: str, raw: dict[str, Any]) -> Backbone:
    ours = raw.get("ramatch")
    if ours is None:
        raise RamatchError(
            f"'{name}' pools its text with BERT's own pooler; ramatch reads mean-pooled dual encoders, as "
            "`ramatch align` writes them"
        )
    if missing := {"image_size", "logit_scale", "global_pool"} - set(ours):
        raise RamatchError(f"'{name}': the 'ramatch' section of config.json lacks {', '.join(sorted(missing))}")
    kinds = raw["vision_config"].get("model_type"), raw["text_config"].get("model_type")
    if kinds != ("dinov2", "bert"):
        raise RamatchError(f"'{name}' joins {kinds[0]} and {kinds[1]}; ramatch reads DINOv2 with BERT")
    vision, text = dinov2_config(raw["vision_config"]), bert_config(raw["text_config"])
    tensors = read_weights(folder)
    # MiniLM's longest position is 512 but its sentences are short; labels never need more than 128 tokens
    tokenizer = Tokenizer.from_folder(folder, min(text.context, 128))
    preprocess = read_preprocess(folder, tuple(ours["image_size"]), (IMAGENET_MEAN, IMAGENET_STD))
    options = {key: ours[key] for key in ("logit_scale", "global_pool")}
    model = Backbone(vision, text, raw["projection_dim"], preprocess, tokenizer, name=name, **options)
    assert model.text is not None
    assert model.text_projection is not None
    fill(model.vision, translate(dinov2, take(tensors, "vision_model."), name), name)
    fill(model.text, translate(bert, take(tensors, "text_model."), name), name)
    fill(model.visual_projection, {"weight": need(tensors, "visual_projection.weight", name)}, name)
    fill(model.text_projection, {"weight": need(tensors, "text_projection.weight", name)}, name)
    return model
