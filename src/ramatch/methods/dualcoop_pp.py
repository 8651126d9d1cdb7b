"""DualCoOp++: an evidential context says where to look, a winner takes each region.

Hu, Sun, Sclaroff and Saenko, "DualCoOp++: Fast and Effective Adaptation to Multi-Label Recognition with Limited
Annotations", IEEE Transactions on Pattern Analysis and Machine Intelligence, 2023.

Written from the paper's description; no program of its authors was used.

As described: DualCoOp with three contexts. Each label's evidential cosines with the regions, Sᵉ, replace the positive
ones in the softmax over regions, whose weights average both S⁺ and S⁻. Winner-take-all, without parameters: each region
answers positively to one label at most. A region's S⁺ are multiplied by their softmax over labels, at a temperature
that its own largest cosine sets: S⁺ₘₙ ← S⁺ₘₙ · softmaxₙ(γ · maxₙ S⁺ₘₙ · S⁺ₘₙ). Where the largest is clear, one label
keeps its answer; where none is, none does. Loss, regions and the rest are DualCoOp's.

Not known to us with certainty: the exact form of that softmax and its γ (200 for cosines here, as programs by others
that build on the paper have it), and whether it stays on outside training; here it does. So a label's score depends on
the others in the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..modeling.ram import Labels
from ..settings import Positive
from .base import cosines
from .dualcoop import DualCoOp, DualCoOpSettings


@dataclass(frozen=True)
class DualCoOpPPSettings(DualCoOpSettings):
    winner_scale: Positive = 200.0  # γ


class DualCoOpPP(DualCoOp):
    name = "dualcoop-pp"
    settings_type = DualCoOpPPSettings
    prompts = "dualcoop++"

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        assert labels.negative is not None
        assert labels.evidence is not None
        positive, negative = cosines(regions, labels.unit), cosines(regions, labels.negative)
        where = self.over_regions(cosines(regions, labels.evidence))
        positive = positive * self.winner(positive)
        return (where * (positive - negative)).sum(1) * self.backbone.logit_scale, where, ()

    def winner(self, positive: Tensor) -> Tensor:
        """Each region's labels (B, M, N) → how far the region is theirs."""
        return (positive * positive.amax(-1, keepdim=True) * self.settings.winner_scale).softmax(-1)
