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
from .biam import BiAM
from .clip import ZeroShotCLIP
from .comc import CoMC
from .coop import CoOp
from .deep0tag import Deep0Tag
from .dualcoop import DualCoOp
from .dualcoop_pp import DualCoOpPP
from .lesa import LESA
from .mkt import MKT
from .ml_decoder import MLDecoder
from .piaa import PIAA
from .sdl import SDL
from .sparc import SPARC
from .tagclip import TagCLIP

__all__ = ["METHODS", "Method", "build_method", "describe", "untrained"]

METHODS: dict[str, type[Method]] = {
    "clip": ZeroShotCLIP,
    "coop": CoOp,
    "dualcoop": DualCoOp,
    "dualcoop-pp": DualCoOpPP,
    "comc": CoMC,
    "mkt": MKT,
    "ml-decoder": MLDecoder,
    "biam": BiAM,
    "lesa": LESA,
    "sdl": SDL,
    "deep0tag": Deep0Tag,
    "tagclip": TagCLIP,
    "sparc": SPARC,
    "piaa": PIAA,
}


def build_method(backbone: Backbone, config: RAMConfig, method: Mapping[str, Any] | None = None) -> RAM:
    """RAM, or the system that `method` names ("name", and its "settings"), on a backbone. Of RAM's settings the others
    keep what is about the frozen features."""
    name = "ram" if method is None else method.get("name")
    if name == "ram":
        return RAM(backbone, config)
    kind = _known(name)
    return kind(backbone, config, kind.settings_type.from_dict((method or {}).get("settings") or {}))


def untrained(name: str) -> str:
    """The name of a system that can be used as it is; an error for one that must learn, or see images, before."""
    if name == "ram":
        return name
    kind = _known(name)
    if kind.learns or kind.needs_images:
        what = "learns" if kind.learns else "looks at unlabelled images"
        raise RamatchError(
            f"method '{name}' {what} before it is of use: `ramatch train --method {name} --data D --out RUN`, and then "
            "give the run's folder as the model"
        )
    return name


def describe() -> list[dict[str, Any]]:
    """Of every system its name, whose it is, whether it is trained, what it looks at for that, and whether the labels'
    features must come from a text tower."""
    rows: list[dict[str, Any]] = [
        {"name": "ram", "citation": NAMES["ram"], "training": True, "needs": "labelled images", "text_tower": False}
    ]
    for name, kind in METHODS.items():
        alone = "images" if kind.needs_images else "sentences" if kind.learns else "nothing"
        needs = "labelled images" if kind.learns and kind.needs_labels else alone
        row = {"name": name, "citation": NAMES[name], "training": kind.learns, "needs": needs}
        rows.append(row | {"text_tower": kind.needs_text})
    return rows


def _known(name: Any) -> type[Method]:
    if name not in METHODS:
        raise RamatchError(f"unknown method '{name}'; known: {', '.join(NAMES)}")
    return METHODS[name]
