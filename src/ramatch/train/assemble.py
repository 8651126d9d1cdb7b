"""From settings to the things a run works with: the backbone, the model and the data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ..data.annotations import Annotations
from ..data.splits import find_data, hold_out, read_split
from ..errors import RamatchError
from ..methods import build_method
from ..modeling.backbone import Backbone
from ..modeling.checkpoints.files import fill, read_tensors
from ..modeling.checkpoints.folder import is_model_folder, load_adapters, model_folder
from ..modeling.checkpoints.loading import BUNDLED, read_tower
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


@torch.no_grad()
def join_towers(vision: str | Path, text: str | Path, *, image_size: int, dim: int, global_pool: str) -> Backbone:
    """A vision tower and a text tower (folders or hub ids, see `read_tower`) → an unaligned `Backbone`, with fresh
    projections."""
    v, t = read_tower(vision, "vision"), read_tower(text, "text")
    assert v.preprocess is not None
    if t.tokenizer is None:
        raise RamatchError(f"{t.name} has no tokenizer files; put tokenizer.json beside its weights")
    if t.config.pad >= 0:
        raise RamatchError(
            f"{t.name} reads texts filled up to {t.config.context} tokens (SigLIP, MobileCLIP2-L), which `ramatch "
            "align` does not train; give a BERT, RoBERTa, XLM-RoBERTa, DistilBERT or CLIP text tower"
        )
    preprocess, name = replace(v.preprocess, size=(image_size, image_size)), f"{v.name}+{t.name}"
    shapes = replace(v.config, head_bias=False), replace(t.config, head_bias=False, head_hidden=0)
    model = Backbone(*shapes, dim, preprocess, t.tokenizer, global_pool=global_pool, name=name)
    fill(model.vision, v.state, v.name)
    assert model.text is not None
    assert model.text_projection is not None
    fill(model.text, t.state, t.name)
    for head in (model.visual_projection, model.text_projection):
        nn.init.orthogonal_(next(head.parameters()))
    set_image_size(model, image_size)
    return model


@torch.no_grad()
def set_image_size(model: Backbone, size: int) -> None:
    """Position embeddings for another size of (square) images, so that nothing is interpolated at run time."""
    tower = model.vision
    if size % tower.config.patch:
        raise RamatchError(f"image size {size} is not a multiple of the patch size {tower.config.patch}")
    side = size // tower.config.patch
    if (positions := tower.grid_positions(side, side)) is not None:
        tower.positions = nn.Parameter(positions.clone(), requires_grad=False)
    tower.config = replace(tower.config, image=size)
    model.preprocess = replace(model.preprocess, size=(size, size))


def build_ram(config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> RAM:
    """RAM on `device`: the frozen backbone in the run's type, what learns in float32."""
    backbone = load_frozen(config.backbone, image_size=config.image_size, label_features=config.label_features)
    fingerprint = backbone.fingerprint()
    ram = build_method(backbone, config.ram_config(), {"name": config.method, "settings": config.settings})
    if config.init is not None:
        folder = model_folder(config.init)
        if folder is None:
            raise RamatchError(f"model.init: {config.init} is not a model folder (no ram.safetensors in it)")
        load_adapters(ram, read_tensors(folder / "ram.safetensors"), config.init)
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
    hidden, validation = set(config.holdout_classes), None
    seen = tuple(c for c in everything.classes if c not in hidden)
    rest = [i for i, r in enumerate(everything.records) if not hidden & set(r.labels)]
    train = everything.subset(rest)
    if isinstance(config.validation, str):
        place, classes = find_data(config.validation), everything.classes
        validation = read_split(place, config.validation_split, classes=classes, images=config.images)
    elif config.validation > 0:
        held = {rest[i] for i in hold_out([r.key for r in train.records], config.validation)}
        kept = [i for i in rest if i not in held]
        train, validation = everything.subset(kept), everything.subset(sorted(set(range(len(everything))) - set(kept)))
    if config.limit is not None and config.limit < len(train):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
        train = train.subset(sorted(order[: config.limit].tolist()))
        if validation is not None and not isinstance(config.validation, str):
            validation = validation.subset(range(min(len(validation), config.limit)))
    if len(train) == 0:
        raise RamatchError(f"{config.path}: no training image is left after holding some out")
    validation = None if validation is None else validation.restrict(seen + config.holdout_classes)
    return TrainData(train.restrict(seen), validation, config.holdout_classes)
