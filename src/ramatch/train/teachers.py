"""Backbones aligned before, as teachers of the next one (knowledge distillation, Hinton et al. 2015).

Captions leave out most of what an image shows. A larger tower, or several, that have learned from all captions say how
likely the rest is: which concepts an image shows, which images show a concept, which captions fit which images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import RAMConfig
from ..data.augment import resize_batch
from ..data.lexicon import plural
from ..errors import RamatchError
from ..files import read_json
from ..modeling.backbone import Backbone
from ..modeling.kernels.ops import smooth_max
from ..modeling.ram import RegionSet, Streams
from .assemble import load_frozen

BATCH = 256  # images, and 16 times as many texts, looked at in one go


def plain_regions(backbone: Backbone, saa_layers: int, tuned: int = 0) -> RegionSet:
    """The ladder without anything that learns: self-aware attention alone, or the tower's final patches (0). Its stem
    ends before the last `tuned` layers."""
    shape = RAMConfig(tss=False, visual_prompts=0, adapted_layers=0, saa_layers=saa_layers)
    ladder = RegionSet(backbone, shape).requires_grad_(False)
    ladder.first -= tuned
    return ladder


def look(backbone: Backbone, ladder: RegionSet, state: Streams) -> tuple[Tensor, Tensor]:
    """From what the ladder's stem makes of pixels to unit global features (B, D) and unit regions (B, M, D)."""
    done = ladder.run_layers(backbone, state, range(ladder.first, len(backbone.vision.blocks)))
    image, patches = backbone.finish(done.x)
    regions = patches if done.base is None else backbone.project(done.local(1.0))
    return F.normalize(image.float(), dim=-1), F.normalize(regions.float(), dim=-1)


@dataclass(frozen=True)
class Answers:
    """What teachers find, their cosines averaged. tags (n, C): how well a concept fits an image, globally and by its
    best regions. images (n, S), texts (captions, S): their features side by side, scaled so that products are means."""

    tags: Tensor
    images: Tensor
    texts: Tensor

    def of_captions(self, rows: Tensor, captions: Tensor) -> Tensor:
        """(B, B): how well these captions fit these images."""
        return (self.images[rows] @ self.texts[captions].T).float()


@torch.no_grad()
def ask(
    names: Sequence[str],
    images: Tensor,
    captions: Sequence[str],
    concepts: Sequence[Sequence[str]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    beta: float,
) -> Answers:
    """Ask aligned backbones (folders of `ramatch align`) about uint8 images (n, 3, h, w), one after the other."""
    kept, share = torch.float16 if dtype != torch.float32 else dtype, 1 / len(names)
    words = [text for words in concepts for text in (words[0], plural(words[0]))]

    def answers(name: str) -> Answers:  # a teacher is gone before the next one is loaded
        teacher = load_frozen(name).to(device)
        if teacher.text is None:
            raise RamatchError(f"teacher '{name}' has no text tower; a backbone that `ramatch align` wrote has one")
        report = Path(name).expanduser() / "alignment.json"
        made = read_json(report)["settings"] if report.is_file() else {}
        ladder = plain_regions(teacher, made.get("saa_layers", 0))
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            tags = F.normalize(_read(teacher, words).unflatten(0, (-1, 2)).mean(1), dim=-1)
            whole, cosines = [], []
            for chunk in images.split(BATCH):
                pixels = teacher.preprocess.normalize(resize_batch(chunk.to(device), teacher.preprocess.size))
                image, regions = look(teacher, ladder, ladder.stem(teacher, pixels))
                whole.append(image.to(kept))
                cosines.append(((image @ tags.T + smooth_max(regions @ tags.T, beta)) / 2).to(kept))
            texts = _read(teacher, captions).to(kept)
        return Answers(torch.cat(cosines), torch.cat(whole), texts)  # on CPUs autocast to bf16 joins no fp16

    found = [answers(name) for name in names]
    tags = sum(one.tags.float() * share for one in found)
    assert isinstance(tags, Tensor)
    sides = zip(*((one.images, one.texts) for one in found), strict=True)
    return Answers(tags.to(kept), *(torch.cat(side, 1) * share**0.5 for side in sides))


def _read(teacher: Backbone, texts: Sequence[str]) -> Tensor:
    """Unit text features (N, D)."""
    size = 16 * BATCH
    parts = (teacher.encode_text(texts[i : i + size]) for i in range(0, len(texts), size))
    return torch.cat([F.normalize(part.float(), dim=-1) for part in parts])
