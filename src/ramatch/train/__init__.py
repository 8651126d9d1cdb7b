"""Training: recipes, one loop, checkpoints and resume; alignment, adapting, studies."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "data.augment": ("AugmentConfig",),
    "data.decode": ("ImageCache",),
    "evaluation.calibrate": ("CalibrationResult", "calibrate"),
    "evaluation.models": ("Scores", "TestSet", "collect_scores", "evaluate", "evaluate_all", "load_model", "read_test"),
    "train.config": ("CheckpointConfig", "DataConfig", "EvalConfig", "ModelConfig", "OptimConfig", "OwnConfig")
    + ("TrainConfig",)
    + ("list_recipes", "load_recipe"),
    "train.interrupt": ("Interrupted",),
    "train.folder": ("unfinished",),
    "train.own": ("OwnResult", "train_own"),
    "train.run": ("RunResult", "train"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"ramatch.{home}"), name)
    raise AttributeError(f"module 'ramatch.train' has no attribute {name!r}")
