"""Pictures, labels and captions: reading them, checking them, feeding them to torch.

Names are loaded on first use, so that decoding one picture does not import torchvision. The functions
`check` and `find` are left in the modules of their names, as one name cannot be both.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "annotations": "Annotations Box Issue Record Summary",
    "augment": "Normalize",
    "benchmarks": "BENCHMARKS Benchmark Evaluation Prepared prepare read_protocol",
    "captions": "CaptionRecord Captions read_captions",
    "check": "Report",
    "classes": "class_list",
    "decode": "ImageCache ImageDataset ImageLoader decode_all",
    "find": "Found find_images",
    "images": "ImageError ImageTooLargeError load_image",
    "records": "list_splits read_annotations read_classes",
    "sampler": "Draw ResumableSampler sample_seed",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"ramatch.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ramatch.data' has no attribute {name!r}")
