"""ML-Decoder: each label's text is a query that looks at the patches, and one shared layer says whether it is there.

Ridnik, Sharir, Ben-Cohen, Ben-Baruch, Noy, "ML-Decoder: Scalable and Versatile Classification Head", WACV 2023, in its
zero-shot form. As there: queries are label vectors through a learned projection, patches go through another with ReLU;
one decoder layer without self-attention (its residual and norm stay): cross-attention, feed-forward; full decoding, so
that the group projection is one shared layer D → 1; asymmetric loss; 768 wide, 8 heads, feed-forward 2,048.

What differs: the backbone is frozen, and the label's text feature stands in the place of its word vector. The paper's
augmentations of queries are left out: how they are made is not known here in enough detail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import RAMConfig
from ..modeling.backbone import Backbone
from ..modeling.losses import asl
from ..modeling.ram import Labels
from ..settings import Count, NotNegative, Settings, Share
from .base import Method, MethodOutput, check_heads, scaled


@dataclass(frozen=True)
class MLDecoderSettings(Settings):
    width: Count = 768
    heads: Count = 8
    hidden: Count = 2048
    dropout: Share = 0.1
    gamma_pos: NotNegative = 0.0
    gamma_neg: NotNegative = 4.0
    clip: Share = 0.05

    def check(self) -> None:
        check_heads(self.heads, self.width)


class MLDecoder(Method):
    name = "ml-decoder"
    settings_type = MLDecoderSettings
    settings: MLDecoderSettings

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: MLDecoderSettings) -> None:
        super().__init__(backbone, config, settings)
        width, hidden, dropout = settings.width, settings.hidden, settings.dropout
        self.queries, self.patches = nn.Linear(backbone.dim, width), nn.Linear(backbone.dim, width)
        self.attention = nn.MultiheadAttention(width, settings.heads, dropout, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, width))
        self.norms, self.dropout = nn.ModuleList(nn.LayerNorm(width) for _ in range(3)), nn.Dropout(dropout)
        self.group = nn.Linear(width, 1)

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        patches = F.relu(self.patches(scaled(regions)))
        query = self.queries(scaled(labels.unit.to(image.dtype)))
        query = self.norms[0](query + self.dropout(query)).expand(len(image), -1, -1)
        # the weights of attention, which grow with the vocabulary, are for people to look at: not made in training
        looks = not self.training
        found, where = self.attention(query, patches, patches, need_weights=looks)
        query = self.norms[1](query + self.dropout(found))
        query = self.norms[2](query + self.dropout(self.feed(query)))
        return self.group(query)[..., 0].float(), where.transpose(1, 2) if looks else None, ()

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        s = self.settings
        return asl(output.image, targets, gamma_pos=s.gamma_pos, gamma_neg=s.gamma_neg, clip=s.clip)
