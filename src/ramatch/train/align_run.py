"""Alignment from files: what `ramatch align` does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data import read_captions
from ..errors import RamatchError
from ..evaluation.retrieval import retrieval, stable_order
from ..files import new_folder, write_json, write_text
from ..modeling.checkpoints.folder import save_backbone
from .align import Log, align
from .align_config import AlignConfig


class _Pixels(Dataset):
    """Decoded and resized images of records, uint8 (3, H, W); of an unreadable one the reason."""

    def __init__(self, records: Sequence[Any], size: tuple[int, int]) -> None:
        self.records, self.size = records, size

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> Tensor | str:
        try:
            picture = self.records[i].load()
        except RamatchError as error:
            return str(error)  # as a value: a worker's exception would bring its whole traceback
        image = picture.resize(self.size[::-1], Image.Resampling.BICUBIC)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _collate(items: list[Tensor | str]) -> Tensor | str:
    wrong = next((item for item in items if isinstance(item, str)), None)
    return torch.stack(items) if wrong is None else wrong  # type: ignore[arg-type]


def load_pixels(records: Sequence[Any], size: int | tuple[int, int]) -> Tensor:
    """All images of caption or label records in memory: uint8 (n, 3, H, W), size = (height, width) or one side."""
    height, width = (size, size) if isinstance(size, int) else size
    # a few images are decoded sooner than worker processes start
    workers = min(16, os.cpu_count() or 1) if len(records) > 256 else 0
    data = _Pixels(records, (height, width))
    out = torch.empty(len(records), 3, height, width, dtype=torch.uint8)
    start = 0
    for batch in DataLoader(data, batch_size=128, num_workers=workers, collate_fn=_collate):
        if isinstance(batch, str):
            raise RamatchError(f"{batch}; take it out of the data and run again")
        out[start : start + len(batch)] = batch
        start += len(batch)
    return out


def settings_from(overrides: Sequence[str]) -> AlignConfig:
    """`AlignConfig` with `name=value` changes."""
    return AlignConfig().with_overrides(overrides)


def align_folder(
    vision: str | Path,
    text: str | Path,
    captions: str | Path,
    out: str | Path,
    *,
    images_roots: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    config: AlignConfig | None = None,
    test: int | Iterable[str] = 0,
    exclude: Iterable[str] = (),
    device: str | None = None,
    on_log: Log | None = None,
) -> dict[str, Any]:
    """Align two towers on a caption data set and write the backbone to `out`, with what was measured beside it.

    `test`: keys of images that are kept from training and used for retrieval, or how many (chosen by their names alone, so
    that every run holds out the same). `exclude`: keys of images to leave out altogether.
    """
    out = new_folder(out)
    config = config or settings_from(overrides)
    data = read_captions(captions, images_roots)
    gone, keys = set(exclude), [r.key for r in data]
    if isinstance(test, int):
        test = [keys[i] for i in stable_order(keys, "test")[:test]] if test > 0 else []
    asked = set(test)
    if unknown := sorted((asked | gone) - set(keys)):
        raise RamatchError(
            f"{len(unknown)} image(s) to hold out or leave out are not in the captions, such as '{unknown[0]}'"
        )
    held = [r for r in data.records if r.key in asked - gone]
    train = [r for r in data.records if r.key not in asked | gone]
    if len(train) < 2:
        raise RamatchError(f"{len(train)} of {len(data)} images are left: at least 2 must be left to train on")
    pixels = load_pixels(train, config.image_size)
    result = align(vision, text, pixels, [r.captions for r in train], config, device=device, on_log=on_log)
    report: dict[str, Any] = {
        "data": data.summary.to_dict() | {"path": Path(data.summary.path).name},  # models travel, folders do not
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
