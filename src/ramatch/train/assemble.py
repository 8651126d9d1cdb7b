"""From a config to the things a run works with: the model and the data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from ..data.annotations import Annotations
from ..data.splits import find_data, hold_out, read_split
from ..errors import RamatchError
from ..modeling.backbone import Backbone
from ..modeling.checkpoints.files import read_tensors
from ..modeling.checkpoints.folder import is_model_folder, load_adapters
from ..modeling.checkpoints.loading import BUNDLED
from ..modeling.ram import RAM
from .config import DataConfig, ModelConfig


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


def build_ram(config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> RAM:
    """RAM on `device`: the frozen backbone in the run's type, what learns in float32."""
    backbone = load_frozen(config.backbone, image_size=config.image_size, label_features=config.label_features)
    fingerprint = backbone.fingerprint()
    ram = RAM(backbone, config.ram_config())
    if config.init is not None:
        file = Path(config.init).expanduser() / "ram.safetensors"
        if not file.is_file():
            raise RamatchError(f"model.init: {config.init} is not a model folder (no ram.safetensors in it)")
        load_adapters(ram, read_tensors(file), config.init)
    ram.to(device)
    ram.backbone.to(dtype)
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
        place, classes = find_data(config.validation), everything.classes
        validation = read_split(place, config.validation_split, classes=classes, images=config.images)
    elif config.validation > 0:
        held = hold_out([r.key for r in train.records], config.validation)
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
