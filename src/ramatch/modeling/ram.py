"""RAM: recover, match, score (Section 4)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import PRESETS, RAMConfig
from .backbone import Backbone
from .losses import LOSSES, Gather
from .matching import Match, match
from .preprocess import HALF, Preprocess
from .region_set import RegionSet, Streams, Trunk
from .text import LabelSet


@dataclass(frozen=True)
class Labels:
    """An encoded vocabulary: names, unit features, the features TSS looks at, DualCoOp's negatives; each (N + K, D), where
    the last K belong to the background: labels that compete in matching but are not asked for."""

    names: tuple[str, ...]
    unit: Tensor
    tss: Tensor
    negative: Tensor | None = None

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Output:
    """Scores s_R and s_G (B, N), cosines of regions and labels (B, M, N), each label's best region (B, N), the match.

    `mass`: what one column of the plan carries (1 / number of labels matched, background included)."""

    region: Tensor
    image: Tensor
    sim: Tensor
    match: Match
    grid: tuple[int, int]
    mass: float

    @property
    def best(self) -> Tensor:
        return self.sim.amax(1)


class Scored(Protocol):
    """What a score is made of: s_R, s_G and, where the settings ask for it, each label's best region; (B, N) each."""

    @property
    def region(self) -> Tensor: ...
    @property
    def image(self) -> Tensor: ...
    @property
    def best(self) -> Tensor | None: ...


class RAM(nn.Module):
    """A frozen backbone and the few parts that learn: TSS and visual prompts, label prompts, two temperatures."""

    def __init__(self, backbone: Backbone, config: RAMConfig = PRESETS["ramatch"]) -> None:
        super().__init__()
        self.backbone, self.config = backbone, config
        self.background: tuple[str, ...] = ()  # always matched along with the vocabulary, outside training
        self.region_set = RegionSet(backbone, config)
        self.label_set = LabelSet(backbone, config)
        self.tau_global = nn.Parameter(torch.tensor(config.tau_global or 1 / backbone.logit_scale))
        self.tau_region = nn.Parameter(torch.tensor(config.tau_region or 1 / backbone.logit_scale))

    @property
    def preprocess(self) -> Preprocess:
        own = self.backbone.preprocess
        mean, std = (HALF, HALF) if self.config.pixels == "half" else (own.mean, own.std)
        return Preprocess(own.size, mean, std, self.config.resize)

    def adapters(self) -> dict[str, Tensor]:
        """State of everything that is not the frozen backbone."""
        return {k: v for k, v in self.state_dict().items() if not k.startswith("backbone.")}

    def train(self, mode: bool = True) -> RAM:
        super().train(mode)
        self.backbone.eval()
        return self

    def with_config(self, config: RAMConfig) -> RAM:
        """This model (the same modules and weights) with other settings of matching and scores."""
        twin = copy.copy(self)
        twin.config = config
        return twin

    def encode_labels(self, names: Sequence[str]) -> Labels:
        """Vocabulary → `Labels`; differentiable in the label prompts.

        With a background, a label competes with the same everyday things whether one label is asked for or a thousand.
        """
        extra: tuple[str, ...] = ()
        if self.background and not self.training:
            asked = {name.lower() for name in names}
            extra = tuple(name for name in self.background if name.lower() not in asked)
        raw = self.label_set(self.backbone, (*names, *extra))
        positive, negative = (raw[0], F.normalize(raw[1], dim=-1)) if raw.ndim == 3 else (raw, None)
        unit = F.normalize(positive, dim=-1)
        return Labels(tuple(names), unit, unit if self.config.tss_labels == "unit" else positive, negative)

    def trunk(self, pixels: Tensor | Streams) -> Trunk:
        """Everything about normalised pixels (B, 3, H, W), or their kept stem, that no vocabulary changes."""
        return self.region_set.trunk(self.backbone, pixels)[0]

    def similarity(self, features: Tensor, labels: Labels) -> Tensor:
        """Cosine of features (..., D) with each label (..., N); DualCoOp's negatives are subtracted."""
        features = F.normalize(features, dim=-1)
        sim = features @ labels.unit.T.to(features.dtype)
        return sim if labels.negative is None else sim - features @ labels.negative.T.to(features.dtype)

    def recognise(
        self, trunk: Trunk, labels: Labels, teacher: Tensor | None = None, targets: Tensor | None = None
    ) -> Output:
        """Match a trunk's regions with the labels and score them (Eq. 13)."""
        regions = self.region_set.regions(self.backbone, trunk, labels.tss)
        sim = self.similarity(regions, labels).float()
        pooled = trunk.image
        if self.config.pooled == "adapted":
            pooled = self.backbone.pool(pooled, regions)
        image = self.similarity(pooled, labels).float()
        found = match(sim, self.backbone.logit_scale, self.config, teacher, targets)
        n, mass = len(labels), 1 / sim.shape[-1]
        if sim.shape[-1] > n:  # the background has done its part
            sim, image = sim[..., :n], image[:, :n]
            found = Match(found.plan[..., :n], found.marginal, found.n_iter)
        region = (found.plan * sim).sum(1) / mass
        if self.config.max_weight:
            region = torch.lerp(region, sim.amax(1), self.config.max_weight)
        if self.config.plan_scale == "one":
            region = region * mass
        return Output(region, image, sim, found, trunk.grid, mass)

    def forward(
        self, pixels: Tensor | Streams, labels: Sequence[str] | Labels, targets: Tensor | None = None
    ) -> Output:
        """Normalised pixels (B, 3, H, W) (or their kept stem) and N labels → `Output`. With targets (B, N) the teacher guides the plan."""
        names = labels.names if isinstance(labels, Labels) else tuple(labels)
        encoded = labels if isinstance(labels, Labels) else self.encode_labels(names)
        guided = targets is not None and self.config.matcher == "kcot" and self.config.tkt
        trunk, teacher = self.region_set.trunk(self.backbone, pixels, teacher=guided)
        if teacher is not None:
            with torch.no_grad():
                frozen = F.normalize(self.label_set.frozen(self.backbone, names), dim=-1)
                teacher = F.normalize(teacher, dim=-1) @ frozen.T.to(teacher.dtype)
        return self.recognise(trunk, encoded, teacher, targets)

    def loss(self, output: Output, targets: Tensor, kind: str = "mmc", gather: Gather | None = None) -> Tensor:
        """L_R + L_G (Eq. 14), each with its own learnable temperature."""
        options = {"gather": gather} if gather is not None and kind.startswith("mmc") else {}
        function = LOSSES[kind]
        region, image = output.region / self.tau_region, output.image / self.tau_global
        return function(region, targets, **options) + function(image, targets, **options)

    def score(self, output: Scored, rule: str | None = None) -> Tensor:
        """One number per image and label (B, N), for ranking: see `RAMConfig.score`, which `rule` replaces."""
        rule = rule or self.config.score
        if rule in ("cosine", "partial"):
            region = output.region
            if self.config.best_share:
                assert output.best is not None
                region = torch.lerp(region, output.best, self.config.best_share)
            mean = torch.lerp(output.image, region, self.config.region_share)
            if rule == "cosine":
                return mean
            # between cosine and softmax: a part of what all labels of the image have in common is taken off
            mean = mean * (self.backbone.logit_scale / 2)
            return mean - self.config.partial_share * mean.logsumexp(-1, keepdim=True)
        region, image = output.region / self.tau_region, output.image / self.tau_global
        if rule == "joint":
            return ((region + image) / 2).softmax(-1)
        return (region.softmax(-1) + image.softmax(-1)) / 2
