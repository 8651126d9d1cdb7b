"""After CoMC: it learns from sentences alone; images are classified near the side of language."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import backbone, close, pixels

from ramatch.config import preset
from ramatch.evaluation.metrics import mean_ap
from ramatch.methods import build_method
from ramatch.methods.comc import CoMCSettings, choose, join
from ramatch.modeling.ram import Trunk
from ramatch.train.cached import CachedTask, fit_cached, ram_stem
from ramatch.train.config import CachedConfig
from ramatch.train.features import Views, cache_features

LABELS = ["dog", "cat", "bicycle", "kite", "rain", "person"]


def made(**settings):
    torch.manual_seed(0)
    given = {"name": "comc", "settings": {"sentences": 256} | settings}
    return build_method(backbone("dual"), preset("ramatch"), given)


def images_of_sentences(ram) -> tuple[Trunk, torch.Tensor]:
    """Features that differ from those of sentences by a gap that all share, and a little noise; what each shows."""
    chosen, g = choose(len(LABELS), CoMCSettings(sentences=100, seed=9)), torch.Generator().manual_seed(3)
    targets = torch.stack([F.one_hot(torch.tensor(c), len(LABELS)).sum(0) for c in chosen]).float()
    sentences = [f"A photo of a {join([LABELS[i] for i in c])}." for c in chosen]
    features = F.normalize(ram.backbone.encode_text(sentences), dim=-1)
    gap = 0.5 * F.normalize(torch.randn(32, generator=g), dim=0)
    noise = torch.randn(features.shape, generator=g) * 0.05 / 32**0.5
    return Trunk(features + gap + noise, torch.zeros(100, 16, 64), (), (4, 4)), targets


def test_learns_from_sentences_what_images_show():
    ram = made()
    trunk, targets = images_of_sentences(ram)

    def quality() -> float:
        with torch.no_grad():
            found = ram.eval().recognize(trunk, ram.encode_labels(LABELS))
        return mean_ap(found.image.numpy(), targets.numpy())

    assert quality() < 0.5  # plain cosines: labels of a random tower lie close together
    cache = cache_features(ram_stem(ram), torch.zeros(64, 3, 32, 32, dtype=torch.uint8), Views(1))
    config = CachedConfig(epochs=100, batch_size=32).replace(**{"optim.lr": 3e-2})
    fit_cached(CachedTask(ram.train(), cache, torch.full((64, 6), -1.0), LABELS, config))
    assert quality() > 0.75


def test_classifier_and_mapping_against_a_plain_rewrite():
    ram, images = made(mapping=0.7, mapping_scale=9.0, sentences=5).eval(), pixels()
    torch.nn.init.normal_(ram.memory)
    for layer in (ram.adapter[0], ram.adapter[2]):
        torch.nn.init.normal_(layer.weight, std=0.2)
    with torch.no_grad():
        labels = ram.encode_labels(LABELS)
        feature = ram.features(ram.trunk(images), labels)[0].double()
        found = ram(images, LABELS).image
        first, second = (ram.adapter[i].weight.double() for i in (0, 2))
        biases = [ram.adapter[i].bias.double() for i in (0, 2)]
        for b in range(len(images)):
            v = feature[b] / feature[b].norm()
            sentences = [m.double() / m.double().norm() for m in ram.memory]
            weights = [(9.0 * (v @ m)).exp() for m in sentences]
            mean = sum(w * m for w, m in zip(weights, sentences, strict=True))
            v = 0.3 * v + 0.7 * mean / mean.norm()
            v = v / v.norm()
            h = v + second @ (first @ v + biases[0]).clamp(min=0) + biases[1]
            for n in range(len(LABELS)):
                close(found[b, n].double(), 20 * (h @ labels.unit[n].double()) / h.norm(), 1e-4)


def test_sentences_and_what_they_name():
    ram = made(sentences=40, most=3).train()
    present = ram.present(tuple(LABELS))
    assert present.shape == (40, 6)
    assert set(present.sum(1).tolist()) == {1.0, 2.0, 3.0}
    assert [join(LABELS[:n]) for n in (1, 2, 3)] == ["dog", "dog and cat", "dog, cat and bicycle"]
    alone = next(i for i, row in enumerate(present) if row.sum() == 1)
    label = LABELS[int(present[alone].argmax())]
    with torch.no_grad():
        close(ram.memory[alone], F.normalize(ram.backbone.encode_text([f"A photo of a {label}."])[0], dim=0))


def test_the_mapping_bears_an_average_of_weights():
    """In training the kept sentences are averaged from zeros on: shorter, the same directions."""
    ram, images = made().eval(), pixels()
    torch.nn.init.normal_(ram.memory)
    with torch.no_grad():
        before = ram(images, LABELS).image
        ram.memory.mul_(0.01)
        close(ram(images, LABELS).image, before)
