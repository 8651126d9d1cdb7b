"""Joining a vision tower and a text tower into one backbone with fresh projections."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import RamatchError
from ..modeling.backbone import Backbone
from ..modeling.checkpoints.files import fill
from ..modeling.checkpoints.towers import read_text, read_vision
from ..modeling.preprocess import Preprocess


def join_towers(vision: str | Path, text: str | Path, *, image_size: int, dim: int, global_pool: str) -> Backbone:
    """A vision tower and a text tower (folders or hub ids, see `towers.py`) → an unaligned `Backbone`."""
    v, t = read_vision(vision), read_text(text)
    if image_size % v.config.patch:
        raise RamatchError(f"image size {image_size} is not a multiple of the patch size {v.config.patch}")
    if t.tokenizer is None:
        raise RamatchError(f"{t.name} has no tokenizer files; put tokenizer.json beside its weights")
    model = Backbone(
        v.config, t.config, dim, Preprocess((image_size, image_size), v.mean, v.std), t.tokenizer,
        global_pool=global_pool, name=f"{v.name}+{t.name}",
    )  # fmt: skip
    fill(model.vision, v.state, v.name)
    assert model.text is not None
    assert model.text_projection is not None
    fill(model.text, t.state, t.name)
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
