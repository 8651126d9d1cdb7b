"""Recover and Match: open-vocabulary multi-label image recognition.

>>> from ramatch import Recognizer
>>> recognizer = Recognizer.from_pretrained("ramatch-mini")
>>> recognizer.set_vocabulary(["dog", "umbrella", "kite"])
>>> recognizer.predict("photo.jpg").top(3)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name → module: imported when first used, so that `import ramatch` and `ramatch --help` do not wait for torch
_HOMES = {
    "Recognizer": "recognizer",
    "Vocabulary": "recognizer",
    "Prediction": "results",
    "Tag": "results",
    "RamatchError": "errors",
    "RAMConfig": "config",
    "PRESETS": "config",
    "preset": "config",
    "Backbone": "model.backbone",
    "RAM": "model.ram",
    "solve_batch": "ot",
    "read_annotations": "data",
    "evaluate_scores": "evaluate",
}

__all__ = [
    "PRESETS",
    "RAM",
    "Backbone",
    "Prediction",
    "RAMConfig",
    "RamatchError",
    "Recognizer",
    "Tag",
    "Vocabulary",
    "__version__",
    "evaluate_scores",
    "preset",
    "read_annotations",
    "solve_batch",
]

if TYPE_CHECKING:
    from .config import PRESETS, RAMConfig, preset
    from .data import read_annotations
    from .errors import RamatchError
    from .evaluate import evaluate_scores
    from .model.backbone import Backbone
    from .model.ram import RAM
    from .ot import solve_batch
    from .recognizer import Recognizer, Vocabulary
    from .results import Prediction, Tag


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"ramatch.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ramatch' has no attribute {name!r}")
