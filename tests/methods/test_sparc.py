"""SPARC: Eq. 1–5 against a plain rewrite; biases of images and prompts that plain cosines fall for."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import DIM, backbone

from ramatch.config import preset
from ramatch.errors import RamatchError
from ramatch.evaluation.metrics import mean_ap
from ramatch.methods import build_method
from ramatch.methods.sparc import SPARC, directions, fuse, image_norm, ranked
from ramatch.modeling.ram import Trunk

LABELS = ["dog", "cat", "red car", "boat", "kite"]


def made(**settings: object) -> SPARC:
    torch.manual_seed(0)
    own = backbone(text=settings.pop("text", True))
    ram = build_method(own, preset("ramatch"), {"name": "sparc", "settings": settings}).eval()
    assert isinstance(ram, SPARC)
    return ram


def trunk_of(features: torch.Tensor) -> Trunk:
    return Trunk(features, torch.randn(len(features), 16, 64), (), (4, 4))


def plain_scores(bank: np.ndarray, test: np.ndarray, text: np.ndarray, pairs: list[list[np.ndarray]]) -> np.ndarray:
    """Algorithm 1, loop by loop: unit features of the bank's images (T, D), of others (t, D), of labels (N, D), and of
    each label's compound prompts."""
    out = np.zeros((len(test), len(text)))
    for i in range(len(text)):

        def one(image: np.ndarray, prompt: np.ndarray) -> float:
            own = [image @ label for label in text]
            return (image @ prompt - np.mean(own)) / np.std(own)

        prompts = [text[i], *pairs[i]]
        kept = np.array([[one(image, prompt) for prompt in prompts] for image in bank])
        mean, deviation = kept.mean(0), kept.std(0)

        def row(values: np.ndarray) -> np.ndarray:
            z = (values - mean) / deviation  # noqa: B023
            return np.array([z[0], *sorted(z[1:], reverse=True)])

        rows = np.array([row(values) for values in kept])
        _, vectors = np.linalg.eigh(np.cov(rows.T))
        w = vectors[:, -1] * np.sign(vectors[:, -1].sum())
        for t, image in enumerate(test):
            found = row(np.array([one(image, prompt) for prompt in prompts]))
            out[t, i] = found[0] + found @ w
    return out


def test_equations() -> None:
    g = torch.Generator().manual_seed(0)
    bank, test, text = (F.normalize(torch.randn(n, 12, generator=g).double(), dim=-1) for n in (50, 7, 4))
    compound = F.normalize(torch.randn(4, 3, 12, generator=g).double(), dim=-1)

    def raw(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = images @ text.T
        return image_norm(torch.cat([own[..., None], torch.einsum("td,nkd->tnk", images, compound)], -1), own), own

    kept, _ = raw(bank)
    mean, deviation = kept.mean(0), kept.std(0, correction=0)
    weights = directions(ranked((kept - mean) / deviation))
    assert torch.allclose(weights.norm(dim=-1), torch.ones(4).double())
    found = fuse((raw(test)[0] - mean) / deviation, weights)
    pairs = [list(row.numpy()) for row in compound]
    expected = plain_scores(bank.numpy(), test.numpy(), text.numpy(), pairs)
    assert np.allclose(found.numpy(), expected, atol=1e-9)


def test_the_whole_of_it() -> None:
    """The model's scores, with its own text tower and bank, are Algorithm 1's; partners go with a label."""
    ram = made(partners=2)
    g = torch.Generator().manual_seed(1)
    bank, test = torch.randn(60, DIM, generator=g), torch.randn(6, DIM, generator=g)
    ram.prepare([trunk_of(part) for part in bank.split(17)], LABELS)
    assert int(ram.count) == 60
    with torch.no_grad():
        labels = ram.encode_labels(LABELS)
        found = ram.recognize(trunk_of(test), labels).image
    text = labels.unit.double().numpy()
    unit = [F.normalize(x, dim=-1).double().numpy() for x in (bank, test)]
    own = unit[0] @ text.T
    own = (own - own.mean(1, keepdims=True)) / own.std(1, keepdims=True)
    together = np.corrcoef(own.T) - 2 * np.eye(5)
    pairs = []
    for i, row in enumerate(together):
        names = [" and ".join(LABELS[k] for k in sorted((i, j))) for j in np.argsort(-row)[:2]]
        pairs.append(list(ram.encode_labels(names).unit.double().numpy()))
    assert np.allclose(found.numpy(), plain_scores(unit[0], unit[1], text, pairs), atol=1e-3)


def test_standardized_scores_are_right_where_plain_cosines_are_wrong() -> None:
    """Every image has a bias of its own towards all labels, every label one of its own: labels cannot be told across
    images by cosines. Without a text tower standardized scores are all there is."""
    ram, names = made(text=False, bank=256), [f"thing {i}" for i in range(8)]
    g = torch.Generator().manual_seed(0)
    own = torch.linalg.qr(torch.randn(DIM, 9, generator=g)).Q.T
    own, common = own[:8], own[8]
    directs = F.normalize(own + common * torch.rand(8, 1, generator=g), dim=-1)
    ram.backbone.given_labels = dict(zip(names, directs, strict=True))

    def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shown = (torch.rand(count, 8, generator=g) < 0.3).float()
        bias = 8 * (torch.rand(count, 1, generator=g) - 0.5) * common
        return shown @ own + bias + 0.05 * torch.randn(count, DIM, generator=g), shown

    (bank, _), (test, shown) = images(300), images(200)
    with pytest.raises(RamatchError, match="has not seen any images"):
        ram.recognize(trunk_of(test), ram.encode_labels(names))
    ram.prepare([trunk_of(bank)], names)
    assert int(ram.count) == 256
    with torch.no_grad():
        labels = ram.encode_labels(names)
        found, plain = ram.recognize(trunk_of(test), labels).image, ram.similarity(test, labels)
    assert labels.compound.shape == (8, 0, DIM)
    assert mean_ap(plain, shown) < 0.8
    assert mean_ap(found, shown) > 0.9


def test_compound_prompts_find_what_single_ones_miss() -> None:
    """Scores by the paper's model of a CLIP (Eq. 6): a compound prompt is an OR with a bonus for both. Fused, they rank
    better than single prompts, and better than with each label's best compound prompt (the weakened max)."""
    g, n, count = torch.Generator().manual_seed(0), 8, 2000
    shown = torch.rand(count, n, generator=g).double() < 0.25
    bias = torch.randn(count, 1, generator=g).double()
    own = shown + bias + torch.randn(count, n, generator=g).double()
    pairs = torch.zeros(count, n, n - 1).double()
    for i in range(n):
        others = [j for j in range(n) if j != i]
        both = torch.stack([shown[:, i, None].expand(-1, n - 1), shown[:, others]]).double()
        pairs[:, i] = both.amax(0) + 0.56 * both.amin(0) + bias
    pairs += torch.randn(pairs.shape, generator=g).double()
    scores = image_norm(torch.cat([own[..., None], pairs], -1), own)
    scores = (scores - scores.mean(0)) / scores.std(0)
    found = mean_ap(fuse(scores, directions(ranked(scores))), shown)
    alone, best = mean_ap(scores[..., 0], shown), mean_ap(scores[..., 0] + scores[..., 1:].amax(-1), shown)
    assert found > alone + 0.03
    assert found > best + 0.02


def test_few_labels_and_many() -> None:
    ram = made(most=12)
    bank = torch.randn(40, DIM, generator=torch.Generator().manual_seed(2))
    ram.prepare([trunk_of(bank)], LABELS)
    for names in (LABELS[:1], LABELS[:2], LABELS, ["dog", "cat", "red", "kite", "traffic light", "person", "bicycle"]):
        labels = ram.encode_labels(names)
        assert labels.compound.shape[1] == min(len(names) - 1, 12 // len(names))
        assert ram.recognize(trunk_of(bank), labels).image.isfinite().all()
