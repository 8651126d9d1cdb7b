"""What a library keeps of a photo and how labels are scored on it: the one file of this room that touches the model.

Kept are the global feature and the regions that win. Regions depend on the vocabulary only through TSS; here it looks
at the model's own background, which every vocabulary is matched with anyway. A score needs each label's best region, so
those regions are kept that win for the labels of a bank, an everyday vocabulary. The transport plan is left out: on
images kept aside it mattered less than the choice of regions (docs/library.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..assets import vocabulary
from ..evaluation.calibration import Words
from ..modeling.ram import Output
from ..recognizer import Recognizer

KEPT = 36  # regions of a photo


def bank_names(recognizer: Recognizer) -> list[str]:
    """Labels that decide which regions are kept. A model without a text tower knows only those it was given."""
    ram = recognizer.ram
    return list(ram.backbone.given_labels) or [*dict.fromkeys((*vocabulary("everyday"), *ram.background))]


@torch.inference_mode()
def encode_words(recognizer: Recognizer, names: Sequence[str]) -> tuple[Tensor, Words]:
    """Directions (N, D): the product of a row and a feature is their similarity; and what the calibrator looks at
    besides. The background has no part in it and is not encoded along: a search shall not wait for 150 labels that
    nobody asked for."""
    ram = recognizer.ram
    raw = F.normalize(ram.label_set(ram.backbone, tuple(names)).float(), dim=-1)
    unit, negative = (raw[0], raw[1]) if raw.ndim == 3 else (raw, None)
    familiarity = None if ram.known is None else torch.from_numpy(ram.known.familiarity(unit.cpu()))
    learned = None
    if ram.learned is not None:
        unit, taught = ram.learned.place(names, unit)
        learned = torch.from_numpy(taught)
        familiarity = None if familiarity is None else torch.maximum(familiarity, learned.to(familiarity))
    return unit if negative is None else unit - negative, Words(unit.cpu(), familiarity, learned)


@torch.inference_mode()
def encode_images(recognizer: Recognizer, pixels: Tensor, tss_labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """uint8 pixels (B, 3, H, W) → global features (B, D) and regions (B, M, D), of unit length."""
    ram, backbone = recognizer.ram, recognizer.ram.backbone
    if tss_labels is None:
        tss_labels = ram.encode_labels(ram.background or bank_names(recognizer)).tss
    trunk = ram.trunk(pixels.to(recognizer.device))
    regions = ram.region_set.regions(backbone, trunk, tss_labels)
    image = backbone.pool(trunk.image, regions) if ram.config.pooled == "adapted" else trunk.image
    return F.normalize(image.float(), dim=-1), F.normalize(regions.float(), dim=-1)


class Encoder:
    """uint8 pixels (B, 3, H, W) → global features (B, D) and the regions that are kept (B, K, D), of unit length."""

    def __init__(self, recognizer: Recognizer) -> None:
        self.recognizer, ram, names = recognizer, recognizer.ram, bank_names(recognizer)
        self.bank, _ = encode_words(recognizer, names)
        with torch.inference_mode():
            self.tss_labels = ram.encode_labels(ram.background or names).tss

    def __call__(self, pixels: Tensor) -> tuple[np.ndarray, np.ndarray]:
        image, regions = encode_images(self.recognizer, pixels, self.tss_labels)
        kept = winners(regions @ self.bank.T, KEPT)
        return image.cpu().numpy(), regions.take_along_dim(kept[..., None], dim=1).cpu().numpy()


def winners(sim: Tensor, count: int) -> Tensor:
    """Indices (B, K) of the regions that together keep each label's best cosine high; sim (B, M, N).

    Greedy: next comes the region that lifts the sum over labels of the best cosine so far the most.
    """
    best, chosen = sim.mean(1), []
    for _ in range(min(count, sim.shape[1])):
        chosen.append((sim - best[:, None]).relu_().sum(-1).argmax(1))
        best = torch.maximum(best, sim.take_along_dim(chosen[-1][:, None, None], dim=1)[:, 0])
    return torch.stack(chosen, dim=1)


def probe(recognizer: Recognizer) -> np.ndarray:
    """What a model makes of a fixed pattern and a few labels. Models whose probes agree give comparable features,
    whatever their number format, their device or the order of their weights."""
    height, width = recognizer.ram.preprocess.size
    y, x = torch.meshgrid(torch.linspace(0, 6, height), torch.linspace(0, 8, width), indexing="ij")
    pattern = torch.stack([torch.sin(x + y), torch.cos(x * y / 4), torch.sin(x - 2 * y)]) * 127 + 128
    labels, _ = encode_words(recognizer, bank_names(recognizer)[:4])
    pixels, seen = pattern.to(torch.uint8)[None], labels.to(recognizer.ram.backbone.dtype)
    image, regions = encode_images(recognizer, pixels, seen)
    found = torch.cat([image, regions[0], labels]).flatten().cpu().numpy()
    return found / np.linalg.norm(found)


@torch.inference_mode()
def probabilities(
    recognizer: Recognizer, image: Tensor, best: Tensor, words: Words, *, independent: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Values and scores (B, N) as `Recognizer.predict` has them; from cosines (B, N) with image and best region.

    `independent`: each label by itself also without calibration; it then says how far an image stands out.
    """
    if recognizer.calibrator is not None:
        found = recognizer.calibrator(torch.stack([image, best, best], dim=-1), words).numpy()
        return found, found
    image, best = image.to(recognizer.device), best.to(recognizer.device)
    ram, output = recognizer.ram, Output(best, image, best)
    if not independent:
        return ram.score(output, "softmax").cpu().numpy(), ram.score(output).cpu().numpy()
    score = ram.score(output, "cosine").cpu()
    return torch.sigmoid((score - score.mean(0)) / score.std(0, correction=0).clamp(min=1e-6)).numpy(), score.numpy()
