"""Reading checkpoints: from disk or the hub, tensors safely, names on disk → names in our towers.

Each family (one file beside this one) says what its tensors are called; shapes that the config does not tell are read
off the tensors. Names on disk are stable where the libraries' in-memory names are not.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import RamatchError
from ...files import expect, read_json, shown
from ..backbone import Backbone
from ..preprocess import Preprocess
from ..towers import TowerConfig
from .packing import unpack
from .tokenizer import Tokenizer

Tensors = Mapping[str, Tensor]
Reader = Callable[[Tensors], dict[str, Tensor]]
PARTS = ("ln1", "ln2", "out", "fc1", "fc2")  # of a layer, beside qkv
# of heads, which names on disk do not tell: SigLIP's So400m and giant-opt, PE's G; open_clip's ViT-H, g, bigG and e
HEAD_WIDTHS = {1152: 72, 1280: 80, 1408: 88, 1536: 96, 1664: 104, 1792: 112}  # all others are 64 wide
HUB_FILES = ["*.json", "*.txt", "*.safetensors", "pytorch_model*.bin", "open_clip_pytorch_model.bin"]
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHTS = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")

# ---------------------------------------------------------------------------------------------------------------- disk


def download(name: str) -> Path:
    """A hub id's files on this machine, fetched if need be."""
    from huggingface_hub import errors, snapshot_download

    a_file = name.endswith((".pt", ".bin", ".safetensors"))
    nearby = "/" in name and Path(name).parent.exists()  # a folder of that name is here: this is a path, mistyped
    if a_file or nearby or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise RamatchError(f"no such file or folder: {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise RamatchError(
            f"'{name}' is neither a local folder nor a model on the Hugging Face hub; check the spelling"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError):
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "") else ""
        raise RamatchError(
            f"'{name}' is neither a file or folder here nor a model of the Hugging Face hub that is on this machine, "
            f"and the hub cannot be reached{offline}; check the spelling, or download it once with network"
        ) from None


def read_tensors(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors of a .safetensors file (those in int8 as `dtype`) or of a pickle read with `weights_only=True`; nested
    state dicts are unwrapped."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return unpack(load_file(path), path, dtype)
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
    named = found.items() if isinstance(found, dict) else ()
    tensors = {name.removeprefix("module."): value for name, value in named if isinstance(value, Tensor)}
    if not tensors:
        raise RamatchError(f"{path}: holds no tensors")
    return tensors


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder, in one file or several."""
    for index in INDEXES:
        if (folder / index).is_file():
            found = expect(read_config(folder / index).get("weight_map"), dict, f"{folder / index}: 'weight_map'")
            parts = set(map(str, found.values()))
            if outside := [part for part in parts if Path(part).name != part]:
                raise RamatchError(f"{folder / index}: names weights outside its folder ({shown(min(outside))})")
            return {k: v for part in sorted(parts) for k, v in read_tensors(folder / part).items()}
    for file in WEIGHTS:
        if (folder / file).is_file():
            return read_tensors(folder / file)
    raise RamatchError(f"{folder} has a config but no weights (looked for {', '.join(WEIGHTS)})")


def read_config(path: Path) -> dict[str, Any]:
    """The object in a config file."""
    return expect(read_json(path), dict, f"{path}: the content")


def read_preprocess(folder: Path, size: tuple[int, ...], own: tuple[tuple, tuple]) -> Preprocess:
    """Mean and deviation from preprocessor_config.json where it is there, else `own`; the size is the tower's."""
    file = folder / "preprocessor_config.json"
    raw = read_config(file) if file.is_file() else {}
    return Preprocess((size[0], size[1]), tuple(raw.get("image_mean", own[0])), tuple(raw.get("image_std", own[1])))


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


# --------------------------------------------------------------------------------------------------------------- names


def take(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The tensors below `prefix`, without it."""
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Names:
    """What a family calls the tensors of one tower: our name → theirs."""

    layers: str  # prefix of a layer, with {} for its number
    parts: tuple[str, str, str, str, str]  # of a layer: those of PARTS, each with weight and bias
    qkv: tuple[str, ...]  # query, key and value of a layer, to be joined; none: the family joins its own
    modules: dict[str, str] = field(default_factory=dict)  # with weight and bias
    tensors: dict[str, str] = field(default_factory=dict)

    def count(self, tensors: Tensors) -> int:
        """Number of layers: one more than the highest index."""
        pattern = re.escape(self.layers).replace(r"\{\}", r"(\d+)")
        return max((int(m.group(1)) for name in tensors if (m := re.match(pattern, name))), default=-1) + 1

    def __call__(self, t: Tensors) -> dict[str, Tensor]:
        """Tensors of a file (already without the tower's prefix) under our names."""
        out = {ours: t[theirs] for ours, theirs in self.tensors.items()}
        for part in ("weight", "bias"):
            out |= {f"{ours}.{part}": t[f"{theirs}.{part}"] for ours, theirs in self.modules.items()}
            for i in range(self.count(t)):
                here, there = f"blocks.{i}", self.layers.format(i)
                pairs = zip(PARTS, self.parts, strict=True)
                out |= {f"{here}.{ours}.{part}": t[f"{there}{theirs}.{part}"] for ours, theirs in pairs}
                if self.qkv:
                    out[f"{here}.qkv.{part}"] = torch.cat([t[f"{there}{p}.{part}"] for p in self.qkv])
        return out


def translate(reader: Reader, tensors: Tensors, what: str) -> dict[str, Tensor]:
    """Run a reader; a missing name becomes an error that says which file part is not what it claims to be."""
    try:
        return {name: value.float() for name, value in reader(tensors).items()}
    except KeyError as error:
        raise RamatchError(
            f"{what}: tensor {error} is missing, so this is not the architecture its config says"
        ) from None
    except RamatchError as error:
        raise RamatchError(f"{what}: {error}") from None


def fill(
    module: nn.Module,
    state: dict[str, Tensor],
    where: str,
    own: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Load tensors under our names, all of a module or those that `own` has; a missing one, one too many or a wrong
    shape is an error that names it. A module on the meta device takes the tensors themselves, in `dtype`."""
    own = module.state_dict() if own is None else own
    for key in sorted(set(own) ^ set(state)):
        raise RamatchError(f"{where}: tensor '{key}' is {'missing' if key in own else 'unexpected'}")
    for key, value in state.items():
        if value.shape != own[key].shape:
            raise RamatchError(f"{where}: tensor '{key}' is {tuple(value.shape)}, expected {tuple(own[key].shape)}")
    if new := all(tensor.is_meta for tensor in own.values()):
        state = {key: value.to(dtype).contiguous() for key, value in state.items()}
    module.load_state_dict(state, strict=False, assign=new)


class Part(NamedTuple):
    """A tower: its shape, its tensors under our names, those of its projection: `weight` (D, W) and maybe `bias`."""

    config: TowerConfig
    state: dict[str, Tensor]
    projection: dict[str, Tensor]


def assemble(
    vision: Part,
    text: Part | None,
    preprocess: Preprocess,
    tokenizer: Tokenizer | None,
    *,
    name: str,
    logit_bias: float | None = None,
    **options: Any,
) -> Backbone:
    """A backbone of its parts. `options`: those of `Backbone`."""
    shapes = vision.config, None if text is None else text.config, len(vision.projection["weight"])
    with torch.device("meta"):  # no weights yet: drawing random ones takes most of the time of loading
        model = Backbone(*shapes, preprocess, tokenizer, name=name, **options)
    model.logit_bias = logit_bias
    fill(model.vision, vision.state, name)
    fill(model.visual_projection, vision.projection, name)
    if text is not None and model.text is not None and model.text_projection is not None:
        fill(model.text, text.state, name)
        fill(model.text_projection, text.projection, name)
    return model


def join_query(state: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """A tower's tensors with the learned query (W,) of its attention pooling, the same for every image, multiplied into
    the keys' weights (W, W). The keys' bias adds the same to every token, which softmax takes off again."""
    query, key = state.pop("pool.query", None), state.pop("pool.key.weight", None)
    if query is None or key is None:
        return state
    ask = torch.einsum("hd,hdw->hw", query.double().view(heads, -1), key.double().unflatten(0, (heads, -1)))
    return state | {"pool.ask.weight": (ask * (len(query) / heads) ** -0.5).float()}


def need(tensors: Mapping[str, Tensor], key: str, name: str) -> Tensor:
    """A projection into the joint space, without which a checkpoint is of no use."""
    if key not in tensors:
        raise RamatchError(f"{name}: tensor '{key}' is missing, so its features do not live in a joint space")
    return tensors[key].float()


def logits(tensors: Tensors) -> dict[str, Any]:
    """The checkpoint's own inverse temperature, and SigLIP's bias beside it, where it has them."""
    scale = float(tensors["logit_scale"].float().exp()) if "logit_scale" in tensors else 100.0
    return {"logit_scale": scale, "logit_bias": float(tensors["logit_bias"]) if "logit_bias" in tensors else None}
