"""The text side of an alignment: captions, and wordings of meanings, of which each step reads another one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.lexicon import phrasings
from ..modeling.backbone import Backbone

CAPTION_TOKENS, PHRASE_TOKENS = 32, 8  # what is longer is cut: every step has the same shapes


class Texts:
    """Several texts for each of some things, tokenized on the device: random ones can be had without asking the host.
    counts: how many each has."""

    def __init__(self, ids: Tensor, lengths: Tensor, counts: Tensor) -> None:
        self.ids, self.lengths, self.counts = ids, lengths.clamp(max=ids.shape[1]), counts
        self.first = (counts.cumsum(0) - counts).clamp(max=len(ids) - 1)  # what has none gets any

    def tokens(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids (B, T) and lengths (B,)."""
        return self.ids[rows], self.lengths[rows]


class Captions(Texts):
    """Those of images."""

    def __init__(self, backbone: Backbone, captions: Sequence[Sequence[str]]) -> None:
        ids, lengths = backbone.tokenize([c for texts in captions for c in texts] or [""])
        counts = torch.tensor([len(texts) for texts in captions], device=ids.device)
        super().__init__(ids[:, :CAPTION_TOKENS], lengths, counts)

    def pick(self, images: Tensor) -> Tensor:
        """A random one for each of some images, by its number."""
        chance = torch.rand(len(images), device=images.device)
        return self.first[images] + (chance * self.counts[images]).long()


class Phrases(Texts):
    """Wordings of meanings, the name of each first."""

    def __init__(self, backbone: Backbone, meanings: Sequence[Sequence[str]], name_share: float) -> None:
        texts = [phrasings(words) for words in meanings]
        counts = torch.tensor([len(t) for t in texts], dtype=torch.long)
        ids, lengths = backbone.tokenize([text for t in texts for text in t])
        fits = lengths <= PHRASE_TOKENS
        fits[(counts.cumsum(0) - counts).to(ids.device)] = True  # a name is cut rather than left out
        meaning = torch.repeat_interleave(torch.arange(len(texts)), counts).to(ids.device)[fits]
        super().__init__(ids[fits, :PHRASE_TOKENS], lengths[fits], torch.bincount(meaning, minlength=len(texts)))
        self.name_share = name_share

    def pick(self, meanings: Tensor | slice = slice(None)) -> Tensor:
        """A wording of each of some meanings, by its number."""
        first, counts = self.first[meanings], self.counts[meanings]
        chance = torch.rand(2, len(first), device=first.device)
        return first + torch.where(chance[0] < self.name_share, 0, (chance[1] * counts).long())


@torch.no_grad()
def plain(backbone: Backbone, ids: Tensor, lengths: Tensor) -> Tensor:
    """Unit features of phrases as the text tower has them: told apart before anything is learned."""
    text, ids = backbone.require_text("aligning"), ids[:, :PHRASE_TOKENS]
    parts = zip(ids.split(8192), lengths.clamp(max=ids.shape[1]).split(8192), strict=True)
    return torch.cat([F.normalize(text(i, n).float(), dim=-1) for i, n in parts])
