"""A problem of a second for systems that learn: pictures of colored squares, a tiny backbone, cached features."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from train_tiny import squares, tiny_backbone

from ramatch.config import preset
from ramatch.evaluation.metrics import mean_ap
from ramatch.methods import build_method
from ramatch.train.cached import CachedTask, collect_cached, fit_cached, ram_stem
from ramatch.train.config import CachedConfig
from ramatch.train.features import Views, cache_features


def learn(
    folder: Path,
    name: str,
    settings: dict[str, Any],
    spoil: Callable[[torch.Tensor], torch.Tensor] = lambda targets: targets,
    **changes: Any,
) -> tuple[float, float]:
    """mAP on the pictures it learns from, before and after; `spoil` changes the targets that it learns from."""
    listed = json.loads((squares(folder) / "train.json").read_text())
    pixels = np.stack([np.array(Image.open(folder / path)) for path, _ in listed["images"]])
    targets = torch.tensor([[float(label in shown) for label in listed["classes"]] for _, shown in listed["images"]])
    torch.manual_seed(0)
    small = preset("ramatch", adapted_layers=1, saa_layers=1)
    ram = build_method(tiny_backbone(), small, {"name": name, "settings": settings})
    cache = cache_features(ram_stem(ram), torch.from_numpy(pixels).permute(0, 3, 1, 2), Views(1))

    def quality() -> float:
        scores = collect_cached(ram, cache, listed["classes"])[..., 0]
        return mean_ap(scores.numpy(), targets.numpy())

    before = quality()
    config = CachedConfig().replace(epochs=20, batch_size=16, **{k.replace("__", "."): v for k, v in changes.items()})
    fit_cached(CachedTask(ram.train(), cache, spoil(targets), listed["classes"], config))
    return before, quality()
