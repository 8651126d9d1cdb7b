"""Deep0Tag: the image is a bag of instances, each is scored, and the scores are pooled.

Rahman, Khan, Barnes, "Deep0Tag: Deep Multiple Instance Learning for Zero-Shot Image Tagging", IEEE Transactions on
Multimedia 2019. As there: a bag of the whole image and its regions; each instance is mapped to the labels' space by
fully connected layers and scored by inner products with the labels' vectors; pooling over instances gives the image's
scores, by mean, maximum, log-sum-exp or a mix; RankNet's log(1 + exp(s_absent − s_present)) over all pairs of an image.

What differs: frozen patches in the place of a detector's proposals, which this backbone has not; the label's text
feature in the place of its word vector. What had to be decided, the paper's text not being at hand: which pooling
stands as default ("mix-pooling" is what RAM's paper says; half mean, half maximum here), the sharpness of log-sum-exp,
the hidden layer's size, the mean over an image's pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from ..config import RAMConfig
from ..modeling.backbone import Backbone
from ..modeling.losses import pairwise
from ..modeling.ram import Labels
from ..settings import Count, OneOf, Positive, Settings
from .base import Method, MethodOutput, products, scaled

POOLINGS = ("mix", "mean", "max", "lse")


@dataclass(frozen=True)
class Deep0TagSettings(Settings):
    pooling: Annotated[str, OneOf(POOLINGS)] = "mix"
    sharpness: Positive = 5.0  # of log-sum-exp: r in (1/r) log mean exp(r s)
    hidden: Count = 1024


class Deep0Tag(Method):
    name = "deep0tag"
    settings_type = Deep0TagSettings
    settings: Deep0TagSettings

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: Deep0TagSettings) -> None:
        super().__init__(backbone, config, settings)
        d, hidden = backbone.dim, settings.hidden
        self.semantic = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, d))

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        bag = self.semantic(scaled(torch.cat([image[:, None], regions], 1)))
        scores = products(bag, labels.directions)  # (B, 1 + M, N)
        return self.pool(scores), None if self.training else self.shares(scores[:, 1:]), ()

    def pool(self, scores: Tensor) -> Tensor:
        """Scores of instances → of the image, (B, N)."""
        kind, sharpness = self.settings.pooling, self.settings.sharpness
        if kind == "lse":
            return ((scores * sharpness).logsumexp(1) - math.log(scores.shape[1])) / sharpness
        mean, best = scores.mean(1), scores.amax(1)
        return {"mean": mean, "max": best, "mix": (mean + best) / 2}[kind]

    def shares(self, scores: Tensor) -> Tensor:
        """How much each region's score moves the pooled score of regions: its derivative."""
        kind = self.settings.pooling
        if kind == "lse":
            return (scores * self.settings.sharpness).softmax(1)
        mean = torch.full_like(scores, 1 / scores.shape[1])
        best = torch.zeros_like(scores).scatter(1, scores.argmax(1, keepdim=True), 1.0)
        return {"mean": mean, "max": best, "mix": (mean + best) / 2}[kind]

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        return pairwise(output.image, targets, smooth=True).mean()
