"""Broad-vocabulary training: tags mined from captions together with labelled data.

RAM's contrastive loss likes many labels. Captioned images know their tags, labelled images their labels; what an image's
source does not tell is left out of the loss (−1), and so are tags too close in meaning to a positive one to be called absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..align.tags import mine_tags
from ..config import RAMConfig
from ..data.annotations import Annotations
from ..model.backbone import Backbone
from ..model.io import save_ram
from ..model.ram import RAM
from .kept import FitConfig, fit, keep


@dataclass(frozen=True)
class BroadTargets:
    """names (N,): labels first, then tags; targets int8 (images, N): 1 present, 0 absent, −1 not known."""

    names: tuple[str, ...]
    targets: Tensor


def broad_targets(
    backbone: Backbone,
    keys: Sequence[str],
    captions: dict[str, Sequence[str]],
    annotations: Annotations,
    *,
    max_tags: int = 1500,
    min_images: int = 12,
    ignore_above: float = 0.6,
) -> BroadTargets:
    """What is known of each image in `keys`, from its captions, its labels, or both."""
    captioned = [key for key in keys if key in captions]
    tags = mine_tags([captions[key] for key in captioned], min_images=min_images, max_tags=max_tags)
    names = (*annotations.classes, *(t for t in tags.names if t not in set(annotations.classes)))
    column = {name: i for i, name in enumerate(names)}
    with torch.inference_mode():
        words = F.normalize(backbone.encode_text(names).float(), dim=-1)
        close = (words @ words.T > ignore_above).cpu()
    targets = torch.full((len(keys), len(names)), -1, dtype=torch.int8)
    columns = torch.tensor([column[t] for t in tags.names], dtype=torch.long)
    row_of = {key: i for i, key in enumerate(captioned)}
    labels_of = {record.key: record.labels for record in annotations.records}
    labels = torch.tensor([column[c] for c in annotations.classes])
    for i, key in enumerate(keys):
        if key in row_of:
            here = columns[tags.targets[row_of[key]]]
            near = close[here].any(0) if len(here) else torch.zeros(len(names), dtype=torch.bool)
            targets[i, columns] = 0
            targets[i, near] = -1
            targets[i, here] = 1
        if key in labels_of:  # annotations are complete, captions are not: labels win
            targets[i, labels] = 0
            targets[i, [column[c] for c in labels_of[key]]] = 1
    return BroadTargets(names, targets)


def adapt(
    backbone: Backbone,
    pixels: Tensor,
    broad: BroadTargets,
    out: str | Path,
    *,
    ram: RAMConfig,
    config: FitConfig,
    views: int = 3,
    seed: int = 0,
    with_backbone: bool = False,
    background: Sequence[str] = (),
) -> dict[str, Any]:
    """Train adapters on uint8 images (n, 3, h, w) with broad targets and write a model folder."""
    torch.manual_seed(seed)
    model = RAM(backbone, ram).to(backbone.device)
    kept = keep(model, pixels, views, seed=seed)
    log = fit(model, kept, broad.targets.float(), list(broad.names), config, seed)
    model.background = tuple(background)
    save_ram(model.eval(), out, with_backbone=with_backbone, half=True)
    return log
