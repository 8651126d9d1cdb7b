"""LESA: a few attentions that all labels share; each label takes the one that suits it best.

Huynh, Elhamifar, "A Shared Multi-Attention Framework for Multi-Label Zero-Shot Learning", CVPR 2020. As there: M
attentions over regions, softmax of W₂ tanh(W₁ f), give M features h; a label's vector, mapped to their space, scores
each of them, and its score is the highest; four losses: ranking of present over absent labels (hinge of all pairs),
diversity (cosines between attention maps), relevance (of each attention to a present label), distribution (all
attentions are used).

What differs: frozen features of this backbone in the place of VGG-19's, text features in the place of GloVe's. What had
to be decided, the paper's text not being at hand: one hidden layer for all attentions; relevance is the hinge by which
an attention stays below the plain mean of the regions on that present label where it does best; distribution is
M Σ q², less one, of the soft choice q among attentions that present labels make, mean over the batch; means
in the place of sums over pairs, attentions and images. The weights of the losses are believed to be the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import RAMConfig
from ..modeling.backbone import Backbone
from ..modeling.losses import pairwise
from ..modeling.ram import Labels
from ..settings import Count, NotNegative, Settings
from .base import Method, MethodOutput, products, scaled, unit


@dataclass(frozen=True)
class LESASettings(Settings):
    attentions: Count = 10
    hidden: Count = 512
    diversity: NotNegative = 1e-2
    relevance: NotNegative = 1e-3
    distribution: NotNegative = 1e-1


class LESA(Method):
    name = "lesa"
    settings_type = LESASettings
    settings: LESASettings

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: LESASettings) -> None:
        super().__init__(backbone, config, settings)
        d, hidden = backbone.dim, settings.hidden
        self.attend = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, settings.attentions))
        self.semantic = nn.Linear(d, d, bias=False)

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        regions = scaled(regions)
        attention = self.attend(regions).softmax(1).transpose(1, 2)  # (B, attentions, M)
        names = self.semantic(labels.directions.to(image.dtype))
        scores = products(attention.to(regions.dtype) @ regions, names)  # (B, attentions, N)
        best, chosen = scores.max(1)
        where = attention.transpose(1, 2).gather(2, chosen[:, None].expand(-1, regions.shape[1], -1))
        return best, where, (attention, scores, products(regions.mean(1), names)) if self.training else ()

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        attention, scores, plain = (x.float() for x in output.extra)
        s, loss = self.settings, pairwise(output.image, targets).mean()
        loss = loss + s.diversity * diversity(attention) + s.relevance * relevance(scores, plain, targets)
        return loss + s.distribution * distribution(scores, targets)


def diversity(attention: Tensor) -> Tensor:
    """Mean cosine of two different attention maps, of (B, attentions, M)."""
    maps = unit(attention)
    count, cosines = attention.shape[1], maps @ maps.transpose(1, 2)
    return (cosines.sum((1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(-1)).mean() / max(1, count * (count - 1))


def relevance(scores: Tensor, plain: Tensor, targets: Tensor) -> Tensor:
    """By how much attentions stay below the regions' mean on each one's best present label: of scores (B, attentions,
    N) and those of the mean (B, N)."""
    positive = targets[:, None] > 0
    gain = (scores - plain[:, None]).masked_fill(~positive, float("-inf")).amax(-1)
    return torch.where(positive.any(-1), (-gain).clamp(min=0), 0.0).mean()


def distribution(scores: Tensor, targets: Tensor) -> Tensor:
    """How unevenly the batch's present labels choose among attentions: 0 if evenly, attentions − 1 if all the same."""
    positive = (targets > 0).float()
    chosen = (scores.softmax(1) * positive[:, None]).sum((0, 2)) / positive.sum().clamp(min=1)
    return len(chosen) * chosen.square().sum() - (positive.sum() > 0).float()
