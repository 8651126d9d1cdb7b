"""Saving and loading a trained RAM: adapters apart from the backbone they belong to.

A model folder holds config.json (settings, the backbone's name and fingerprint), ram.safetensors (the adapters, a few
MB), optionally calibration.json, known.safetensors (the words it learned with) and learned.safetensors (labels that its
user taught it), and optionally the backbone itself in `backbone/` so that the folder stands alone; and SHA256SUMS.txt,
the hashes of them all.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...config import RAMConfig
from ...errors import RamatchError
from ...files import expect, expect_numbers, new_folder, write_atomic, write_json
from ..backbone import Backbone
from ..known import Known
from ..learned import Learned
from ..preprocess import Preprocess
from ..ram import RAM
from ..towers import TowerConfig
from .files import fill, read_config, read_tensors
from .hashes import LIST, check_hashes, write_hashes
from .packing import quantize, write_tensors
from .tokenizer import Tokenizer

FORMAT, BACKBONE_FORMAT = "ramatch", "ramatch-backbone"
LABEL_FEATURES, KNOWN, LEARNED = "label_features.safetensors", "known.safetensors", "learned.safetensors"
VERSION = 1


def save_ram(ram: RAM, folder: str | Path, *, with_backbone: bool = False, weights: str = "fp32") -> None:
    """Write the adapters (and the backbone, so that the folder stands alone) in safetensors; `weights`: see `pack`."""
    folder = Path(folder)
    (folder / LIST).unlink(missing_ok=True)  # a list must not outlive its files if this is cut short
    own = ram.backbone
    config: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "backbone": {"name": own.name, "fingerprint": own.fingerprint(), "image_size": list(own.preprocess.size)},
        "ram": ram.config.to_dict(),
    }
    if ram.method is not None:
        config["method"] = ram.method
    if ram.background:
        config["background"] = list(ram.background)
    if own.given_labels:
        config["backbone"]["given_labels"] = True
        labels = {"labels": json.dumps(list(own.given_labels), ensure_ascii=False)}
        features = {"features": torch.stack(list(own.given_labels.values())).float().cpu()}
        write_atomic(folder / LABEL_FEATURES, lambda p: save_file(features, p, metadata=labels))
    if with_backbone:
        save_backbone(own, folder / "backbone", weights=weights)
    write_tensors(ram.adapters(), folder / "ram.safetensors", weights)
    if ram.known is not None:
        save_known(ram.known, folder)
    if ram.learned is not None:
        ram.learned.save(folder / LEARNED)
    write_json(folder / "config.json", config)
    write_hashes(folder)


def save_known(known: Known, folder: Path) -> None:
    """Features always in int8: how familiar a label is changes by less than 0.01."""
    rows, scale = quantize(known.unit.float().cpu(), "rows")
    tensors = {"rows": rows, "scale": scale, "weights": known.weights}
    write_atomic(folder / KNOWN, lambda p: save_file(tensors, p))


def load_known(folder: Path, dim: int) -> Known | None:
    """What `save_known` wrote, if it did, for a text space of `dim` numbers."""
    if not (folder / KNOWN).is_file():
        return None
    tensors = read_tensors(folder / KNOWN)
    if missing := {"rows", "scale", "weights"} - set(tensors):
        raise RamatchError(f"{folder / KNOWN}: {', '.join(sorted(missing))} missing; calibrate again")
    rows, scale, weights = (tensors[name].float() for name in ("rows", "scale", "weights"))
    if (rows.shape, scale.shape, weights.shape) != ((len(scale), dim), (len(scale), 1), (4,)):
        raise RamatchError(f"{folder / KNOWN}: sizes that do not fit each other or the model; calibrate again")
    return Known(rows * scale, weights)


def is_model_folder(folder: Path, kind: str = FORMAT) -> bool:
    """Whether this is a folder that `save_ram` wrote (or another kind of ours). One with adapters but without a config
    that says so is an error: the backbone in it would answer as another model."""
    adapters = (folder / "ram.safetensors").is_file()
    try:
        found = read_config(folder / "config.json").get("format")
    except RamatchError:
        if not adapters:
            return False
        raise
    if adapters and found != FORMAT:
        raise RamatchError(f"{folder / 'config.json'} is damaged: it is not the one that belongs to ram.safetensors")
    return found == kind


def load_ram(
    folder: str | Path,
    *,
    backbone: Backbone | str | None = None,
    label_features: str | Path | None = None,
    build: Callable[..., RAM] = RAM,
    dtype: torch.dtype = torch.float32,
) -> RAM:
    """Read what `save_ram` wrote. The backbone comes from the folder itself (in `dtype`), from `backbone`, or by its
    recorded name; one with other weights is refused. `build` makes a model of a backbone, settings and, where the
    folder names another system than RAM, that `method`."""
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
        own = load_saved_backbone(folder / "backbone", dtype)
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
    given = label_features or (folder / LABEL_FEATURES if wanted.get("given_labels") else None)
    if given is not None:
        own.set_label_features(given)
    other = {"method": config["method"]} if config.get("method") else {}
    ram = build(own, RAMConfig.from_dict(config.get("ram")), **other)
    load_adapters(ram, read_tensors(folder / "ram.safetensors"), str(folder))
    ram.background = tuple(map(str, expect(config.get("background", []), list, f"{folder}: 'background'")))
    ram.known = load_known(folder, own.dim)
    ram.learned = Learned.load(folder / LEARNED, own.dim)
    return ram.eval()


def load_adapters(ram: RAM, tensors: dict[str, Tensor], where: str) -> None:
    """Copy adapter tensors into a RAM; any difference in names or shapes is an error that names it."""
    fill(ram, tensors, where, ram.adapters())


def save_backbone(backbone: Backbone, folder: str | Path, *, weights: str = "fp32") -> None:
    """Any backbone in our own form: config.json (shapes), model-vision and model-text.safetensors (our
    names), tokenizer.json. `weights`: see `pack`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if backbone.tokenizer is not None:
        backbone.tokenizer.save(folder)
    for tower in ("vision", "text"):  # one file per tower: hosts and mirrors dislike large files
        part = {name: t for name, t in backbone.state_dict().items() if name.startswith(tower[:3])}  # also visual_…
        if part:
            write_tensors(part, folder / f"model-{tower}.safetensors", weights)
    config = {
        "format": BACKBONE_FORMAT,
        "version": VERSION,
        "name": backbone.name,
        "vision": dataclasses.asdict(backbone.vision.config),
        "text": dataclasses.asdict(backbone.text.config) if backbone.text is not None else None,
        "dim": backbone.dim,
        "logit_scale": backbone.logit_scale,
        "logit_bias": backbone.logit_bias,
        "global_pool": backbone.global_pool,
        "context": backbone.tokenizer.context if backbone.tokenizer else None,
        "preprocess": backbone.preprocess.to_dict(),
    }
    write_json(folder / "config.json", config)


def load_saved_backbone(folder: str | Path, dtype: torch.dtype = torch.float32) -> Backbone:
    """Read what `save_backbone` wrote."""
    folder = Path(folder)
    c = read_config(folder / "config.json")
    try:
        vision, text = TowerConfig(**c["vision"]), TowerConfig(**c["text"]) if c["text"] else None
        stored = sum(part.stat().st_size for part in folder.glob("model*.safetensors"))
        for t in (vision, text) if text else (vision,):  # a damaged size must not ask for all memory
            if t.layers * t.width * (4 * t.width + 2 * t.mlp) + (t.vocab + c["dim"]) * t.width > 2 * stored:
                raise ValueError("sizes for which its weights are too small")
        options = {key: c[key] for key in ("logit_scale", "global_pool", "name")}
        with torch.device("meta"):  # no weights yet
            model = Backbone(vision, text, c["dim"], Preprocess(**c["preprocess"]), **options)
        model.logit_bias = None if c.get("logit_bias") is None else float(c["logit_bias"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # before weights are touched
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise RamatchError(f"{folder / 'config.json'} is damaged or of another version ({reason})") from None
    if text is not None and c.get("context"):
        model.tokenizer = Tokenizer.from_folder(folder, c["context"], text.pad)
    tensors: dict[str, Tensor] = {}
    for part in sorted(folder.glob("model*.safetensors")):
        tensors |= read_tensors(part, dtype)
    fill(model, tensors, str(folder), dtype=dtype)
    return model.eval()


def model_folder(name: str | Path) -> Path | None:
    """The folder of a trained model: a bundled one, one that `save_ram` wrote, or that in a run's folder. None for
    whatever else has this name (a plain CLIP)."""
    from .loading import bundled_model

    folder = bundled_model(str(name)) or Path(name).expanduser()
    folder = folder / "model" if is_model_folder(folder / "model") else folder
    return folder if is_model_folder(folder) else None


def copy_model(folder: Path, out: Path) -> None:
    """What makes a model, without its card and reports."""
    check_hashes(folder)
    for file in folder.rglob("*"):
        if file.suffix in (".json", ".safetensors") and not file.name.endswith("_report.json"):
            write_atomic(out / file.relative_to(folder), partial(shutil.copyfile, file))
    write_hashes(out)


def convert(model: str | Path, out: str | Path, weights: str) -> Path:
    """A copy of a model folder (or of a backbone in our own form) with its weights stored in another way (see `pack`);
    settings, calibration and whatever else lies there are copied as they are."""
    folder, out = model_folder(model) or Path(model).expanduser(), new_folder(out)
    if not (is_model_folder(folder) or is_model_folder(folder, BACKBONE_FORMAT)):
        raise RamatchError(f"{model} is not a folder that ramatch wrote; give a model folder or a run folder")
    check_hashes(folder)
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LIST):
        target = out / file.relative_to(folder)
        if file.suffix == ".safetensors" and file.name not in (LABEL_FEATURES, KNOWN, LEARNED):
            write_tensors(read_tensors(file), target, weights)
        else:
            write_atomic(target, partial(shutil.copyfile, file))
    write_hashes(out)
    return out
