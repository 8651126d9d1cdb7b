"""MKT: a student of a frozen vision-language model that looks twice, at the picture and at each label's best patches.

He, Guo, Dai, Qiao, Shu, Ren, Xia, "Open-Vocabulary Multi-Label Classification via Multi-Modal Knowledge Transfer",
AAAI 2023. As there: a vision transformer whose class token goes through a global head and whose patches go through a
local head of two linear layers; score = ⟨global, label⟩ + mean of the k highest ⟨patch, label⟩; ranking loss over all
pairs + λ × L1 distance of the student's global embedding to the frozen one; then prompts, whose context words learn.

What differs: the student is one block (`layers`) on the frozen class token and regions, where the paper trains a whole
ViT of its own. It starts as the frozen model: block and local head add nothing, the global head is the identity.
What had to be decided: the frozen embedding has `length` (10, about what CLIP's own have, so that a margin of 1 is in
reach of its cosines), labels have length 1; between the local head's layers stands a GELU; k and λ are believed to be
the paper's, without its text at hand.
The paper's two stages are two runs: `optim.prompt_lr=0` first, then `model.init` with that run's folder and
`optim.lr=0`; in one run both learn at once. The context starts as the words before the label in the preset's sentence
(the paper: "There is a {label} in the scene"). No text tower, no such words, or `prompts: none`: no second stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import RAMConfig
from ..modeling.backbone import Backbone, Block, TowerConfig
from ..modeling.losses import ranking
from ..modeling.ram import Labels
from ..settings import Count, NotNegative, Positive, Settings
from .base import Method, MethodOutput, check_heads, products, top_mean, unit


@dataclass(frozen=True)
class MKTSettings(Settings):
    layers: Count = 1
    heads: Count = 8
    hidden: Count = 2048  # between the two layers of the local head
    top_k: Count = 18
    distill: NotNegative = 1.0  # λ
    length: Positive = 10.0  # of the frozen embedding


class MKT(Method):
    name = "mkt"
    settings_type = MKTSettings
    settings: MKTSettings

    def __init__(self, backbone: Backbone, config: RAMConfig, settings: MKTSettings) -> None:
        super().__init__(backbone, config, settings)
        d = backbone.dim
        check_heads(settings.heads, d)
        shape = TowerConfig(d, settings.layers, settings.heads, 4 * d, act="gelu")
        blocks, last = [Block(shape) for _ in range(settings.layers)], nn.Linear(settings.hidden, d)
        self.blocks, self.global_head = nn.ModuleList(blocks), nn.Linear(d, d)
        self.local_head = nn.Sequential(nn.Linear(d, settings.hidden), nn.GELU(), last)
        nn.init.eye_(self.global_head.weight)
        nn.init.zeros_(self.global_head.bias)
        for layer in (last, *(block.out for block in blocks), *(block.fc2 for block in blocks)):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        if self.label_set.mode == "coop":
            self.label_set.prompts = nn.Parameter(self._context())

    @classmethod
    def configure(cls, config: RAMConfig, layers: int) -> RAMConfig:
        learned = config.prompts != "none" and bool(_context_words(config))
        return super().configure(config, layers).replace(prompts="coop" if learned else "none")

    @torch.no_grad()
    def _context(self) -> Tensor:
        """Embeddings of the words before the label, (1, r, W)."""
        text = self.backbone.require_text("learning prompts")
        ids, lengths = self.backbone.tokenize([_context_words(self.config)])
        return text.tokens(ids)[:, 1 : int(lengths[0]) - 1].float().clone()  # between the first and the end token

    def logits(self, image: Tensor, regions: Tensor, labels: Labels) -> tuple[Tensor, Tensor | None, tuple]:
        frozen = unit(image) * self.settings.length
        x = torch.cat([frozen[:, None], unit(regions) * self.settings.length], 1)
        for block in self.blocks:
            x = block(x)
        whole, parts = self.global_head(x[:, 0]), self.local_head(x[:, 1:])
        local, where = top_mean(products(parts, labels.directions), self.settings.top_k)
        return products(whole, labels.directions) + local, where, (whole, frozen)

    def criterion(self, output: MethodOutput, targets: Tensor) -> Tensor:
        whole, frozen = (x.float() for x in output.extra)
        distance = (whole - frozen).abs().sum(-1).mean()
        return ranking(output.image, targets) / len(targets) + self.settings.distill * distance


def _context_words(config: RAMConfig) -> str:
    return config.templates[0].partition("{}")[0].strip()
