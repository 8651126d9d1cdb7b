"""PIAA: a classifier from unlabelled patches, in closed form.

Akang Wang, Xili Deng, Zhanxuan Hu, Yi Zhao, Yonghang Tai, Huafeng Li, "[CLS] is Not Enough: Multi-Label Recognition via
Patch-Level Inference and Adaptive Aggregation", ICML 2026.

The paper itself was not at hand, only its abstract, the authors' project page and a reader's public digest of its
equations. From these: patches are classified by Gaussian discriminant analysis, w_c = Σ⁻¹μ_c and b_c = −½ μ_cᵀΣ⁻¹μ_c,
built in three stages: (I) by the softmax of their similarity with the labels' text, each label's 512 patches of least
entropy are its anchors, which give a first classifier; (II) anchors stay that this classifier's own probability q
confirms, at least its mean plus its deviation; (III) means weighted by q, and a covariance shrunk by its trace, give
the final one. An image's score is the softmax over labels of each label's largest patch probability, 0.9 of it beside
0.1 of the softmax of the global feature.

Decided here: a patch is an anchor only of its likeliest label (a label that no patch prefers has its one likeliest
patch); mean and deviation of q are over all patches of the bank, and a label that would lose all anchors keeps them; Σ
is within labels, and its inverse D((n − 1)Σ + tr(Σ)I)⁻¹ for n anchors, which the analysis has in "A Hard-to-Beat
Baseline for Training-free CLIP-based Adaptation" (Wang et al., ICLR 2024); labels are equally likely beforehand;
features have length 1; no temperature in the last softmax. A sharper inverse, such as that of (1 − γ)Σ + γ tr(Σ)/D · I,
gives probabilities that are 1 to the last bit, which no longer rank images.

Differs: patches are RAM's regions (self-aware attention on a CLIP), where the paper has the encoders of SCLIP, ITACLIP
or SC-CLIP, which also only change the last layers' attention. The classifier is of the vocabulary that is asked for,
so a random sample of the training images' patches is kept instead of one fixed classifier of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RamatchError
from ..modeling.backbone import Backbone
from ..modeling.ram import Labels, RAMConfig, Trunk
from ..settings import Count, Natural, Settings, Share
from .base import Method, unit


@dataclass(frozen=True)
class PIAASettings(Settings):
    """`patches`: how many are kept. `anchors`: of them at most for each label. `share`: of the patches' score
    beside the global feature's."""

    patches: Count = 32_768
    anchors: Count = 512
    share: Share = 0.9
    seed: Natural = 0


@dataclass(frozen=True)
class Classes(Labels):
    """Labels with their linear classifier of patches, (N, D) and (N,)."""

    weight: Tensor | None = None
    bias: Tensor | None = None


def anchors(probabilities: Tensor, count: int) -> Tensor:
    """Stage I: probabilities (P, N) of patches → (P, N), 1 where a patch is an anchor of a label, else 0."""
    entropy = -(probabilities * probabilities.clamp(min=1e-12).log()).sum(1)
    best, out = probabilities.argmax(1), torch.zeros_like(probabilities)
    for label in range(probabilities.shape[1]):
        rows = (best == label).nonzero()[:, 0]
        if not len(rows):
            rows = probabilities[:, label].argmax()[None]
        out[rows[entropy[rows].argsort(stable=True)[:count]], label] = 1
    return out


def discriminant(patches: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Patches (P, D) that belong to labels with weights (P, N) ≥ 0 → the classifier's (N, D) and (N,)."""
    x, w = patches.double(), weights.double()
    total = w.sum(0)
    means = (w.T @ x) / total[:, None]
    # the scatter within labels: Σ_pc w_pc (x_p − μ_c)(x_p − μ_c)ᵀ, without a difference for every pair
    covariance = ((x * w.sum(1, keepdim=True)).T @ x - (means * total[:, None]).T @ means) / total.sum()
    eye = torch.eye(len(covariance), dtype=x.dtype, device=x.device)
    shrunk = ((w > 0).sum() - 1) * covariance + (covariance.trace() + 1e-9) * eye
    weight = len(covariance) * torch.linalg.solve(shrunk, means.T).T
    return weight.to(patches.dtype), (-0.5 * (weight * means).sum(1)).to(patches.dtype)


def classifier(patches: Tensor, probabilities: Tensor, settings: PIAASettings) -> tuple[Tensor, Tensor]:
    """All three stages: patches (P, D), probabilities (P, N) by text → (N, D), (N,)."""
    chosen = anchors(probabilities, settings.anchors)
    weight, bias = discriminant(patches, chosen)
    confidence = (patches @ weight.T + bias).softmax(-1)
    pure = chosen * (confidence >= confidence.mean(0) + confidence.std(0, correction=0))
    pure = torch.where(pure.any(0), pure, chosen)
    return discriminant(patches, pure * confidence.clamp(min=1e-6))


class PIAA(Method):
    name = "piaa"
    settings_type = PIAASettings
    settings: PIAASettings
    learns = False
    needs_images = True
    needs_labels = False
    bank: Tensor
    count: Tensor

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: PIAASettings) -> None:
        super().__init__(backbone, config, settings)
        self.register_buffer("bank", torch.zeros(settings.patches, backbone.dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def prepare(self, trunks: Iterable[Trunk], labels: Sequence[str]) -> None:
        """Keep a random sample of the patches: those with the largest of random numbers, so that each has the same
        chance whatever comes later, and no more than a batch is held beside them."""
        encoded, generator = super().encode_labels(labels), torch.Generator().manual_seed(self.settings.seed)
        kept, keys = self.bank[:0], torch.zeros(0)
        for trunk in trunks:
            fresh = unit(self.features(trunk, encoded)[1].float()).flatten(0, 1)
            keys = torch.cat([keys, torch.rand(len(fresh), generator=generator)])
            rows = keys.topk(min(len(keys), len(self.bank))).indices
            kept, keys = torch.cat([kept, fresh])[rows.to(kept.device)], keys[rows]
        self.bank[: len(kept)] = kept
        self.count.fill_(len(kept))

    @torch.no_grad()
    def encode_labels(self, names: Sequence[str], templates: Sequence[str] | None = None) -> Labels:
        """Labels with the classifier that the kept patches give for them."""
        found = super().encode_labels(names, templates)
        if not int(self.count):
            return found
        with torch.autocast(self.bank.device.type, enabled=False):
            patches = self.bank[: int(self.count)]
            logits = patches @ found.unit[: len(found)].float().T * self.backbone.logit_scale
            weight, bias = classifier(patches, logits.softmax(-1), self.settings)
        return Classes(**vars(found), weight=weight, bias=bias)

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        if not isinstance(labels, Classes):
            raise RamatchError("method 'piaa' has not seen any images yet: `ramatch train --method piaa --data D`")
        assert labels.weight is not None
        assert labels.bias is not None
        places = (unit(regions) @ labels.weight.T + labels.bias).softmax(-1)
        whole = self.similarity(image, labels).float()[:, : len(labels)] * self.backbone.logit_scale
        score = torch.lerp(whole.softmax(-1), places.amax(1).softmax(-1), self.settings.share)
        return torch.logit(score, 1e-6), places, ()
