"""From a config to the things a run works with: the model and the data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..data.annotations import Annotations
from ..data.records import Paths, list_splits, read_annotations
from ..errors import RamatchError
from ..modeling.backbone import Backbone
from ..modeling.checkpoints.folder import is_model_folder, load_adapters
from ..modeling.checkpoints.loading import BUNDLED
from ..modeling.ram import RAM
from .config import DataConfig, ModelConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def find_data(path: str | os.PathLike) -> Path:
    """The path itself; or, for a relative one, that name in $RAMATCH_DATA."""
    given = Path(path).expanduser()
    if not str(path):
        raise RamatchError("no data given: set data.path to an annotation file or a folder")
    if given.exists() or given.is_absolute() or any(c in str(given) for c in "*?["):
        return given
    looked = str(given)
    if folder := os.environ.get("RAMATCH_DATA"):
        place = Path(folder) / given.name
        if place.exists():
            return place
        looked += f", {place}"
    raise RamatchError(f"no such data: {given} (looked at {looked}); set data.path, or RAMATCH_DATA to its folder")


def load_frozen(name: str, **options: object) -> Backbone:
    """A backbone by name: also that of a bundled model or of a model folder that carries its own."""
    folder = Path(name).expanduser()
    if name in BUNDLED or not folder.exists():
        return Backbone.from_pretrained(name, **options)
    if is_model_folder(folder) and not (folder / "backbone" / "config.json").is_file():
        raise RamatchError(f"{folder} holds adapters without a backbone; name the backbone itself, and use model.init")
    backbone = Backbone.from_pretrained(str(folder), **options)
    backbone.name = str(folder.resolve())  # adapters record where theirs is: it must be found from another folder too
    return backbone


def build_ram(config: ModelConfig, device: torch.device, precision: str = "fp32") -> RAM:
    """RAM on `device`: the frozen backbone in the run's precision, what learns in fp32."""
    backbone = load_frozen(config.backbone, image_size=config.image_size, label_features=config.label_features)
    fingerprint = backbone.fingerprint()
    ram = RAM(backbone, config.ram_config())
    if config.init is not None:
        file = Path(config.init).expanduser() / "ram.safetensors"
        if not file.is_file():
            raise RamatchError(f"model.init: {config.init} is not a model folder (no ram.safetensors in it)")
        load_adapters(ram, load_file(file), config.init)
    ram.to(device)
    ram.backbone.to(DTYPES[precision])
    # rounding the frozen weights for speed does not make them another model: keep the name they were loaded under
    ram.backbone.fingerprint = lambda: fingerprint  # type: ignore[method-assign]
    return ram


@dataclass(frozen=True)
class TrainData:
    """Training images with the labels to learn; validation images, if any, with those and any held-out labels."""

    train: Annotations
    validation: Annotations | None
    unseen: tuple[str, ...] = ()

    @property
    def seen(self) -> tuple[str, ...]:
        return self.train.classes

    def digest(self) -> str:
        """Changes when the training images, their labels or the vocabulary change."""
        h = hashlib.blake2b("\n".join(self.train.classes).encode(), digest_size=12)
        for record in self.train.records:
            h.update(f"\n{record.key}\t{','.join(record.labels)}".encode())
        return h.hexdigest()


def read_split(path: Path, split: str | None, *, classes: object = None, images: Paths | None = None) -> Annotations:
    """Annotations of a path; the split only where the path has several."""
    use = split if split is not None and path.exists() and _has_split(path, split) else None
    return read_annotations(path, split=use, classes=classes, images_root=images)  # type: ignore[arg-type]


def _has_split(path: Path, split: str) -> bool:
    known = list_splits(path)
    if path.is_dir():  # among several files the reader knows which one is meant, or says what there is
        return bool(known) or (path / split).is_dir() or any(path.glob(f"{split}*.tar"))
    return split in known


def read_data(config: DataConfig, seed: int = 0) -> TrainData:
    """Read and split. Held-out images are chosen by a hash of their names, so they are the same whatever the seed."""
    everything = read_split(find_data(config.path), config.split, classes=config.classes, images=config.images)
    unknown = [c for c in config.holdout_classes if c not in everything.classes]
    if unknown:
        raise RamatchError(f"data.holdout_classes: the data has no label '{unknown[0]}'")
    hidden = set(config.holdout_classes)
    seen = tuple(c for c in everything.classes if c not in hidden)
    showing = [i for i, r in enumerate(everything.records) if hidden & set(r.labels)]
    rest = sorted(set(range(len(everything))) - set(showing))
    train, validation = everything.subset(rest), None
    if isinstance(config.validation, str):
        validation = read_split(find_data(config.validation), config.validation_split, classes=everything.classes,
                                images=config.images)  # fmt: skip
    elif config.validation > 0:
        held = held_out([r.key for r in train.records], config.validation)
        kept = sorted(set(range(len(train))) - set(held))
        validation = everything.subset(sorted([rest[i] for i in held] + showing))
        train = train.subset(kept)
    if config.limit is not None and config.limit < len(train):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        train = train.subset(sorted(order[: config.limit].tolist()))
        if validation is not None and not isinstance(config.validation, str):
            validation = validation.subset(range(min(len(validation), config.limit)))
    if len(train) == 0:
        raise RamatchError(f"{config.path}: no training image is left after holding some out")
    classes = seen + tuple(config.holdout_classes)
    return TrainData(
        train.restrict(seen), None if validation is None else validation.restrict(classes), config.holdout_classes
    )


def held_out(keys: Sequence[str], share: float) -> list[int]:
    """Positions of about `share` of the keys (at least one), chosen by hash: stable under reordering and across runs."""
    ranks = [hashlib.blake2b(key.encode(), digest_size=8).digest() for key in keys]
    order = sorted(range(len(keys)), key=lambda i: ranks[i])
    return sorted(order[: max(1, round(share * len(keys)))])
