"""What tests of systems that learn share: a small problem, coloured squares through a random tower; random features
in float64, and losses over pairs written as loops."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from train_tiny import COLOURS, SEEN, SIDE, tiny_backbone

from ramatch.config import preset
from ramatch.methods import Method, build_method
from ramatch.methods.base import MethodOutput
from ramatch.modeling.ram import Labels
from ramatch.train.cached import CachedTask, collect_cached, fit_cached, ram_stem
from ramatch.train.config import CachedConfig
from ramatch.train.features import FeatureCache, Views, cache_features


def squares(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Grey pictures (n, 3, 32, 32) with one or two coloured squares, and which of `SEEN` each shows."""
    rng, pictures = np.random.default_rng(seed), []
    targets = torch.zeros(count, len(SEEN))
    for i in range(count):
        picture = rng.integers(90, 130, (SIDE, SIDE, 3), dtype=np.uint8)
        for colour, place in zip(rng.permutation(4)[: rng.integers(1, 3)], rng.permutation(4), strict=False):
            y, x = 16 * (place // 2) + rng.integers(0, 4), 16 * (place % 2) + rng.integers(0, 4)
            picture[y : y + 12, x : x + 12] = COLOURS[SEEN[colour]]
            targets[i, colour] = 1
        pictures.append(torch.from_numpy(picture).permute(2, 0, 1))
    return torch.stack(pictures), targets


def small(name: str, **settings: Any) -> Method:
    torch.manual_seed(0)
    model = build_method(tiny_backbone(), preset("ramatch"), {"name": name, "settings": settings})
    assert isinstance(model, Method)
    return model


def keep(model: Method, pixels: torch.Tensor) -> FeatureCache:
    return cache_features(ram_stem(model), pixels, Views())


def found(model: Method, cache: FeatureCache, targets: torch.Tensor) -> float:
    """Share of all pairs of a present and an absent label of the same picture that are in the right order: what
    ranking losses are about. (They say nothing of one label in two pictures, which mAP compares.)"""
    scores = collect_cached(model, cache, SEEN)[..., 0]
    pairs = (targets[:, :, None] > 0) & (targets[:, None, :] == 0)
    return (scores[:, :, None] > scores[:, None, :])[pairs].float().mean().item()


def learn(model: Method, epochs: int = 20, lr: float = 3e-3, **optim: float) -> tuple[float, float, list[float]]:
    """Pairs in order on new pictures before and after training on others (a few of whose targets are unknown), and how
    the loss went."""
    pixels, targets = squares(512, seed=1)
    new, truth = squares(128, seed=2)
    unknown = torch.rand(targets.shape, generator=torch.Generator().manual_seed(3)) < 0.1
    test = keep(model, new)
    before = found(model, test, truth)
    rates = {f"optim.{key}": value for key, value in {"lr": lr, **optim}.items()}
    config = CachedConfig().replace(epochs=epochs, batch_size=32, log_every=16, **rates)
    log = fit_cached(CachedTask(model, keep(model, pixels), targets.masked_fill(unknown, -1), SEEN, config))
    return before, found(model, test, truth), log["loss"]


# ------------------------------------------------------------------------------------ equations, plainly and in float64


TARGETS = torch.tensor([[1, 0, 1, 0, 0], [0, 1, -1, 0, 1], [0, 0, 0, 0, -1]]).double()  # the last: nothing to rank


def plain(name: str, **settings: Any) -> Method:
    """A system in float64 whose every own parameter is random, in training mode."""
    model, generator = small(name, **settings).double(), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if not key.startswith(("backbone.", "tau")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model.train()


def features(regions: int = 6) -> tuple[torch.Tensor, torch.Tensor, Labels]:
    """Global features (3, D), regions (3, M, D) and five labels of the tiny tower's joint space, D = 32."""
    g = torch.Generator().manual_seed(6)
    image, local, names = (torch.randn(shape, generator=g).double() for shape in ((3, 32), (3, regions, 32), (5, 32)))
    names = names / names.norm(dim=-1, keepdim=True)
    return image, local, Labels(tuple("abcde"), names, names)


def output(model: Method) -> tuple[MethodOutput, torch.Tensor | None]:
    """Logits for `features` with what the loss looks at, and where the system looked."""
    with torch.no_grad():
        scores, where, extra = model.logits(*features())
    return MethodOutput(scores, scores, extra=extra), where


def at_length(x: torch.Tensor, length: float = math.sqrt(32)) -> torch.Tensor:
    return x / math.sqrt(sum(float(v) ** 2 for v in x)) * length


def linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Row by row, of a vector (D,)."""
    bias = torch.zeros(len(layer.weight)).double() if layer.bias is None else layer.bias
    return torch.stack([(row * x).sum() + b for row, b in zip(layer.weight, bias, strict=True)]).detach()


def heads(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
    """Attention of one query (D,) over keys and values (M, D), head by head, (D,)."""
    size, out = len(query) // count, []
    for part in (slice(h * size, (h + 1) * size) for h in range(count)):
        weights = torch.stack([(query[part] * key[part]).sum() / math.sqrt(size) for key in keys]).exp()
        out.append(sum(w * value[part] for w, value in zip(weights / weights.sum(), values, strict=True)))
    return torch.cat(out)


def pairs(scores: torch.Tensor, targets: torch.Tensor, smooth: bool = False) -> list[list[float]]:
    """Each image's costs of (present, absent) pairs."""
    found: list[list[float]] = []
    for s, y in zip(scores.tolist(), targets.tolist(), strict=True):
        gaps = [s[j] - s[i] for i in range(len(y)) for j in range(len(y)) if y[i] == 1 and y[j] == 0]
        found.append([math.log1p(math.exp(gap)) if smooth else max(1 + gap, 0.0) for gap in gaps])
    return found


def mean_pairs(scores: torch.Tensor, targets: torch.Tensor, smooth: bool = False) -> list[float]:
    return [sum(costs) / len(costs) if costs else 0.0 for costs in pairs(scores, targets, smooth)]
