"""Whether the Triton kernels can serve a device."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch


def kernels(device: torch.device) -> ModuleType | None:
    """The kernel module if it can run on `device`: a GPU with Triton, or the CPU under TRITON_INTERPRET=1."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    if torch.compiler.is_compiling():  # tracing wants plain operators
        return None
    try:
        return importlib.import_module("ramatch.ot._triton")
    except ImportError:
        return None
