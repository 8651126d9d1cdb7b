"""How the program shall take memory. Imports nothing of torch, so that it can speak before torch does."""

from __future__ import annotations

import gc
import os
import sys


def use_growing_segments() -> None:
    """GPU memory in segments that grow: a training run takes a quarter less, at the same speed. torch reads this when
    it first touches the GPU; what the user has set stays."""
    if sys.platform == "linux" and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # the older name: every release reads it


def collect_rarely() -> None:
    """Look for cycles of dead objects after 50,000 new ones, not after 700: importing torch makes hundreds of thousands
    that live on, and looking at them again and again takes an eighth of the import."""
    gc.set_threshold(50_000)
