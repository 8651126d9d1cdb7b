"""SPARC: scores standardized over labels and over images, and a fusion of compound prompts ("dog and sofa").

Kevin Miller, Aditya Gangrade, Samarth Mishra, Kate Saenko, Venkatesh Saligrama, "SPARC: Score Prompting and Adaptive
Fusion for Zero-Shot Multi-Label Recognition in Vision-Language Models", CVPR 2025.

As in the paper: each image's scores standardized over the labels, those of compound prompts by the mean and deviation
of prompts with single labels (Eq. 1); each prompt's scores standardized over images (Eq. 2); the order statistics of a
label's compound prompts, weighted together with its own score by the direction of largest variance over images (Eq. 3,
4), added to its own score (Eq. 5, standardized as Algorithm 1 has it).

Decided here: Eq. 2 and 3 are of unlabelled training images, kept as a bank of global features, where the paper takes
the test set's; the auxiliary prompts of Eq. 1 are the labels' own; the direction points to where its entries sum to a
positive number, which a principal component leaves open. Compound prompts are pairs alone: the paper chooses pairs and
triplets by how often labels meet in the ground truth, and has a language model write sentences; here each label has the
partners whose scores go with its own over the bank, which needs no labels. (Its Table 6: all pairs give 1.3 points of
mAP, a choice among them 0.5 more, triplets and sentences 0.3 more.)

Without a text tower there are no compound prompts, and standardized scores are what is left. Eq. 1 wants many labels:
of two it keeps only which is ahead, of one nothing but zeros are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RamatchError
from ..modeling.backbone import Backbone
from ..modeling.ram import Labels, RAMConfig, Trunk
from ..settings import Count, Natural, Settings
from .base import Method, unit

CHUNK = 64  # labels whose compound prompts are looked at over the whole bank at once
LEAST = 1e-6  # of a deviation


@dataclass(frozen=True)
class SPARCSettings(Settings):
    """`bank`: images whose global features are kept. `partners`: compound prompts of each label (0: none; the paper has
    at most 20 on average), fewer where all labels together would have more than `most`."""

    bank: Count = 4096
    partners: Natural = 10
    most: Count = 20_000


@dataclass(frozen=True)
class Prompts(Labels):
    """Labels with K compound prompts each, (N, K, D), and of their own prompt and those: mean and deviation over images
    (N, 1 + K), weights of the own score and of the order statistics (N, 1 + K)."""

    compound: Tensor | None = None
    mean: Tensor | None = None
    deviation: Tensor | None = None
    weights: Tensor | None = None


def image_norm(scores: Tensor, own: Tensor) -> Tensor:
    """Eq. 1: scores (n, N, P) of each image by the mean and deviation of its labels' own scores (n, N)."""
    if own.shape[1] == 1:
        return scores * 0
    mean, deviation = own.mean(1), own.std(1, correction=0).clamp(min=LEAST)
    return (scores - mean[:, None, None]) / deviation[:, None, None]


def ranked(scores: Tensor) -> Tensor:
    """Scores (n, N, 1 + K), the own first → the compound ones in descending order, r_{i,k}."""
    return torch.cat([scores[..., :1], scores[..., 1:].sort(-1, descending=True).values], -1)


def directions(scores: Tensor) -> Tensor:
    """Eq. 3: for each label the unit vector (N, 1 + K) along which its scores (n, N, 1 + K) vary most over images."""
    centered = (scores - scores.mean(0)).transpose(0, 1).double()
    found = torch.linalg.eigh(centered.mT @ centered).eigenvectors[..., -1]
    return torch.where(found.sum(-1, keepdim=True) < 0, -found, found).to(scores.dtype)


def fuse(scores: Tensor, weights: Tensor) -> Tensor:
    """Eq. 4 and 5: standardized scores (n, N, 1 + K), weights (N, 1 + K) → (n, N)."""
    return scores[..., 0] + (ranked(scores) * weights).sum(-1)


class SPARC(Method):
    name = "sparc"
    settings_type = SPARCSettings
    settings: SPARCSettings
    learns = False
    needs_images = True
    needs_labels = False
    bank: Tensor
    count: Tensor

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: SPARCSettings) -> None:
        super().__init__(backbone, config, settings)
        self.register_buffer("bank", torch.zeros(settings.bank, backbone.dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def prepare(self, trunks: Iterable[Trunk], labels: Sequence[str]) -> None:
        encoded, count = super().encode_labels(labels), 0
        for trunk in trunks:
            rows = unit(self.features(trunk, encoded)[0].float())[: len(self.bank) - count]
            self.bank[count : count + len(rows)] = rows
            if (count := count + len(rows)) == len(self.bank):
                break
        self.count.fill_(count)

    @torch.no_grad()
    def encode_labels(self, names: Sequence[str], templates: Sequence[str] | None = None) -> Labels:
        """Labels with all that the bank says of them."""
        found = super().encode_labels(names, templates)
        count = int(self.count)
        if not count:
            return found
        bank, n = self.bank[:count], len(found)
        with torch.autocast(bank.device.type, enabled=False):
            directs = found.unit[:n].float()
            own = bank @ directs.T
            pairs = self._pairs(found.names, own, templates)
            parts = []
            for start in range(0, n, CHUNK):
                some = slice(start, start + CHUNK)
                raw = torch.cat([own[:, some, None], torch.einsum("td,nkd->tnk", bank, pairs[some])], -1)
                scores = image_norm(raw, own)
                mean, deviation = scores.mean(0), scores.std(0, correction=0).clamp(min=LEAST)
                parts.append((mean, deviation, directions(ranked((scores - mean) / deviation))))
        mean, deviation, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        return Prompts(**vars(found), compound=pairs, mean=mean, deviation=deviation, weights=weights)

    def _pairs(self, names: Sequence[str], own: Tensor, templates: Sequence[str] | None) -> Tensor:
        """Features (N, K, D) of "A and B" for each label A and its partners."""
        n = len(names)
        k = min(self.settings.partners, n - 1, self.settings.most // n)
        if k <= 0 or self.backbone.text is None:
            return self.bank.new_zeros(n, 0, self.backbone.dim)
        z = image_norm(own[..., None], own)[..., 0]
        z = (z - z.mean(0)) / z.std(0, correction=0).clamp(min=LEAST)
        partners = (z.T @ z).fill_diagonal_(-torch.inf).topk(k).indices.tolist()
        wanted = [tuple(sorted((a, b))) for a, row in enumerate(partners) for b in row]
        places = {pair: i for i, pair in enumerate(dict.fromkeys(wanted))}
        sentences = [f"{names[a]} and {names[b]}" for a, b in places]
        features = super().encode_labels(sentences, templates).unit.float()
        return features[[places[pair] for pair in wanted]].unflatten(0, (n, k))

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        if not isinstance(labels, Prompts):
            raise RamatchError("method 'sparc' has not seen any images yet: `ramatch train --method sparc --data D`")
        assert labels.compound is not None
        assert labels.mean is not None
        assert labels.deviation is not None
        assert labels.weights is not None
        image = unit(image)
        own = image @ labels.unit[: len(labels)].float().T
        raw = torch.cat([own[..., None], torch.einsum("td,nkd->tnk", image, labels.compound)], -1)
        return fuse((image_norm(raw, own) - labels.mean) / labels.deviation, labels.weights), None, ()
