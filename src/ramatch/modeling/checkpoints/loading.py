"""Reading backbones from disk or the hub, and writing dual encoders of our own.

`load_backbone` understands, by what it finds: a Hugging Face CLIP (`model_type: clip`), a CLIP vision tower alone
(`clip_vision_model`), a dual encoder of a DINOv2 or CLIP vision tower and a BERT (`vision-text-dual-encoder` as written by
`transformers`, with our pooling in its `ramatch` section), an open_clip folder, and bare state dicts of OpenAI's CLIP or open_clip's ViT.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import RamatchError
from ..backbone import Backbone
from ..preprocess import CLIP_MEAN, CLIP_STD, IMAGENET_MEAN, IMAGENET_STD, Preprocess
from ..tokenizer import Tokenizer
from ..backbone import TowerConfig
from . import names as _names

ACTS = {"quick_gelu": "quick_gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}  # open_clip's ViT-H, g and bigG; every other width has heads of 64
BUNDLED = ("ramatch-mini",)
HUB_FILES = ["*.json", "*.txt", "*.safetensors", "pytorch_model*.bin", "open_clip_pytorch_model.bin"]


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
    """A frozen `Backbone`. `image_size` (side, or (height, width)) resizes the position grid; `act` settles the activation
    of a bare state dict ("quick_gelu" for weights trained by OpenAI, "gelu" for most of open_clip's)."""
    path = bundled_model(str(name)) or Path(name)
    if (path / "backbone" / "config.json").is_file():  # a model folder that carries its backbone
        path = path / "backbone"
    if path.is_file():
        model = _state_dict_file(path, act)
    elif path.is_dir():
        model = _folder(path, str(name))
        model.name = str(name)
    else:
        model = _folder(_download(str(name)), str(name))
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
    return Preprocess((height, width), model.preprocess.mean, model.preprocess.std)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    looks_local = (
        name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith((".pt", ".bin", ".safetensors"))
    )
    if looks_local:
        raise RamatchError(f"no such file or folder: {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (RepositoryNotFoundError, HFValidationError):
        raise RamatchError(
            f"'{name}' is neither a local folder nor a model on the Hugging Face hub; check the spelling"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "") else ""
        raise RamatchError(
            f"'{name}' is not on this machine and the Hugging Face hub cannot be reached{offline}; "
            f"download it once with network, or give a local folder ({type(error).__name__})"
        ) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors file or of a pickle read with `weights_only=True`; nested state dicts are unwrapped."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise RamatchError(f"{path}: not a readable safetensors file ({error})") from None
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        hint = ""
        if "TorchScript" in str(error) or "torch.jit" in str(error) or "constants.pkl" in str(error):
            hint = "; it is a TorchScript archive: save its plain state dict first: torch.save(model.state_dict(), …)"
        elif "Unsupported" in str(error) or "weights_only" in str(error).lower():
            hint = "; it may hold Python objects beside tensors: save its state dict alone with torch.save"
        raise RamatchError(
            f"{path}: not a plain state dict that can be read safely{hint} ({type(error).__name__})"
        ) from None
    for key in ("state_dict", "model", "net", "module"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        found = {k: v for k, v in found.items() if isinstance(v, Tensor)} if isinstance(found, dict) else {}
    if not found:
        raise RamatchError(f"{path}: holds no tensors")
    return {name.removeprefix("module."): value for name, value in found.items()}


def _weights(folder: Path) -> dict[str, Tensor]:
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            parts = set(json.loads((folder / index).read_text())["weight_map"].values())
            return {k: v for part in sorted(parts) for k, v in read_tensors(folder / part).items()}
    names = (
        "model.safetensors",
        "open_clip_model.safetensors",
        "pytorch_model.bin",
        "open_clip_pytorch_model.bin",
    )
    for file in names:
        if (folder / file).is_file():
            return read_tensors(folder / file)
    raise RamatchError(f"{folder} has a config but no weights (looked for {', '.join(names)})")


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RamatchError(f"{path}: not readable as JSON ({error})") from None


def _folder(folder: Path, name: str) -> Backbone:
    if (folder / "open_clip_config.json").is_file():
        return _open_clip_folder(folder, name)
    if not (folder / "config.json").is_file():
        raise RamatchError(f"'{name}' has no config.json, so it is not a model folder")
    raw = read_json(folder / "config.json")
    if raw.get("format") == "ramatch-backbone":
        from .folder import load_saved_backbone

        return load_saved_backbone(folder)
    kind = raw.get("model_type", "unknown")
    readers = {"clip": _clip, "clip_vision_model": _clip, "vision-text-dual-encoder": _dual}
    if kind not in readers:
        raise RamatchError(
            f"'{name}' is a '{kind}' model; ramatch reads CLIP (any ViT), CLIP vision towers, and "
            "DINOv2 + BERT dual encoders (see `ramatch align`)"
        )
    return readers[kind](folder, name, raw)


def _act(name: str) -> str:
    if name not in ACTS:
        raise RamatchError(f"activation '{name}' is not known to ramatch (known: {', '.join(ACTS)})")
    return ACTS[name]


def _clip_tower(c: Any, **extra: Any) -> TowerConfig:
    """From a CLIPVisionConfig or CLIPTextConfig."""
    return TowerConfig(
        c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.intermediate_size, _act(c.hidden_act),
        c.layer_norm_eps, **extra,
    )  # fmt: skip


def _clip(folder: Path, name: str, raw: dict[str, Any]) -> Backbone:
    from transformers import CLIPConfig, CLIPVisionConfig

    both = raw["model_type"] == "clip"
    config: Any = CLIPConfig.from_dict(raw) if both else CLIPVisionConfig.from_dict(raw)
    vision = config.vision_config if both else config
    tensors = _weights(folder)
    text = None
    if both and "text_projection.weight" in tensors:
        c = config.text_config
        text = _clip_tower(c, vocab=c.vocab_size, context=c.max_position_embeddings, causal=True)
    tower = _clip_tower(vision, patch=vision.patch_size, image=vision.image_size, stem_norm=True)
    if "visual_projection.weight" not in tensors:
        raise RamatchError(f"'{name}' has no visual projection, so its features do not live in a joint space")
    scale = float(tensors["logit_scale"].float().exp()) if "logit_scale" in tensors else 100.0
    model = Backbone(
        tower, text, tensors["visual_projection.weight"].shape[0],
        _preprocess(folder, (vision.image_size,) * 2, CLIP_MEAN, CLIP_STD),
        Tokenizer.from_folder(folder, text.context) if text else None, logit_scale=scale, name=name,
    )  # fmt: skip
    _fill(model.vision, _names.read(_names.hf_clip_vision, _names.take(tensors, "vision_model."), name), name)
    _fill(model.visual_projection, {"weight": tensors["visual_projection.weight"]}, name)
    if model.text is not None and model.text_projection is not None:
        _fill(model.text, _names.read(_names.hf_clip_text, _names.take(tensors, "text_model."), name), name)
        _fill(model.text_projection, {"weight": tensors["text_projection.weight"]}, name)
    return model


def _fill(module: nn.Module, state: dict[str, Tensor], name: str) -> None:
    """Load tensors under our names; a missing one, one too many or a wrong shape is an error that names it."""
    own = module.state_dict()
    for key in sorted(set(own) ^ set(state)):
        raise RamatchError(f"{name}: its weights have {'no' if key in own else 'an unexpected'} '{key}'")
    for key, value in state.items():
        if value.shape != own[key].shape:
            raise RamatchError(f"{name}: '{key}' is {tuple(value.shape)}, expected {tuple(own[key].shape)}")
    module.load_state_dict(state)


def _need(tensors: Mapping[str, Tensor], key: str, name: str) -> Tensor:
    if key not in tensors:
        raise RamatchError(f"{name}: tensor '{key}' is missing, so its features do not live in a joint space")
    return tensors[key].float()


def dinov2_config(raw: dict[str, Any]) -> TowerConfig:
    """From a DINOv2 config.json (its defaults are the base size)."""
    width = raw.get("hidden_size", 768)
    return TowerConfig(
        width, raw.get("num_hidden_layers", 12), raw.get("num_attention_heads", 12), int(raw.get("mlp_ratio", 4) * width),
        _act(raw.get("hidden_act", "gelu")), raw.get("layer_norm_eps", 1e-6), layer_scale=True,
        patch=raw.get("patch_size", 14), image=raw.get("image_size", 518), patch_bias=True,
    )  # fmt: skip


def bert_config(raw: dict[str, Any]) -> TowerConfig:
    """From a BERT config.json."""
    return TowerConfig(
        raw.get("hidden_size", 768), raw.get("num_hidden_layers", 12), raw.get("num_attention_heads", 12),
        raw.get("intermediate_size", 3072), _act(raw.get("hidden_act", "gelu")), raw.get("layer_norm_eps", 1e-12),
        norm="post", vocab=raw.get("vocab_size", 30522), context=raw.get("max_position_embeddings", 512), pool="mean",
    )  # fmt: skip


def _dual(folder: Path, name: str, raw: dict[str, Any]) -> Backbone:
    ours = raw.get("ramatch")
    if ours is None:
        raise RamatchError(
            f"'{name}' pools its text with BERT's own pooler; ramatch reads mean-pooled dual encoders, as `ramatch align` "
            "writes them"
        )
    if missing := {"image_size", "logit_scale", "global_pool"} - set(ours):
        raise RamatchError(f"'{name}': the 'ramatch' section of config.json lacks {', '.join(sorted(missing))}")
    kinds = raw["vision_config"].get("model_type"), raw["text_config"].get("model_type")
    if kinds != ("dinov2", "bert"):
        raise RamatchError(f"'{name}' joins {kinds[0]} and {kinds[1]}; ramatch reads DINOv2 with BERT")
    vision, text = dinov2_config(raw["vision_config"]), bert_config(raw["text_config"])
    tensors = _weights(folder)
    # MiniLM's longest position is 512 but its sentences are short; labels never need more than 128 tokens
    model = Backbone(
        vision, text, raw["projection_dim"], _preprocess(folder, tuple(ours["image_size"]), IMAGENET_MEAN, IMAGENET_STD),
        Tokenizer.from_folder(folder, min(text.context, 128)), logit_scale=ours["logit_scale"],
        global_pool=ours["global_pool"], name=name,
    )  # fmt: skip
    assert model.text is not None
    assert model.text_projection is not None
    _fill(model.vision, _names.read(_names.dinov2, _names.take(tensors, "vision_model."), name), name)
    _fill(model.text, _names.read(_names.bert, _names.take(tensors, "text_model."), name), name)
    _fill(model.visual_projection, {"weight": _need(tensors, "visual_projection.weight", name)}, name)
    _fill(model.text_projection, {"weight": _need(tensors, "text_projection.weight", name)}, name)
    return model


def _preprocess(folder: Path, size: tuple[int, ...], mean: tuple, std: tuple) -> Preprocess:
    """Mean and standard deviation from preprocessor_config.json when it is there; the size is the tower's."""
    file = folder / "preprocessor_config.json"
    raw = read_json(file) if file.is_file() else {}
    return Preprocess((size[0], size[1]), tuple(raw.get("image_mean", mean)), tuple(raw.get("image_std", std)))


def _open_clip_folder(folder: Path, name: str) -> Backbone:
    raw = read_json(folder / "open_clip_config.json")
    cfg, pre = raw["model_cfg"], raw.get("preprocess_cfg", {})
    act = "quick_gelu" if cfg.get("quick_gelu") else "gelu"
    tokenizer = Tokenizer.from_folder(folder, cfg.get("text_cfg", {}).get("context_length", 77))
    heads = cfg["vision_cfg"].get("head_width", 64), cfg.get("text_cfg", {}).get("heads")
    return from_state_dict(
        _weights(folder), name=name, act=act, tokenizer=tokenizer, head_width=heads[0], text_heads=heads[1],
        mean=tuple(pre.get("mean", CLIP_MEAN)), std=tuple(pre.get("std", CLIP_STD)),
    )  # fmt: skip


def _state_dict_file(path: Path, act: str | None) -> Backbone:
    return from_state_dict(read_tensors(path), name=path.name, act=act)


def from_state_dict(
    tensors: dict[str, Tensor],
    *,
    name: str,
    act: str | None = None,
    tokenizer: Tokenizer | None = None,
    head_width: int | None = None,
    text_heads: int | None = None,
    mean: tuple = CLIP_MEAN,
    std: tuple = CLIP_STD,
) -> Backbone:
    """A backbone from OpenAI's names (also open_clip's ViT, with or without its `text.` prefix)."""
    if not any(k.startswith("visual.") for k in tensors):
        raise RamatchError(f"{name}: no tensor starts with 'visual.', so this is not an OpenAI or open_clip state dict")
    if act is None:  # OpenAI's archives carry these three numbers; others do not
        act = "quick_gelu" if "input_resolution" in tensors else "gelu"
        if act == "gelu":
            warnings.warn(
                f"{name} does not tell its activation; assuming GELU, as most of open_clip's models have. For weights trained by "
                "OpenAI give act='quick_gelu'",
                stacklevel=3,
            )
    seen, words = _names.take(tensors, "visual."), _names.take(tensors, "text.") or tensors
    state = _names.read(_names.openai_vision, seen, name)
    width, patch = state["patch.weight"].shape[0], state["patch.weight"].shape[-1]
    side = round((len(state["positions"]) - 1) ** 0.5) * patch
    vision = TowerConfig(
        width, _depth(state), width // (head_width or HEAD_WIDTHS.get(width, 64)), len(state["blocks.0.fc1.weight"]), act,
        patch=patch, image=side, stem_norm="stem.weight" in state,
    )  # fmt: skip
    text, text_state = None, {}
    if "token_embedding.weight" in words:
        text_state = _names.read(_names.openai_text, words, name)
        vocab, w = text_state["tokens.weight"].shape
        mlp = len(text_state["blocks.0.fc1.weight"])
        text = TowerConfig(
            w, _depth(text_state), text_heads or w // 64, mlp, act,
            vocab=vocab, context=len(text_state["positions"]), causal=True,
        )  # fmt: skip
        tokenizer = tokenizer or Tokenizer.clip(text.context)
    elif any(k.startswith("text.") for k in tensors):
        raise RamatchError(
            f"{name}: its text tower is not CLIP's own (a Hugging Face one?), which ramatch does not read here"
        )
    scale = float(tensors["logit_scale"].float().exp()) if "logit_scale" in tensors else 100.0
    model = Backbone(
        vision,
        text,
        _need(seen, "proj", name).shape[1],
        Preprocess((side, side), mean, std),
        tokenizer,
        logit_scale=scale,
        name=name,
    )
    _fill(model.vision, state, name)
    _fill(model.visual_projection, {"weight": seen["proj"].T}, name)
    if model.text is not None and model.text_projection is not None:
        _fill(model.text, text_state, name)
        _fill(model.text_projection, {"weight": _need(words, "text_projection", name).T}, name)
    return model


def _depth(state: dict[str, Tensor]) -> int:
    return sum(name.endswith(".fc1.weight") for name in state)


def read_label_features(path: str | Path) -> tuple[list[str], Tensor]:
    """Labels and features (N, D) of a safetensors file with tensor `features` and metadata `labels` (a JSON list)."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            features = file.get_tensor("features").float()
    except (SafetensorError, OSError) as error:
        raise RamatchError(f"label features {path}: {error}") from None
    try:
        labels = json.loads(metadata["labels"])
    except (KeyError, ValueError):
        raise RamatchError(f"label features {path}: its metadata has no JSON list 'labels'") from None
    if features.ndim != 2 or len(labels) != len(features):
        raise RamatchError(f"label features {path}: {len(labels)} labels for a tensor of shape {tuple(features.shape)}")
    return labels, features
