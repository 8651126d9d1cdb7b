"""Saving and loading a trained RAM: adapters apart from the backbone they belong to.

A model folder holds config.json (settings, the backbone's name and fingerprint), ram.safetensors (the adapters, a few
MB), optionally calibration.json, and optionally the backbone itself in `backbone/` so that the folder stands alone; and
SHA256SUMS.txt, the hashes of them all.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...config import RAMConfig
from ...errors import RamatchError
from ...files import expect, expect_numbers, write_atomic, write_json
from ..backbone import Backbone, TowerConfig
from ..preprocess import Preprocess
from ..ram import RAM
from .files import read_config, read_tensors
from .hashes import LIST, check_hashes, write_hashes
from .tokenizer import Tokenizer

FORMAT = "ramatch"
VERSION = 1
WORDS = "text.tokens.weight"


def save_ram(ram: RAM, folder: str | Path, *, with_backbone: bool = False, half: bool = False) -> None:
    """Write the adapters (and the backbone, so that the folder stands alone) in safetensors."""
    folder = Path(folder)
    (folder / LIST).unlink(missing_ok=True)  # a list must not outlive its files if this is cut short
    own = ram.backbone
    config: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "backbone": {"name": own.name, "fingerprint": own.fingerprint(), "image_size": list(own.preprocess.size)},
        "ram": ram.config.to_dict(),
    }
    if ram.background:
        config["background"] = list(ram.background)
    if own.given_labels:
        config["backbone"]["given_labels"] = True
        labels = {"labels": json.dumps(list(own.given_labels), ensure_ascii=False)}
        features = {"features": torch.stack(list(own.given_labels.values())).float().cpu()}
        write_atomic(folder / "label_features.safetensors", lambda p: save_file(features, p, metadata=labels))
    if with_backbone:
        save_backbone(own, folder / "backbone", half=half)
    _save_tensors(ram.adapters(), folder / "ram.safetensors", half)
    write_json(folder / "config.json", config)
    write_hashes(folder)


def _save_tensors(tensors: dict[str, Tensor], path: Path, half: bool) -> None:
    def small(t: Tensor) -> Tensor:
        return t.to(torch.float16) if half and t.is_floating_point() and t.ndim > 1 else t

    state = {name: small(t.detach()).cpu().contiguous() for name, t in tensors.items()}
    write_atomic(path, lambda p: save_file(state, p, metadata={"format": "pt"}))


def quantise(table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a table (V, W) as int8 with one scale (V, 1) each: a word embedding keeps its meaning in 8 bits."""
    scale = table.float().abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    return (table.float() / scale).round().to(torch.int8), scale


def is_model_folder(folder: Path) -> bool:
    """Whether this is a folder that `save_ram` wrote. One with adapters but without a config that says so is an error:
    the backbone in it would answer as another model."""
    try:
        if read_config(folder / "config.json").get("format") == FORMAT:
            return True
    except RamatchError:
        if not (folder / "ram.safetensors").is_file():
            return False
        raise
    if (folder / "ram.safetensors").is_file():
        raise RamatchError(f"{folder / 'config.json'} is damaged: it is not the one that belongs to ram.safetensors")
    return False


def load_ram(
    folder: str | Path, *, backbone: Backbone | str | None = None, label_features: str | Path | None = None
) -> RAM:
    """Read what `save_ram` wrote. The backbone comes from the folder itself, from `backbone`, or by its recorded name;
    one with other weights is refused."""
    from .loading import load_backbone

    folder = Path(folder)
    check_hashes(folder)
    config = read_config(folder / "config.json")
    if config.get("format") != FORMAT:
        raise RamatchError(f"{folder} is not a ramatch model folder")
    if config.get("version", 0) > VERSION:
        raise RamatchError(f"{folder} was written by a newer ramatch (format {config['version']}); upgrade to read it")
    wanted = expect(config.get("backbone"), dict, f"{folder / 'config.json'}: 'backbone'")
    name, mark = wanted.get("name"), wanted.get("fingerprint")
    bundled = (folder / "backbone" / "config.json").is_file()
    if backbone is None and bundled:
        own = load_saved_backbone(folder / "backbone")
    elif isinstance(backbone, Backbone):
        own = backbone
    else:
        own = load_backbone(backbone or str(name))
    if (backbone is not None or not bundled) and own.fingerprint() != mark:
        raise RamatchError(
            f"the adapters in {folder} belong to backbone '{name}' with fingerprint {mark}, "
            f"but '{own.name}' has {own.fingerprint()}: its weights differ; give the right one"
        )
    size = expect_numbers(wanted.get("image_size", own.preprocess.size), f"{folder}: image_size")
    own.preprocess = dataclasses.replace(own.preprocess, size=(int(size[0]), int(size[-1])))
    given = label_features or (folder / "label_features.safetensors" if wanted.get("given_labels") else None)
    if given is not None:
        own.set_label_features(given)
    ram = RAM(own, RAMConfig.from_dict(config.get("ram")))
    load_adapters(ram, read_tensors(folder / "ram.safetensors"), str(folder))
    ram.background = tuple(map(str, expect(config.get("background", []), list, f"{folder}: 'background'")))
    return ram.eval()


def load_adapters(ram: RAM, tensors: dict[str, Tensor], where: str) -> None:
    """Copy adapter tensors into a RAM; any difference in names or shapes is an error that names it."""
    own = ram.adapters()
    for name in sorted(set(own) ^ set(tensors)):
        raise RamatchError(f"{where}: tensor '{name}' is {'missing' if name in own else 'unexpected'}")
    for name, value in tensors.items():
        if own[name].shape != value.shape:
            raise RamatchError(f"{where}: tensor '{name}' is {tuple(value.shape)}, expected {tuple(own[name].shape)}")
    ram.load_state_dict(tensors, strict=False)


def save_backbone(backbone: Backbone, folder: str | Path, *, half: bool = False) -> None:
    """Any backbone in our own form: config.json (shapes), model-vision and model-text.safetensors (our
    names), tokenizer.json. `half`: fp16, word embeddings in int8."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if backbone.tokenizer is not None:
        backbone.tokenizer.save(folder)
    state = dict(backbone.state_dict())
    if half and WORDS in state:
        state[f"{WORDS}.int8"], state[f"{WORDS}.scale"] = quantise(state.pop(WORDS))
    for tower in ("vis", "text"):  # one file per tower: hosts and mirrors dislike large files
        part = {name: t for name, t in state.items() if name.startswith(tower)}
        if part:
            _save_tensors(part, folder / f"model-{'vision' if tower == 'vis' else tower}.safetensors", half)
    config = {
        "format": "ramatch-backbone",
        "version": VERSION,
        "name": backbone.name,
        "vision": dataclasses.asdict(backbone.vision.config),
        "text": dataclasses.asdict(backbone.text.config) if backbone.text is not None else None,
        "dim": backbone.dim,
        "logit_scale": backbone.logit_scale,
        "global_pool": backbone.global_pool,
        "context": backbone.tokenizer.context if backbone.tokenizer else None,
        "preprocess": backbone.preprocess.to_dict(),
    }
    write_json(folder / "config.json", config)


def load_saved_backbone(folder: str | Path) -> Backbone:
    """Read what `save_backbone` wrote."""
    folder = Path(folder)
    c = read_config(folder / "config.json")
    tokenizer = Tokenizer.from_folder(folder, c["context"]) if c.get("context") else None
    try:
        vision, text = TowerConfig(**c["vision"]), TowerConfig(**c["text"]) if c["text"] else None
        stored = sum(part.stat().st_size for part in folder.glob("model*.safetensors"))
        for t in (vision, text) if text else (vision,):  # a damaged size must not ask for all memory
            if t.layers * t.width * (4 * t.width + 2 * t.mlp) + (t.vocab + c["dim"]) * t.width > 2 * stored:
                raise ValueError("sizes for which its weights are too small")
        options = {key: c[key] for key in ("logit_scale", "global_pool", "name")}
        model = Backbone(vision, text, c["dim"], Preprocess(**c["preprocess"]), tokenizer, **options)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # before weights are touched
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RamatchError(f"{folder / 'config.json'} is damaged or of another version ({reason})") from None
    tensors: dict[str, Tensor] = {}
    for part in sorted(folder.glob("model*.safetensors")):
        tensors |= read_tensors(part)
    if f"{WORDS}.int8" in tensors:
        tensors[WORDS] = tensors.pop(f"{WORDS}.int8").float() * tensors.pop(f"{WORDS}.scale")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise RamatchError(
            f"{folder}: its weights do not fit its config ({str(error).splitlines()[-1].strip()})"
        ) from None
    return model.eval()
