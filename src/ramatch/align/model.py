"""Joining a vision tower and a text tower into one backbone with fresh projections."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import RamatchError
from ..model import _names
from ..model.backbone import Backbone
from ..model.loading import _download, _weights, bert_config, dinov2_config, read_json
from ..model.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from ..model.tokenizer import Tokenizer


def join_towers(vision: str | Path, text: str | Path, *, image_size: int, dim: int, global_pool: str) -> Backbone:
    """A DINOv2 folder or hub id and a BERT-type one (mean-pooled sentence encoder) → an unaligned `Backbone`."""
    folders = [Path(p) if Path(p).is_dir() else _download(str(p)) for p in (vision, text)]
    configs = [read_json(f / "config.json") for f in folders]
    for folder, config, wanted in zip(folders, configs, ("dinov2", "bert"), strict=True):
        if config.get("model_type") != wanted:
            raise RamatchError(
                f"{folder.name} is a '{config.get('model_type')}' model; this side needs a '{wanted}' one"
            )
    v, t = dinov2_config(configs[0]), bert_config(configs[1])
    if image_size % v.patch:
        raise RamatchError(f"image size {image_size} is not a multiple of the patch size {v.patch}")
    tokenizer = Tokenizer.from_folder(folders[1], min(t.context, 64))
    model = Backbone(
        v, t, dim, Preprocess((image_size, image_size), IMAGENET_MEAN, IMAGENET_STD), tokenizer,
        global_pool=global_pool, name=f"{folders[0].name}+{folders[1].name}",
    )  # fmt: skip
    model.vision.load_state_dict(_names.read(_names.dinov2, _weights(folders[0]), str(vision)))
    words = {k.removeprefix("bert."): w for k, w in _weights(folders[1]).items()}
    assert model.text is not None
    assert model.text_projection is not None
    model.text.load_state_dict(_names.read(_names.bert, words, str(text)))
    for head in (model.visual_projection, model.text_projection):
        nn.init.orthogonal_(head.weight)
    return resize_positions(model, image_size)


def resize_positions(model: Backbone, image_size: int) -> Backbone:
    """Store the position embeddings for the size in use, so that nothing is interpolated at run time."""
    import dataclasses

    tower = model.vision
    side = image_size // tower.config.patch
    with torch.no_grad():
        tower.positions = nn.Parameter(tower.grid_positions(side, side).clone(), requires_grad=False)
    tower.config = dataclasses.replace(tower.config, image=image_size)
    return model


def log_mean_exp(cosines: Tensor, beta: float, dim: int) -> Tensor:
    """Smooth maximum over `dim`: log-mean-exp with sharpness beta."""
    return (torch.logsumexp(beta * cosines, dim) - math.log(cosines.shape[dim])) / beta


def contrast(
    scores: Tensor, positive: Tensor, negative: Tensor, *, even: bool = False, leave_out: float = 0.0
) -> Tensor:
    """Each positive of a row against the row's negatives only (other positives do not compete); mean over positives.

    scores (B, T), already divided by a temperature; positive, negative: bool (B, T). `even`: the mean of each row counts alike.
    `leave_out`: this share of each row's entries, the highest negatives, is not held against the positives.
    """
    scores = scores.float()
    masked = scores.masked_fill(~negative, -1e4)
    if count := int(leave_out * scores.shape[1]):
        limit = masked.detach().topk(count, -1).values[:, -1:]
        masked = masked.masked_fill(masked.detach() >= limit, -1e4)
    losses = torch.where(positive, nn.functional.softplus(masked.logsumexp(-1, keepdim=True) - scores), 0.0)
    if not even:
        return losses.sum() / positive.sum().clamp(min=1)
    counts = positive.sum(1)
    return (losses.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)
