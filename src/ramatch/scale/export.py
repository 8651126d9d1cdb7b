"""A model as ONNX: what a program without torch needs to run it.

The folder that `export_onnx` writes:

    image.onnx      pixels uint8 (B, 3, H, W), resized but not normalized → tensors of the trunk
    text.onnx       ids, mask (S, T) → unit features (S, D) of sentences
    match.onnx      those of a trunk, unit features of labels → s_R, s_G and each label's best cosine, (B, N) each
    tokenizer.json  as the `tokenizers` library reads it
    export.json     sizes, templates, background, and how scores are made of these
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import RamatchError
from ..files import whole_folder, write_json
from ..modeling.checkpoints.folder import load_ram, model_folder
from ..modeling.exported import (
    ImagePart,
    MatchPart,
    TextPart,
    trunk_names,
    trunk_of,
    write_image_part,
    write_match_part,
    write_text_part,
)
from ..modeling.ram import RAM

CALIBRATION = "calibration.json"


@torch.no_grad()
def export_onnx(model: str | Path, out: str | Path) -> Path:
    """Write a trained model's parts as ONNX into a new folder. All are exact in float32; what reads them may round."""
    source = model_folder(model)
    if source is None:
        raise RamatchError(f"{model} is not a model that ramatch wrote; give a bundled model, a model or run folder")
    ram = load_ram(source)
    with whole_folder(out) as folder:
        image = ImagePart(ram)
        write_image_part(image, folder / "image.onnx")
        example = torch.zeros(2, 3, *ram.preprocess.size, dtype=torch.uint8)
        write_match_part(MatchPart(ram), trunk_of(image(example), image.grid), folder / "match.onnx")
        if ram.backbone.text is not None:
            write_text_part(TextPart(ram), folder / "text.onnx")
        if ram.backbone.tokenizer is not None:
            ram.backbone.tokenizer.save(folder)
        if (source / CALIBRATION).is_file():
            shutil.copyfile(source / CALIBRATION, folder / CALIBRATION)
        write_json(folder / "export.json", _about(ram))
    return Path(out)


def _about(ram: RAM) -> dict[str, Any]:
    config, backbone = ram.config, ram.backbone
    return {
        "ramatch": __version__,
        "model": backbone.name,
        "pixels": {"size": list(ram.preprocess.size), "resize": ram.preprocess.interpolation, "color": "RGB"},
        "trunk": trunk_names(ram),
        "templates": list(config.templates),
        "background": list(ram.background),
        "tokens": None if backbone.tokenizer is None else backbone.tokenizer.context,
        "score": {
            "rule": config.score,
            "region_share": config.region_share,
            "best_share": config.best_share,
            "tau_global": float(ram.tau_global),
            "tau_region": float(ram.tau_region),
        },
    }
