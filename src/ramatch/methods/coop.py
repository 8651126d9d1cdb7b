"""CoOp: learned context words in place of the template's, the rest zero-shot CLIP.

Zhou, Yang, Loy and Liu, "Learning to Prompt for Vision-Language Models", International Journal of Computer Vision,
2022.

As in the paper: M context vectors shared by all labels (its "unified context"), before the label's own words, learned
by SGD through the frozen text tower; the score is the cosine with the global feature times the model's scale. Shared
contexts are the kind that a label without training images can use too.

Decided here: the paper's cross-entropy wants one label per image. For several the loss is the ranking loss (Gong et
al., 2013; Eq. 20 of RAM's paper) with margin 1 on those logits, as MKT learns its prompts (He et al., "Open-Vocabulary
Multi-Label Classification via Multi-Modal Knowledge Transfer", AAAI 2023): every present label above every absent one
of the image. It needs no threshold, which cosines of one prompt do not have. Contexts start at random (σ 0.02).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..config import RAMConfig
from ..modeling.backbone import Backbone
from ..modeling.losses import ranking
from ..modeling.ram import Labels
from ..settings import Count, Positive, Settings
from .base import Method, MethodOutput, cosines


@dataclass(frozen=True)
class CoOpSettings(Settings):
    context: Count = 16  # learned words (the paper's M)
    margin: Positive = 1.0


class Prompted(Method):
    """A system whose label prompts learn; their number is its own setting."""

    needs_text = True
    settings: Any

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: Any) -> None:
        super().__init__(backbone, config.replace(prompt_tokens=settings.context), settings)


class CoOp(Prompted):
    name = "coop"
    settings_type = CoOpSettings
    prompts = "coop"

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        return cosines(image, labels.unit) * self.backbone.logit_scale, None, ()

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        return ranking(output.image, targets, margin=self.settings.margin)
