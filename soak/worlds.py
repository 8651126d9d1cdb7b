"""Tiny models and data to soak, written by the helpers of the tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from soak.process import ROOT

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
