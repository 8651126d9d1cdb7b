"""A tiny backbone with random weights and tiny pictures of coloured squares: small enough to train in a second."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer as Fast
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from ramatch.modeling.backbone import Backbone, TowerConfig
from ramatch.modeling.checkpoints.folder import save_backbone
from ramatch.modeling.checkpoints.tokenizer import Tokenizer
from ramatch.modeling.preprocess import Preprocess
from ramatch.train.config import TrainConfig

# a few labels and what is known of five pictures
LABELS = ["cat", "dog", "red kite", "traffic light"]
TARGETS = torch.tensor([[1, 0, 1, 0], [0, 1, 0, -1], [0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 1, -1]]).float()
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 40),
    "blue": (40, 60, 230),
    "yellow": (240, 230, 40),
    "purple": (150, 40, 190),
    "white": (250, 250, 250),
}
SEEN, UNSEEN = tuple(COLOURS)[:4], tuple(COLOURS)[4:]
SIDE, PATCH = 32, 8
TIMES = ("time", "seconds", "images_per_s")  # fields that differ between two runs of the same thing


def tiny_backbone(seed: int = 0) -> Backbone:
    """Width 32, two layers in each tower, a grid of 4 × 4, D = 32."""
    generator = torch.Generator().manual_seed(seed)
    words = ["<pad>", "<s>", "</s>", "<unk>", *COLOURS, "A", "photo", "of", "a", "."]
    inner = Fast(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    backbone = Backbone(
        TowerConfig(32, 2, 2, 64, patch=PATCH, image=SIDE, stem_norm=True),
        TowerConfig(32, 2, 2, 64, vocab=len(words), context=16, causal=True),
        32,
        Preprocess((SIDE, SIDE)),
        Tokenizer(inner, 16),
        logit_scale=20.0,
        name="tiny",
    )
    with torch.no_grad():
        for name, parameter in sorted(backbone.named_parameters()):
            if "ln" not in name and "norm" not in name and "stem" not in name:
                parameter.normal_(0, 0.15, generator=generator)
    return backbone.eval()


def pictures(count: int = 5, height: int = 32, width: int = 32) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=g)


def squares(folder: Path, train: int = 96, test: int = 40, seed: int = 0) -> Path:
    """A benchmark folder: grey pictures with one to three coloured squares; some colours occur in the test only."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)

    def make(name: str, colours: tuple[str, ...]) -> list[Any]:
        picture = rng.integers(90, 130, (SIDE, SIDE, 3), dtype=np.uint8)
        shown = [str(c) for c in rng.permutation(colours)[: rng.integers(1, 4)]]
        places = rng.permutation(4)
        for colour, place in zip(shown, places, strict=False):
            y, x = 16 * (place // 2) + rng.integers(0, 4), 16 * (place % 2) + rng.integers(0, 4)
            picture[y : y + 12, x : x + 12] = COLOURS[colour]
        Image.fromarray(picture).save(folder / "images" / f"{name}.png")
        return [f"images/{name}.png", shown]

    rows = [make(f"train{i:03}", SEEN) for i in range(train)]
    tests = [make(f"test{i:03}", SEEN + UNSEEN) for i in range(test)]
    hidden = [[path, [c for c in shown if c in UNSEEN]] for path, shown in tests]
    for split, classes, images in (
        ("train", SEEN, rows),
        ("test_gzsl", SEEN + UNSEEN, tests),
        ("test_zsl", UNSEEN, [r for r in hidden if r[1]]),
    ):
        (folder / f"{split}.json").write_text(json.dumps({"classes": list(classes), "images": images}))
    return folder


def tiny_values(root: Path, **changes: Any) -> dict[str, Any]:
    """A config, as plain data, for the backbone and pictures that `tiny_world` put under `root`."""
    values: dict[str, Any] = {
        "output": str(root / "run"),
        "model": {
            "backbone": str(root / "backbone"),
            "ram": {
                "adapted_layers": 1,
                "saa_layers": 1,
                "prompt_layers": 1,
                "visual_prompts": 2,
                "prompt_tokens": 2,
                "max_iter": 20,
                "tau_region": 0.05,
            },
        },
        "data": {"path": str(root / "data"), "workers": 0, "validation": 0.2, "cache": "none"},
        "optim": {"lr": 3e-3, "prompt_lr": 0.02, "temperature_lr": 1e-4, "ema_decay": 0.9},
        "eval": {"batch_size": 32, "test": False},
        "checkpoint": {"every": 3, "keep": 2},
        "epochs": 2,
        "batch_size": 16,
        "log_every": 2,
        "device": "cpu",
        "tensorboard": False,
    }
    for key, value in changes.items():
        place = values
        *path, last = key.split("__")
        for part in path:
            place = place[part]
        place[last] = value
    return values


def tiny_config(root: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.from_dict(tiny_values(root, **changes))


def tiny_world(root: Path) -> Path:
    squares(root / "data")
    save_backbone(tiny_backbone(), root / "backbone")
    return root


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Entries of a log; a last line cut by a crash is left out."""
    entries = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries
