"""Whether the Triton kernels can serve a device."""

from __future__ import annotations

import os

import torch


def has_kernels(device: torch.device) -> bool:
    """A GPU with Triton, or the CPU under TRITON_INTERPRET=1; not while tracing, which wants plain operators."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    if torch.compiler.is_compiling():
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
