"""The systems RAM is compared with, one file each, with RAM's interface: trained by the same trainer, on the same
cached features, loaded, tested and shown by the same code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import METHODS as NAMES
from ..config import RAMConfig
from ..errors import RamatchError
from ..modeling.backbone import Backbone
from ..modeling.ram import RAM
from .base import Method
from .clip import ZeroShotCLIP

__all__ = ["METHODS", "Method", "build_method"]

METHODS: dict[str, type[Method]] = {
    "clip": ZeroShotCLIP,
}


def build_method(backbone: Backbone, config: RAMConfig, method: Mapping[str, Any] | None = None) -> RAM:
    """RAM, or the system that `method` names ("name", and its "settings"), on a backbone. Of RAM's settings the others
    keep what is about the frozen features."""
    name = "ram" if method is None else method.get("name")
    if name == "ram":
        return RAM(backbone, config)
    if name not in METHODS:
        raise RamatchError(f"unknown method '{name}'; known: {', '.join(NAMES)}")
    kind = METHODS[name]
    return kind(backbone, config, kind.settings_type.from_dict((method or {}).get("settings") or {}))
