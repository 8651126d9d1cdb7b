"""Joining a vision tower and a text tower into one backbone with fresh projections."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from ..errors import RamatchError
from ..modeling.backbone import Backbone
from ..modeling.checkpoints.files import fill
from ..modeling.checkpoints.loading import read_text, read_vision
from ..modeling.preprocess import Preprocess


def join_towers(vision: str | Path, text: str | Path, *, image_size: int, dim: int, global_pool: str) -> Backbone:
    """A vision tower and a text tower (folders or hub ids, see `read_vision`) → an unaligned `Backbone`."""
    v, t = read_vision(vision), read_text(text)
    if image_size % v.config.patch:
        raise RamatchError(f"image size {image_size} is not a multiple of the patch size {v.config.patch}")
    if t.tokenizer is None:
        raise RamatchError(f"{t.name} has no tokenizer files; put tokenizer.json beside its weights")
    preprocess, name = Preprocess((image_size, image_size), v.mean, v.std), f"{v.name}+{t.name}"
    model = Backbone(v.config, t.config, dim, preprocess, t.tokenizer, global_pool=global_pool, name=name)
    fill(model.vision, v.state, v.name)
    assert model.text is not None
    assert model.text_projection is not None
    fill(model.text, t.state, t.name)
    for head in (model.visual_projection, model.text_projection):
        nn.init.orthogonal_(head.weight)
    return resize_positions(model, image_size)


def resize_positions(model: Backbone, image_size: int) -> Backbone:
    """Store the position embeddings for the size in use, so that nothing is interpolated at run time."""
    tower = model.vision
    side = image_size // tower.config.patch
    with torch.no_grad():
        tower.positions = nn.Parameter(tower.grid_positions(side, side).clone(), requires_grad=False)
    tower.config = dataclasses.replace(tower.config, image=image_size)
    return model
