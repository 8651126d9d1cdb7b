"""Alignment from files: what `ramatch align` does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data import read_captions
from ..errors import RamatchError
from ..files import write_json, write_text
from ..model.io import save_backbone
from .config import AlignConfig
from .loop import Log, align
from .retrieval import retrieval, stable_order


class _Pixels(Dataset):
    """Decoded and resized images of caption records, uint8 (3, size, size)."""

    def __init__(self, records: Sequence[Any], size: int) -> None:
        self.records, self.size = records, size

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> Tensor:
        image = self.records[i].load().resize((self.size, self.size), resample=3)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def load_pixels(records: Sequence[Any], size: int) -> Tensor:
    """All images in memory: uint8 (n, 3, size, size)."""
    workers = min(16, os.cpu_count() or 1)
    return torch.cat(list(DataLoader(_Pixels(records, size), batch_size=128, num_workers=workers)))


def settings_from(overrides: Sequence[str]) -> AlignConfig:
    """`AlignConfig` with `name=value` changes."""
    known = {f.name: f.type for f in dataclasses.fields(AlignConfig)}
    changes: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or name not in known:
            raise RamatchError(f"'{override}': expected name=value with a name of {', '.join(known)}")
        default = getattr(AlignConfig(), name)
        try:
            changes[name] = type(default)(text)
        except ValueError:
            raise RamatchError(f"'{override}': {name} is a {type(default).__name__}") from None
    return AlignConfig(**changes)


def align_folder(
    vision: str | Path,
    text: str | Path,
    captions: str | Path,
    out: str | Path,
    *,
    images_roots: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    config: AlignConfig | None = None,
    test: int = 0,
    device: str | None = None,
    on_log: Log | None = None,
) -> dict[str, Any]:
    """Align two towers on a caption data set and write the backbone to `out`, with what was measured beside it.

    `test` images (chosen by their names alone, so that every run holds out the same) are kept from training and used
    for retrieval.
    """
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise RamatchError(f"{out} exists and is not empty; choose a new folder")
    config = config or settings_from(overrides)
    data = read_captions(captions, images_roots)
    records = [r for r in data.records if r.image is not None]
    order = stable_order([r.key for r in records], "test")
    held, train = [records[i] for i in order[:test]], [records[i] for i in sorted(order[test:])]
    pixels = load_pixels(train, config.image_size)
    result = align(vision, text, pixels, [r.captions for r in train], config, device=device, on_log=on_log)
    report: dict[str, Any] = {
        "images": len(train),
        "tags": len(result.tags),
        "seconds": round(result.seconds, 1),
        "settings": dataclasses.asdict(config),
    }
    if held:
        report["retrieval"] = retrieval(
            result.backbone, load_pixels(held, config.image_size), [r.captions for r in held]
        )
    save_backbone(result.backbone, out)
    write_text(out / "tags.txt", "\n".join(result.tags) + "\n")
    write_json(out / "alignment.json", report | {"log": result.log})
    return report
