"""BiAM: regions enriched by each other and by the scene, then matched with the labels one by one and pooled last.

Narayan, Gupta, Khan, Khan, Shao, Shah, "Discriminative Region-based Multi-Label Zero-Shot Learning", ICCV 2021. As
there: a bi-level attention module, whose region block is multi-head self-attention with a residual and a light residual
network of 1×1 convolutions, and whose scene block weights channels by what their mean over the picture says; both are
joined by a 1×1 convolution and mapped to the labels' space; scores of regions, (B, M, N), are pooled by the mean of
each label's k highest; ranking loss.

What differs: frozen features of this backbone in the place of VGG-19's, text features in the place of GloVe's. What had
to be decided, the paper's text not being at hand: k, the number of heads, the scene block's form (mean over regions,
two layers, sigmoid; residual), and the mean over an image's pairs in the loss. Weights of the loss against the
imbalance of classes are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import RAMConfig
from ..modeling.backbone import Backbone
from ..modeling.losses import pairwise
from ..modeling.ram import Labels
from ..settings import Count, Settings
from .base import Method, MethodOutput, check_heads, products, scaled, top_mean


@dataclass(frozen=True)
class BiAMSettings(Settings):
    heads: Count = 8
    top_k: Count = 10


class BiAM(Method):
    name = "biam"
    settings_type = BiAMSettings
    settings: BiAMSettings

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: BiAMSettings) -> None:
        super().__init__(backbone, config, settings)
        d = backbone.dim
        check_heads(settings.heads, d)
        self.qkv, self.merge = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.region = nn.Sequential(nn.Linear(d, d), nn.LeakyReLU(0.2), nn.Linear(d, d))
        self.scene = nn.Sequential(nn.Linear(d, d), nn.LeakyReLU(0.2), nn.Linear(d, d), nn.Sigmoid())
        self.join, self.semantic = nn.Linear(2 * d, d), nn.Linear(d, d)

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        enriched = self.enrich(scaled(regions))
        return *top_mean(products(self.semantic(enriched), labels.directions), self.settings.top_k), ()

    def enrich(self, x: Tensor) -> Tensor:
        """The bi-level attention module: regions (B, M, D) in the light of each other and of the scene."""
        heads = (part.unflatten(-1, (self.settings.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        near = x + self.merge(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        near = near + self.region(near)
        far = x + x * self.scene(x.mean(1, keepdim=True))
        return self.join(torch.cat([near, far], -1))

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        return pairwise(output.image, targets).mean()
