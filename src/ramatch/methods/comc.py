"""After CoMC: a classifier that learns from sentences alone, used on images brought nearer to sentences.

Liu, Wen, Liu, Fang, Li, Xu and Zhang, "Language-Driven Cross-Modal Classifier for Zero-Shot Multi-Label Image
Recognition", ICML 2024.

Written from the paper's abstract: its equations are not known to us, so this is a system of CoMC's kind, and its
figures are not CoMC's. What the abstract says, and this does: no annotated image is needed; a classifier learns on
sentences in the joint space of images and texts; at test time a mapping takes an image's feature to the side of
language while keeping what is visual in it, because the two lie apart.

Decided here, all of it. Sentences: the paper has a language model write them; here they name one to four of the labels
("A photo of a cat, dog and kite."). Classifier: a residual network of two layers on the feature, then cosines with
label features, so that labels never learned can be asked for; each pair of sentence and label on its own (`sigmoid`),
because rankings within a sentence say nothing across images. Random noise on sentence features in training. Mapping: a
mean of the learned sentences' features, weighted by the softmax of their cosines with the image (as DeCap has it; Li
et al., ICLR 2023), mixed with the image's own. Images and targets of a training are not looked at.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import RAMConfig
from ..modeling.backbone import Backbone
from ..modeling.losses import sigmoid
from ..modeling.ram import Labels
from ..settings import Count, NotNegative, Positive, Settings, Share
from .base import Method, MethodOutput, cosines, unit

CHUNK = 1024  # sentences through the text tower at once


@dataclass(frozen=True)
class CoMCSettings(Settings):
    sentences: Count = 4096  # to learn from, kept for the mapping
    most: Count = 4  # labels in a sentence
    noise: NotNegative = 0.1  # length of the noise on a unit feature
    mapping: Share = 0.5  # of the sentences' mean in an image's feature
    mapping_scale: Positive | None = None  # of cosines with the sentences; None: the backbone's own
    seed: int = 0


class CoMC(Method):
    name = "comc"
    settings_type = CoMCSettings
    needs_text = True
    needs_labels = False
    settings: Any
    memory: Tensor

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: CoMCSettings) -> None:
        super().__init__(backbone, config, settings)
        dim = backbone.dim
        last = nn.Linear(dim, dim)
        nn.init.zeros_(last.weight)  # starts as zero-shot CLIP
        nn.init.zeros_(last.bias)
        self.adapter = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), last)
        self.register_buffer("memory", torch.zeros(settings.sentences, dim))  # zeros: nothing learned, no mapping
        self._learning: tuple[tuple[str, ...], Tensor] = ((), torch.empty(0))

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        if not self.training:
            return self.classify(self.to_language(unit(image)), labels), None, ()
        present = self.present(labels.names)
        rows = torch.randint(len(present), (len(image),), device=image.device)
        features = unit(self.memory[rows])
        noisy = features + torch.randn_like(features) * (self.settings.noise / features.shape[-1] ** 0.5)
        return self.classify(unit(noisy), labels), None, (present[rows],)

    def classify(self, features: Tensor, labels: Labels) -> Tensor:
        """Unit features (B, D) of images or sentences → logits (B, N)."""
        with torch.autocast(features.device.type, enabled=False):
            return cosines(features + self.adapter(features), labels.unit) * self.backbone.logit_scale

    def to_language(self, image: Tensor) -> Tensor:
        """Unit features (B, D) of images, nearer to those of sentences."""
        memory = unit(self.memory)  # an average of weights in training leaves it shorter, not turned
        weights = (cosines(image, memory) * (self.settings.mapping_scale or self.backbone.logit_scale)).softmax(-1)
        with torch.autocast(image.device.type, enabled=False):
            return unit(torch.lerp(image, unit(weights @ memory), self.settings.mapping))

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        return sigmoid(output.image, output.extra[0])

    def present(self, names: tuple[str, ...]) -> Tensor:
        """Which labels each kept sentence names, (S, N); sentences are made and encoded when labels are new."""
        if self._learning[0] != names:
            chosen = choose(len(names), self.settings)
            present = torch.zeros(len(chosen), len(names))
            for row, labels in zip(present, chosen, strict=True):
                row[list(labels)] = 1
            sentences = [self.config.templates[0].replace("{}", join([names[i] for i in c])) for c in chosen]
            device = self.memory.device
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                parts = [sentences[i : i + CHUNK] for i in range(0, len(sentences), CHUNK)]
                self.memory.copy_(unit(torch.cat([self.backbone.encode_text(part).float() for part in parts])))
            self._learning = names, present.to(device)
        return self._learning[1]


def choose(count: int, settings: CoMCSettings) -> list[list[int]]:
    """The labels of each sentence, in the order in which it names them."""
    draw = random.Random(settings.seed)
    return [draw.sample(range(count), draw.randint(1, min(settings.most, count))) for _ in range(settings.sentences)]


def join(labels: Sequence[str]) -> str:
    """cat, dog and kite"""
    return " and ".join(part for part in (", ".join(labels[:-1]), labels[-1]) if part)
