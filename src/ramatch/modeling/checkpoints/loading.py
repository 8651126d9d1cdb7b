"""Reading backbones, and single towers to be joined, from disk or the hub.

`load_backbone` understands, by what it finds: a Hugging Face CLIP, its vision tower alone, or a dual encoder of a
DINOv2 and a BERT (`huggingface.py`), a SigLIP (`siglip.py`), an open_clip folder and bare state dicts of OpenAI's CLIP
or open_clip's (`openai.py`, with timm's towers in `timm.py`), and what `save_backbone` wrote (`folder.py`).
`read_tower` takes a tower out of these, and the families of towers alone that `huggingface.py` lists. The table for
users is docs/backbones.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ...errors import RamatchError
from ..backbone import Backbone
from ..preprocess import Preprocess
from ..towers import TowerConfig
from . import huggingface, openai, siglip, timm
from .files import download, read_config, read_preprocess, read_tensors, read_weights
from .hashes import check_hashes
from .huggingface import first_position
from .tokenizer import Tokenizer

BUNDLED = ("ramatch-mini",)
LONGEST = 64  # tokens of a caption
VISION, TEXT = huggingface.VISION | siglip.VISION, huggingface.TEXT | siglip.TEXT
READ = {  # model types that have a joint space
    **dict.fromkeys(("clip", "clip_vision_model", "vision-text-dual-encoder"), huggingface.load),
    **dict.fromkeys(siglip.VISION, siglip.load),
}


def bundled_model(name: str) -> Path | None:
    """Folder of a model that ships with the package, or None."""
    folder = Path(__file__).parents[2] / "models" / name
    return folder if name in BUNDLED and folder.is_dir() else None


def load_backbone(
    name: str | Path,
    *,
    image_size: int | tuple[int, int] | None = None,
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
    return model.eval()


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
    if "architecture" in raw:
        return timm.load(folder, name, raw)
    kind = raw.get("model_type", "unknown")
    if kind in READ:
        return READ[kind](folder, name, raw)
    if kind in VISION | TEXT:
        raise RamatchError(
            f"'{name}' is a '{kind}' model, a tower alone that shares no space with another; `ramatch align` joins one "
            "that sees with one that reads"
        )
    raise RamatchError(
        f"'{name}' is a '{kind}' model; ramatch reads CLIP and SigLIP (any ViT), their vision towers, open_clip's "
        "folders, and DINOv2 + BERT dual encoders (see `ramatch align`); docs/backbones.md lists them"
    )


# -------------------------------------------------------------------------------------------------------------- towers


class Tower(NamedTuple):
    """Shape and weights under our names; how a vision tower wants its pixels, a text tower's tokenizer."""

    name: str
    config: TowerConfig
    state: dict[str, Tensor]
    preprocess: Preprocess | None = None
    tokenizer: Tokenizer | None = None


def read_tower(name: str | Path, part: str) -> Tower:
    """The "vision" or the "text" tower of a folder, a hub id or a state-dict file."""
    path, (families, other) = Path(name), (VISION, "text") if part == "vision" else (TEXT, "vision")
    folder = path if path.exists() else download(str(name))
    raw = read_config(folder / "config.json") if (folder / "config.json").is_file() else {}
    kind = raw.get("model_type", "")
    if "architecture" in raw and part == "vision" and not (folder / "open_clip_config.json").is_file():
        config, state = timm.tower(read_weights(folder), folder.name, str(raw["architecture"]))
        return Tower(folder.name, config, state, timm.preprocess(config, raw))
    if kind not in families and kind in VISION | TEXT:
        raise RamatchError(f"{folder.name} is a '{kind}' model, which has no {part} tower; give it as --{other}")
    if kind not in families:  # only the whole model can be read
        whole = load_backbone(name)
        tower = whole.vision if part == "vision" else whole.require_text("--text")
        return Tower(folder.name, tower.config, dict(tower.state_dict()), whole.preprocess, whole.tokenizer)
    family = families[kind]
    config = family.shape(raw)
    state = family.read(read_weights(folder), folder.name, config)
    if part == "vision":
        preprocess = read_preprocess(folder, (config.image, config.image), family.pixels)
        return Tower(folder.name, config, state, preprocess)
    state["positions"] = state["positions"][first_position(raw) :]
    return Tower(folder.name, config, state, tokenizer=Tokenizer.from_folder(folder, min(config.context, LONGEST)))
