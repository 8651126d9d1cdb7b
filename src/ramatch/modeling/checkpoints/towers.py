"""The towers that can be joined: vision and text transformers of several families, read from their own folders.

Vision: DINOv2, ViT (also DINO and MAE in ViT's form), the image tower of any CLIP. Text: BERT, RoBERTa and XLM-RoBERTa,
DistilBERT (sentence encoders are one of these, mean-pooled), the text tower of any CLIP. Whatever else `load_backbone`
reads gives its tower too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import RamatchError
from ..backbone import TowerConfig
from ..preprocess import CLIP_MEAN, CLIP_STD, HALF, IMAGENET_MEAN, IMAGENET_STD
from . import clip
from .bert import bert, bert_config, distilbert, distilbert_config, first_position, roberta_config
from .dinov2 import dinov2, dinov2_config, vit, vit_config
from .files import Reader, download, read_config, read_preprocess, read_weights, take, translate
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


class Family(NamedTuple):
    """A kind of tower (`model_type`): its shape from config.json, its tensors, the prefix that a larger model puts
    before their names, and what its pixels are normalized with unless the folder says otherwise."""

    shape: Callable[[dict[str, Any]], TowerConfig]
    reader: Reader
    prefix: str
    pixels: tuple[tuple, tuple] = (HALF, HALF)


_CLIP_VISION = Family(clip.vision_config, clip.VISION, "vision_model.", (CLIP_MEAN, CLIP_STD))
_CLIP_TEXT = Family(clip.text_config, clip.TEXT, "text_model.")
VISION = {
    "dinov2": Family(dinov2_config, dinov2, "dinov2.", (IMAGENET_MEAN, IMAGENET_STD)),
    "vit": Family(vit_config, vit, "vit."),
    "clip": _CLIP_VISION,
    "clip_vision_model": _CLIP_VISION,
}
TEXT = {
    "bert": Family(bert_config, bert, "bert."),
    "roberta": Family(roberta_config, bert, "roberta."),
    "xlm-roberta": Family(roberta_config, bert, "roberta."),
    "camembert": Family(roberta_config, bert, "roberta."),
    "distilbert": Family(distilbert_config, distilbert, "distilbert."),
    "clip": _CLIP_TEXT,
    "clip_text_model": _CLIP_TEXT,
}


def read_vision(name: str | Path) -> Tower:
    """The vision tower of a folder, a hub id or a state-dict file."""
    folder, raw, kind = _open(name)
    if kind in TEXT and kind not in VISION:
        raise RamatchError(f"{folder.name} is a '{kind}' model, which has no vision tower; give it as --text")
    if kind not in VISION:
        whole = load_backbone(name)
        pre, tower = whole.preprocess, whole.vision
        return Tower(folder.name, tower.config, dict(tower.state_dict()), pre.mean, pre.std)
    config, state = _read(VISION[kind], folder, raw)
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
    config, state = _read(TEXT[kind], folder, raw)
    if TEXT[kind].shape is roberta_config:
        state["positions"] = state["positions"][first_position(raw) :]
    return Tower(folder.name, config, state, tokenizer=Tokenizer.from_folder(folder, min(config.context, LONGEST)))


def _read(family: Family, folder: Path, raw: dict[str, Any]) -> tuple[TowerConfig, dict[str, Tensor]]:
    """Shape and weights. Some releases and models with heads write a tower's prefix, others do not."""
    config, tensors = family.shape(raw), read_weights(folder)
    return config, translate(family.reader, take(tensors, family.prefix) or tensors, folder.name)


def _open(name: str | Path) -> tuple[Path, dict[str, Any], str]:
    """Folder, config and kind of model ('' where there is no config.json)."""
    path = Path(name)
    if path.is_file():
        return path, {}, ""
    folder = path if path.is_dir() else download(str(name))
    raw = read_config(folder / "config.json") if (folder / "config.json").is_file() else {}
    return folder, raw, raw.get("model_type", "")
