"""Directions of labels in the text space, learned from a few images.

A calibrated model's log odds of a label are a sum of cosines with one direction u, which the text tower gives. Regions
and plan held still, they are linear in it: odds(u) = odds(u₀) + slope · (u − u₀). So what images tell of a label is a
logistic regression with the text tower's direction as its prior; it takes seconds, and no other label moves. As a way
to teach CLIP from few images this is TaskRes (Yu et al., CVPR 2023); how far to go is chosen on images kept aside, for
want of which such methods fail (Silva-Rodríguez et al., CVPR 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..evaluation.calibration import Calibrator, Words
from ..modeling.matching import match
from ..modeling.ram import RAM
from ..modeling.types import Labels
from ..progress import Progress

VIEWS = 2  # of each image: as it is, and its mirror
BATCH = 32
PIECE = 1 << 26  # numbers of the slopes that are looked at together: 256 MiB
# How hard a direction is held to where it began, beside images that count one each; None: it is not moved. With 100
# training images the best lay at 10 (ucm-ov), 100 (peta-ov) and 300 to 1,000 (coco-ov).
PRIORS = (None, 3000.0, 1000.0, 300.0, 100.0, 30.0, 10.0, 3.0)
DOUBT = 2.0  # standard errors: with 1 or 0, 20 to 100 images of coco-ov now and then chose to lose up to 0.2 mAP


@dataclass(frozen=True)
class Sight:
    """What a model finds of N labels on n images, in V views each. features (n, N, 3): what calibration looks at, of
    the images as they are. odds (V, n, N): log odds; slopes float16 (V, n, N, D): how they change with the label's
    direction. words: the directions, and what else is known of the labels."""

    features: Tensor
    odds: Tensor
    slopes: Tensor
    words: Words

    @property
    def unit(self) -> Tensor:
        return self.words.unit


@torch.no_grad()
def look(ram: RAM, calibrator: Calibrator, pixels: Tensor, names: Sequence[str], *, progress: bool = False) -> Sight:
    """uint8 images (n, 3, H, W), as `preprocess` has them. The labels are matched along with the model's background."""
    n, line, found = len(pixels), Progress(VIEWS * len(pixels), "looking at images", enabled=progress), []
    slope = (calibrator.weights / calibrator.scale).float().to(ram.backbone.device)
    with _precision(ram):
        labels = ram.eval().encode_labels(names)
    for view in range(VIEWS):
        for start in range(0, n, BATCH):
            batch = pixels[start : start + BATCH].to(ram.backbone.device)
            parts = _parts(ram, batch.flip(-1) if view else batch, labels)
            features = torch.einsum("bndf,nd->bnf", parts, labels.directions[: len(labels)].float())
            found.append((features.cpu(), (parts @ slope).half().cpu()))
            line.update(view * n + start + len(batch))
    line.clear()
    features, slopes = (torch.cat(same) for same in zip(*found, strict=True))
    words = Words.of(labels)
    words = words._replace(unit=words.unit.float().cpu())
    odds = calibrator.log_odds(features).unflatten(0, (VIEWS, n))
    return Sight(features[:n], odds, slopes.unflatten(0, (VIEWS, n)), words)


def _precision(ram: RAM) -> torch.autocast:
    dtype = ram.backbone.dtype
    return torch.autocast(ram.backbone.device.type, dtype=dtype, enabled=dtype != torch.float32)


def _parts(ram: RAM, images: Tensor, labels: Labels) -> Tensor:
    """What a label's direction is multiplied with to give s_G, s_R and the best region's cosine: (B, N, D, 3)."""
    config, n, mass = ram.config, len(labels), 1 / len(labels.unit)
    with _precision(ram):
        trunk = ram.trunk(images)
        regions = ram.region_set.regions(ram.backbone, trunk, labels.tss, ram.workspace_mb)
        pooled = ram.backbone.pool(trunk.image, regions) if config.pooled == "adapted" else trunk.image
        sim = ram.similarity(regions, labels).float()
    plan = match(sim, ram.backbone.logit_scale, config, None, None).plan[..., :n].float() / mass
    sight = F.normalize(regions.float(), dim=-1)
    best = sight.take_along_dim(sim[..., :n].argmax(1)[..., None], dim=1)
    region = torch.lerp(plan.transpose(1, 2) @ sight, best, config.max_weight)
    region = region * mass if config.plan_scale == "one" else region
    return torch.stack([F.normalize(pooled.float(), dim=-1)[:, None].expand_as(best), region, best], dim=-1)


def learn(sight: Sight, targets: Tensor, rows: Sequence[int], prior: float | None) -> Tensor:
    """Directions (N, D) by the images `rows` with targets (n, N)."""
    unit, rows = sight.unit.clone(), list(rows)
    if prior is None:
        return unit
    y, size = targets[rows].float(), VIEWS * max(1, len(rows)) * unit.shape[1]
    for columns in torch.arange(len(unit)).split(max(1, PIECE // size)):
        odds, slopes = sight.odds[:, rows][..., columns].float(), sight.slopes[:, rows][:, :, columns].float()
        unit[columns] = _regress(odds, slopes, y[:, columns], unit[columns], prior)
    return unit


def _regress(odds: Tensor, slopes: Tensor, y: Tensor, start: Tensor, prior: float) -> Tensor:
    """The directions that make labels likeliest, with a prior on how far each is moved."""
    moved = torch.zeros_like(start, requires_grad=True)
    search = torch.optim.LBFGS([moved], max_iter=50, history_size=10, line_search_fn="strong_wolfe")
    wanted = y.expand_as(odds)

    def loss() -> Tensor:
        search.zero_grad()
        now = odds + torch.einsum("vnkd,kd->vnk", slopes, F.normalize(start + moved, dim=-1) - start)
        total = F.binary_cross_entropy_with_logits(now, wanted, reduction="none").mean(0).sum()
        total = total + prior * moved.square().sum()
        total.backward()
        return total

    search.step(loss)
    return F.normalize(start + moved.detach(), dim=-1)


def misses(sight: Sight, targets: Tensor, rows: Sequence[int], unit: Tensor) -> np.ndarray:
    """Log loss (rows,) of these images with other directions, summed over labels."""
    rows, total = list(rows), np.zeros(len(rows))
    wanted = targets[rows].float()
    for columns in torch.arange(len(unit)).split(max(1, PIECE // (max(1, len(rows)) * unit.shape[1]))):
        odds, slopes = sight.odds[0, rows][:, columns].float(), sight.slopes[0, rows][:, columns].float()
        now = odds + torch.einsum("nkd,kd->nk", slopes, unit[columns] - sight.unit[columns])
        total += F.binary_cross_entropy_with_logits(now, wanted[:, columns], reduction="none").sum(1).numpy()
    return total


def strictest(lost: np.ndarray) -> int:
    """Of priors in falling order, the first whose log losses (priors, n) are hardly worse than the best one's: by less
    than `DOUBT` standard errors."""
    gaps = lost - lost[lost.sum(1).argmin()]
    near = gaps.sum(1) <= DOUBT * gaps.std(1) * gaps.shape[1] ** 0.5
    return int(near.argmax())


@dataclass(frozen=True)
class Found:
    """directions: of each fold, learned without its images, with the prior that the other folds chose. prior: what all
    of them chose."""

    directions: list[Tensor]
    prior: float | None


def choose(sight: Sight, targets: Tensor, folds: Sequence[Sequence[int]]) -> Found:
    """How far to move directions, by images that were kept aside; and for each fold directions that know nothing of its
    images."""
    lost = np.zeros((len(PRIORS), len(targets)))
    found: list[list[Tensor]] = []
    for fold in folds:
        rest = sorted(set(range(len(targets))) - set(fold))
        found.append([learn(sight, targets, rest, prior) for prior in PRIORS])
        lost[:, fold] = [misses(sight, targets, fold, unit) for unit in found[-1]]
    others = [strictest(np.delete(lost, fold, axis=1)) for fold in folds]
    return Found([units[k] for units, k in zip(found, others, strict=True)], PRIORS[strictest(lost)])
