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
    "Prediction": "prediction",
    "Tag": "prediction",
    "Unreadable": "prediction",
    "to_pandas": "prediction",
    "RamatchError": "errors",
    "RAMConfig": "config",
    "PRESETS": "config",
    "preset": "config",
    "Backbone": "modeling.backbone",
    "RAM": "modeling.ram",
    "solve_batch": "ot",
    "read_annotations": "data.records",
    "evaluate_scores": "evaluation",
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
    "Unreadable",
    "Vocabulary",
    "__version__",
    "evaluate_scores",
    "preset",
    "read_annotations",
    "solve_batch",
    "to_pandas",
]

if TYPE_CHECKING:
    from .config import PRESETS, RAMConfig, preset
    from .data.records import read_annotations
    from .errors import RamatchError
    from .evaluation import evaluate_scores
    from .modeling.backbone import Backbone
    from .modeling.ram import RAM
    from .ot import solve_batch
    from .prediction import Prediction, Tag, Unreadable, to_pandas
    from .recognizer import Recognizer, Vocabulary


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"ramatch.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ramatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
