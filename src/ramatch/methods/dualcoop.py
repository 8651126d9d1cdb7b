"""DualCoOp: a positive and a negative context for each label, compared with each region.

Sun, Hu and Saenko, "DualCoOp: Fast Adaptation to Multi-Label Recognition with Limited Annotations", NeurIPS 2022.

As in the paper: contexts shared by all labels (its zero-shot setting); regions are the last attention's values without
its pooling; of label n, S⁺ and S⁻ are its cosines with each region, times 1/τ, and are averaged over regions with
the weights softmax(S⁺ₙ), of the positive for both; p = exp S⁺ / (exp S⁺ + exp S⁻), so S⁺ − S⁻ is the logit; asymmetric
loss (Ridnik et al., 2021), summed over pairs; SGD. Everything but the contexts is frozen.

Decided here: the paper takes a ResNet, where values are projected straight into the joint space. In a transformer each
patch of the last layer sees itself alone, its value standing for what attention would bring, and the rest of the layer
stays (MaskCLIP's form; Zhou et al., ECCV 2022). Where the preset reads a backbone's final patches as they are
(`saa_layers` 0: encoders of `ramatch align`, whose patches are local already), so does this. The asymmetric loss's
γ₊ = 1, γ₋ = 2, c = 0.05 and the context's 16 words are as we know them of the paper; its own temperature of the
softmax over regions is not known to us: `spatial_scale`, by default the 1/τ that CLIP was trained with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from ..config import RAMConfig
from ..modeling.backbone import Backbone, Block
from ..modeling.losses import asl
from ..modeling.ram import Labels, RegionSet, Streams
from ..settings import Count, NotNegative, Positive, Settings, Share
from .base import MethodOutput, cosines
from .coop import Prompted


@dataclass(frozen=True)
class DualCoOpSettings(Settings):
    context: Count = 16  # learned words of each kind
    spatial_scale: Positive | None = None  # of cosines in the softmax over regions; None: the backbone's own
    gamma_pos: NotNegative = 1.0
    gamma_neg: NotNegative = 2.0
    clip: Share = 0.05  # negatives less probable than this are left alone


class ValueRegions(RegionSet):
    """Regions whose last layer has no attention: each patch gets its own value. Final patches if there is no local
    stream."""

    def __init__(self, backbone: Backbone, config: RAMConfig) -> None:
        super().__init__(backbone, config)
        self.saa_start = len(backbone.vision.blocks)  # no SAA

    def run_layers(
        self, backbone: Backbone, streams: Streams, layers: range, *, prompts: bool = False, class_only: bool = False
    ) -> Streams:
        end = len(backbone.vision.blocks)
        if layers.stop < end or not layers or self.config.saa_layers == 0:
            return super().run_layers(backbone, streams, layers, prompts=prompts, class_only=class_only)
        before = super().run_layers(backbone, streams, layers[:-1], prompts=prompts)
        after = super().run_layers(backbone, before, layers[-1:], prompts=prompts, class_only=class_only)
        block, patches = cast(Block, backbone.vision.blocks[end - 1]), before.patches
        _, _, values = block.project(patches, queries=0)
        return replace(after, base=block.feed(patches, block.merge(values)))


class DualCoOp(Prompted):
    name = "dualcoop"
    settings_type = DualCoOpSettings
    prompts = "dualcoop"

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: DualCoOpSettings) -> None:
        super().__init__(backbone, config, settings)
        self.region_set = ValueRegions(backbone, self.config)

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        assert labels.negative is not None
        positive, negative = cosines(regions, labels.unit), cosines(regions, labels.negative)
        where = self.over_regions(positive)
        return (where * (positive - negative)).sum(1) * self.backbone.logit_scale, where, ()

    def over_regions(self, sim: Tensor) -> Tensor:
        """Cosines (B, M, N) → each label's weights of the regions."""
        return (sim * (self.settings.spatial_scale or self.backbone.logit_scale)).softmax(1)

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        s = self.settings
        mean = asl(output.image, targets, gamma_pos=s.gamma_pos, gamma_neg=s.gamma_neg, clip=s.clip)
        return mean * (targets >= 0).sum()  # the mean's gradient would hardly move SGD's prompts
