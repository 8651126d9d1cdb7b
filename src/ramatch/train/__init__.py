"""Training: recipes, the loop, checkpoints and resume, evaluation of models on data, calibration."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "config": (
        "AugmentConfig",
        "CheckpointConfig",
        "DataConfig",
        "EvalConfig",
        "ModelConfig",
        "OptimConfig",
        "TrainConfig",
    ),
    "recipe": ("list_recipes", "load_recipe"),
    "loop": ("RunResult", "train"),
    "batches": ("ImageCache",),
    "evaluation": ("Scores", "TestSet", "collect_scores", "evaluate", "evaluate_all", "load_model", "read_test"),
    "calibration": ("CalibrationResult", "calibrate"),
    "interrupt": ("Interrupted",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"ramatch.train.{home}"), name)
    raise AttributeError(f"module 'ramatch.train' has no attribute {name!r}")
