"""Zero-shot CLIP: cosine of the global feature with each label, times the model's own scale.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021. As the paper's
tables have it: one sentence per label ("A photo of a …."), no training.
"""

from __future__ import annotations

from torch import Tensor

from ..modeling.ram import Labels
from .base import Method


class ZeroShotCLIP(Method):
    name = "clip"
    learns = False
    needs_labels = False

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        return self.similarity(image, labels) * self.backbone.logit_scale, None, ()
