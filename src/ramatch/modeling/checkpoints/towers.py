"""The towers that can be joined: vision and text transformers of several families, read from their own folders.

Vision: DINOv2, ViT (also DINO and MAE in ViT's form), the image tower of any CLIP. Text: BERT, RoBERTa and XLM-RoBERTa,
DistilBERT (sentence encoders are one of these, mean-pooled), the text tower of any CLIP. Whatever else `load_backbone`
reads gives its tower too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import RamatchError
from ...files import read_json
from ..backbone import TowerConfig
from .files import download, read_preprocess, read_weights
from .huggingface import TEXT, VISION, first_position
from .loading import load_backbone
from .tokenizer import Tokenizer

LONGEST = 64  # tokens of a caption


@dataclass(frozen=True)
class Tower:
    """Shape and weights under our names; a vision tower's mean and deviation of pixels, a text tower's tokenizer."""

    name: str
    config: TowerConfig
    state: dict[str, Tensor]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    tokenizer: Tokenizer | None = None


def read_vision(name: str | Path) -> Tower:
    """The vision tower of a folder, a hub id or a state-dict file."""
    folder, raw, kind = _open(name)
    if kind in TEXT and kind not in VISION:
        raise RamatchError(f"{folder.name} is a '{kind}' model, which has no vision tower; give it as --text")
    if kind not in VISION:
        whole = load_backbone(name)
        pre, tower = whole.preprocess, whole.vision
        return Tower(folder.name, tower.config, dict(tower.state_dict()), pre.mean, pre.std)
    config, state = VISION[kind].shape(raw), VISION[kind].read(read_weights(folder), folder.name)
    pre = read_preprocess(folder, (config.image, config.image), VISION[kind].pixels)
    return Tower(folder.name, config, state, pre.mean, pre.std)


def read_text(name: str | Path) -> Tower:
    """The text tower of a folder, a hub id or a state-dict file."""
    folder, raw, kind = _open(name)
    if kind in VISION and kind not in TEXT:
        raise RamatchError(f"{folder.name} is a '{kind}' model, which has no text tower; give it as --vision")
    if kind not in TEXT:
        whole = load_backbone(name)
        tower = whole.require_text("--text")
        return Tower(folder.name, tower.config, dict(tower.state_dict()), tokenizer=whole.tokenizer)
    config, state = TEXT[kind].shape(raw), TEXT[kind].read(read_weights(folder), folder.name)
    state["positions"] = state["positions"][first_position(raw) :]
    return Tower(folder.name, config, state, tokenizer=Tokenizer.from_folder(folder, min(config.context, LONGEST)))


def _open(name: str | Path) -> tuple[Path, dict[str, Any], str]:
    """Folder, config and kind of model ('' where there is no config.json)."""
    path = Path(name)
    if path.is_file():
        return path, {}, ""
    folder = path if path.is_dir() else download(str(name))
    raw = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return folder, raw, raw.get("model_type", "")
