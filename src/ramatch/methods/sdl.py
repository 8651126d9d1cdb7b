"""SDL: an image is several vectors, and a label is compared with the one that is nearest to it.

Ben-Cohen, Zamir, Ben-Baruch, Friedman, Zelnik-Manor, "Semantic Diversity Learning for Zero-Shot Multi-label
Classification", ICCV 2021. As there: a linear layer turns the global feature into an embedding matrix A of M principal
vectors; score of label y = max_m ⟨A_m, y⟩; RankNet's log(1 + exp(s_absent − s_present)) over all pairs of an image,
weighted by the diversity of what it shows, 1 + the variance of its present labels' vectors summed over dimensions, and
a regularisation by the variance of A's rows, summed likewise; (1 − λ) rank + λ regularisation, mean over images. M is 7
for NUS-WIDE and 2 for COCO, as RAM's paper has it.

What differs: the backbone is frozen, and the label's text feature stands in the place of its word vector. Believed to
be the paper's, without its text at hand: the exact form of the two variances (here the population's), the mean over
an image's pairs, λ.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..config import RAMConfig
from ..modeling.backbone import Backbone
from ..modeling.losses import pairwise
from ..modeling.ram import Labels
from ..settings import Count, Settings, Share
from .base import Method, MethodOutput, products, scaled


@dataclass(frozen=True)
class SDLSettings(Settings):
    vectors: Count = 7  # M
    regularization: Share = 0.3  # λ


class SDL(Method):
    name = "sdl"
    settings_type = SDLSettings
    settings: SDLSettings

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: SDLSettings) -> None:
        super().__init__(backbone, config, settings)
        self.embedding = nn.Linear(backbone.dim, settings.vectors * backbone.dim)

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        matrix = self.embedding(scaled(image)).unflatten(-1, (self.settings.vectors, -1))  # A: (B, M, D)
        scores = products(matrix, labels.directions).amax(1)
        return scores, None, (matrix, labels.directions) if self.training else ()

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        matrix, names = (x.float() for x in output.extra)
        share, spread = self.settings.regularization, matrix.var(1, correction=0).sum(-1)
        rank = (1 + diversity(names[: targets.shape[1]], targets)) * pairwise(output.image, targets, smooth=True)
        return ((1 - share) * rank + share * spread).mean()


def diversity(names: Tensor, targets: Tensor) -> Tensor:
    """Variance of the vectors (N, D) of each image's present labels, summed over dimensions, (B,)."""
    positive = (targets > 0).float()
    count = positive.sum(1, keepdim=True).clamp(min=1)
    mean, square = positive @ names / count, positive @ names.square().sum(-1, keepdim=True) / count
    return (square[:, 0] - mean.square().sum(-1)).clamp(min=0)
