"""Reading backbones from disk or the hub.

`load_backbone` understands, by what it finds: a Hugging Face CLIP or its vision tower alone (`clip.py`), a dual encoder
of a DINOv2 and a BERT (`dual.py`), an open_clip folder and bare state dicts of OpenAI's CLIP or open_clip's ViT
(`openai.py`), and what `save_backbone` wrote (`folder.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ...errors import RamatchError
from ..backbone import Backbone
from ..preprocess import Preprocess
from . import clip, dual, openai
from .files import download, read_config, read_json, read_tensors
from .hashes import check_hashes

__all__ = ["BUNDLED", "bundled_model", "load_backbone", "read_json"]

BUNDLED = ("ramatch-mini",)
READERS = {"clip": clip.load, "clip_vision_model": clip.load, "vision-text-dual-encoder": dual.load}


def bundled_model(name: str) -> Path | None:
    """Folder of a model that ships with the package, or None."""
    folder = Path(__file__).parents[2] / "models" / name
    return folder if name in BUNDLED and folder.is_dir() else None


def load_backbone(
    name: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    act: str | None = None,
    label_features: str | Path | None = None,
) -> Backbone:
    """A frozen `Backbone`. `image_size` (side, or (height, width)) resizes the position grid; `act` settles the
    activation of a bare state dict ("quick_gelu" for weights trained by OpenAI, "gelu" for most of open_clip's)."""
    path = bundled_model(str(name)) or Path(name)
    check_hashes(path)
    if (path / "backbone" / "config.json").is_file():  # a model folder that carries its backbone
        path = path / "backbone"
    if path.is_file():
        model = openai.from_state_dict(read_tensors(path), name=path.name, act=act)
    elif path.is_dir():
        model = _folder(path, str(name))
        model.name = str(name)
    else:
        model = _folder(download(str(name)), str(name))
    if image_size is not None:
        model.preprocess = _resized(model, image_size)
    if label_features is not None:
        model.set_label_features(label_features)
    return model.to(device=device, dtype=dtype).eval()


def _resized(model: Backbone, size: int | tuple[int, int]) -> Preprocess:
    height, width = (size, size) if isinstance(size, int) else size
    patch = model.vision.config.patch
    if height % patch or width % patch or height < patch or width < patch:
        raise RamatchError(f"image size {height}×{width} is not a multiple of the patch size {patch} of '{model.name}'")
    return replace(model.preprocess, size=(height, width))


def _folder(folder: Path, name: str) -> Backbone:
    if (folder / "open_clip_config.json").is_file():
        return openai.load(folder, name)
    if not (folder / "config.json").is_file():
        raise RamatchError(f"'{name}' has no config.json, so it is not a model folder")
    raw = read_config(folder / "config.json")
    if raw.get("format") == "ramatch-backbone":
        from .folder import load_saved_backbone

        return load_saved_backbone(folder)
    kind = raw.get("model_type", "unknown")
    if kind not in READERS:
        raise RamatchError(
            f"'{name}' is a '{kind}' model; ramatch reads CLIP (any ViT), CLIP vision towers, and "
            "DINOv2 + BERT dual encoders (see `ramatch align`)"
        )
    return READERS[kind](folder, name, raw)
