"""Tiny models and data to soak, written by the helpers of the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from soak.process import ROOT, run

LABELS = "cat,dog,kite,red,blue,person,bicycle"


def _helpers() -> None:
    for folder in ("modeling", "train"):
        path = str(ROOT / "tests" / folder)
        if path not in sys.path:
            sys.path.insert(0, path)


def tiny_model(folder: Path) -> Path:
    """A model folder that stands alone, calibrated at random."""
    _helpers()
    import torch
    from tiny_models import tiny_ram

    from ramatch import Recognizer
    from ramatch.evaluation.calibration import Calibrator

    torch.manual_seed(0)
    calibrator = Calibrator.fit(torch.randn(40, 4, 3), torch.rand(40, 4) > 0.5)
    Recognizer(tiny_ram(), calibrator=calibrator).save_pretrained(folder, with_backbone=True)
    return folder


def tiny_training(root: Path, **changes: Any) -> dict[str, Any]:
    """Data and a backbone under `root`; the settings of a short training on them, as plain data."""
    _helpers()
    from train_tiny import tiny_values, tiny_world

    tiny_world(root)
    return tiny_values(root, **changes)


def tiny_captions(root: Path) -> dict[str, list[str]]:
    """Captioned and labelled images under `root`; `ramatch align` and `ramatch adapt` on them, all but --out."""
    _helpers()
    from align_helpers import put_squares, tiny_towers
    from transformers.utils import logging

    logging.disable_progress_bar()
    (vision, text), data = tiny_towers(root), put_squares(root / "data", 30)
    align = ["align", "--vision", str(vision), "--text", str(text), "--captions", str(data), "--device", "cpu"]
    align += [
        "epochs=2",
        "vision_layers=1",
        "image_size=32",
        "dim=16",
        "batch_size=12",
        "min_images=3",
        "views=1",
        "ignore_above=0.9999",
    ]
    run(["-m", "ramatch", *align, "--out", str(root / "aligned")])
    adapt = ["adapt", "--backbone", str(root / "aligned"), "--captions", str(data / "captions.json"), "--device", "cpu"]
    adapt += ["--data", str(data / "labels.json"), "--views", "2", "--min-images", "3", "--max-tags", "8", "epochs=2"]
    adapt += ["lexicon=none", "adapted_layers=1", "saa_layers=1", "prompt_layers=1", "visual_prompts=2"]
    return {"align": align, "adapt": [*adapt, "prompt_tokens=2"]}
