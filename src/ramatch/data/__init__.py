"""Pictures, labels and captions: reading them, checking them, feeding them to torch.

Names are loaded on first use, so that decoding one picture does not import torchvision. The function `check`
is left in its module `ramatch.data.check`, as one name cannot be both.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramatch.data.annotations import Annotations, Box, Issue, Record, Summary
    from ramatch.data.augment import Normalize
    from ramatch.data.benchmarks import (
        BENCHMARKS,
        PROTOCOLS,
        Benchmark,
        Evaluation,
        Prepared,
        class_list,
        prepare,
        read_protocol,
    )
    from ramatch.data.captions import CaptionRecord, Captions, read_captions
    from ramatch.data.check import Report
    from ramatch.data.decode import ImageCache, ImageDataset, ImageLoader, decode_all
    from ramatch.data.images import ImageError, ImageTooLargeError, find_images, load_image
    from ramatch.data.records import list_splits, read_annotations, read_classes
    from ramatch.data.sampler import Draw, ResumableSampler, sample_seed

_HOMES = {
    "annotations": ("Annotations", "Box", "Issue", "Record", "Summary"),
    "augment": ("Normalize",),
    "benchmarks": (
        "BENCHMARKS",
        "PROTOCOLS",
        "Benchmark",
        "Evaluation",
        "Prepared",
        "class_list",
        "prepare",
        "read_protocol",
    ),
    "captions": ("CaptionRecord", "Captions", "read_captions"),
    "check": ("Report",),
    "decode": ("ImageCache", "ImageDataset", "ImageLoader", "decode_all"),
    "images": ("ImageError", "ImageTooLargeError", "find_images", "load_image"),
    "records": ("list_splits", "read_annotations", "read_classes"),
    "sampler": ("Draw", "ResumableSampler", "sample_seed"),
}

__all__ = [
    "BENCHMARKS",
    "PROTOCOLS",
    "Annotations",
    "Benchmark",
    "Box",
    "CaptionRecord",
    "Captions",
    "Draw",
    "Evaluation",
    "ImageCache",
    "ImageDataset",
    "ImageError",
    "ImageLoader",
    "ImageTooLargeError",
    "Issue",
    "Normalize",
    "Prepared",
    "Record",
    "Report",
    "ResumableSampler",
    "Summary",
    "class_list",
    "decode_all",
    "find_images",
    "list_splits",
    "load_image",
    "prepare",
    "read_annotations",
    "read_captions",
    "read_classes",
    "read_protocol",
    "sample_seed",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"ramatch.data.{home}"), name)
    raise AttributeError(f"module 'ramatch.data' has no attribute {name!r}")
