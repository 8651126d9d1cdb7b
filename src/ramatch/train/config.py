"""Settings of a training run, and recipes: `TrainConfig` as YAML, one per experiment a person would want to run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch

from ..config import LOSSES, METHODS, PRECISIONS, RAMConfig, preset
from ..data.augment import AugmentConfig
from ..errors import RamatchError, require
from ..evaluation.models import DTYPES
from ..files import read_lines, read_text
from ..settings import Bound, Count, Natural, NotNegative, OneOf, Positive, Settings, Share

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class ModelConfig(Settings):
    """What learns: a frozen backbone, a preset of RAM and changes to it."""

    section: ClassVar[str] = "model."

    backbone: str = "ramatch-mini"  # bundled model, Hugging Face id, folder or state-dict file
    preset: str = "ramatch"
    ram: dict[str, Any] = field(default_factory=dict)  # fields of RAMConfig that differ from the preset
    image_size: tuple[Count, Count] | None = None  # (height, width); None: the backbone's own
    label_features: str | None = None  # safetensors file, for a backbone without a text tower
    method: Annotated[str, OneOf(tuple(METHODS))] = "ram"  # RAM, or a system it is compared with
    settings: dict[str, Any] = field(default_factory=dict)  # of that system
    init: str | None = None  # bundled model, model or run folder whose adapters the run starts from

    def check(self) -> None:
        self.ram_config()  # raises for an unknown preset or setting

    def ram_config(self) -> RAMConfig:
        return preset(self.preset, **self.ram)


@dataclass(frozen=True)
class DataConfig(Settings):
    """Where images and labels come from."""

    section: ClassVar[str] = "data."

    path: str = ""  # anything `read_annotations` reads; a relative one is also looked for in $RAMATCH_DATA
    split: str | None = "train"  # used where the path has several
    images: str | None = None  # folder or tar with the pictures, where they are not beside the annotations
    classes: str | tuple[str, ...] | None = None  # labels to learn: names or a text file; None: those of the data
    validation: Annotated[float, Bound(0, 1, below=True)] | str = 0.05  # share of training images; or a path; 0: none
    validation_split: str | None = None  # where `validation` is a path with several
    holdout_classes: tuple[str, ...] = ()  # labels kept from training to measure unseen ones on validation
    limit: Count | None = None  # train on so many images, drawn at random
    cache: Annotated[str, OneOf(("none", "device"))] = "none"  # device: decoded once, kept as uint8 where the model is
    workers: Natural = 4


@dataclass(frozen=True)
class OptimConfig(Settings):
    """AdamW, and SGD for prompts, of every kind of training: rates by what learns, schedule, clipping, average."""

    section: ClassVar[str] = "optim."

    lr: NotNegative = 5e-6  # adapters; the two projections of `align`
    text_lr: NotNegative = 5e-5  # text layers (align)
    vision_lr: NotNegative = 3e-5  # vision layers (align)
    temperature_lr: NotNegative = 5e-5
    temperature_floor: Share = 0.1  # a temperature never falls below this share of where it started
    weight_decay: NotNegative = 1e-4
    decay_all: bool = False  # also of norms, temperatures and prompts, as the authors' program does
    betas: tuple[Share, Share] = (0.9, 0.999)
    prompt_lr: NotNegative = 1e-3  # SGD, label prompts and visual prompts
    prompt_momentum: Share = 0.9
    prompt_weight_decay: NotNegative = 0.0
    schedule: Annotated[str, OneOf(("cosine", "reference"))] = (
        "cosine"  # reference: per epoch, as the authors' program does
    )
    warmup: Share = 0.05  # share of all steps (cosine)
    final_lr: Share = 0.0  # share of each rate left at the end (cosine)
    clip_norm: Positive | None = 1.0  # of all gradients: where the temperatures' are large, SGD's prompts hardly move
    accumulate: Count = 1  # batches per step
    ema_decay: Annotated[float, Bound(0, 1, below=True)] = 0.9997  # 0: no EMA
    ema_restart: bool = True  # at each epoch, as the authors' program does
    ema_warmup: bool = False  # a shorter memory at first: decay at most (1 + step) / (10 + step)
    average: Annotated[float, Bound(0, 1, below=True)] = 0.0  # instead of the EMA: plain mean over the last such share

    def decay(self, step: int, total: int) -> float:
        """What the average keeps of itself at `step` (from 1)."""
        if self.average:
            return 1 - 1 / max(1, step - int(total * (1 - self.average)) + 1)
        return min(self.ema_decay, (1 + step) / (10 + step)) if self.ema_warmup else self.ema_decay


@dataclass(frozen=True)
class EvalConfig(Settings):
    """When and how validation runs, and what counts as best."""

    section: ClassVar[str] = "eval."

    every: Natural = 0  # steps; 0: at the end of each epoch
    at_start: bool = True
    metric: str = "mAP"  # of the validation report: mAP, F1@3, mAP_H, ...
    batch_size: Count = 64
    test: bool = True  # at the end, on the data folder's test_zsl and test_gzsl where it has them


@dataclass(frozen=True)
class CheckpointConfig(Settings):
    """When the state of the run is saved, and how often over."""

    section: ClassVar[str] = "checkpoint."

    every: Natural = 0  # steps; 0: at the end of each epoch (and with each evaluation)
    keep: Natural = 2  # last so many; 0: no checkpoints, such a run cannot be resumed


@dataclass(frozen=True)
class LoopConfig(Settings):
    """What every training has: how long, how many at once, how fast."""

    epochs: Count = 6
    max_steps: Count | None = None  # stop earlier; the schedule then ends there
    batch_size: Count = 32  # per process
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: Annotated[str, OneOf(PRECISIONS)] | None = None  # None: bf16 on CUDA, fp32 on a CPU
    seed: int = 0
    deterministic: bool = False  # torch's deterministic algorithms on the GPU too, slower
    log_every: Count = 20  # steps

    def dtype(self, device: torch.device) -> torch.dtype:
        """Of what need not be float32."""
        return DTYPES[self.precision or ("bf16" if device.type == "cuda" else "fp32")]


@dataclass(frozen=True)
class TrainConfig(LoopConfig):
    """One training run. Defaults are the paper's where it has them (6 epochs, batch 32, AdamW 5e-6, SGD 1e-3)."""

    learns: Annotated[str, OneOf(("adapters",))] = "adapters"
    output: str = "runs/ramatch"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loss: Annotated[str, OneOf(LOSSES)] = "mmc"
    precision: Annotated[str, OneOf(PRECISIONS)] = "fp32"
    device: str | None = None  # None: CUDA where there is one
    sync_batchnorm: bool = True  # statistics over all processes, on several GPUs
    tensorboard: bool = True  # where it is installed


@dataclass(frozen=True)
class OwnModel(Settings):
    """What learns."""

    section: ClassVar[str] = "model."

    backbone: str = "ramatch-mini"  # bundled model, model or run folder; or a plain CLIP
    label_features: str | None = None  # safetensors file, for a backbone without a text tower


@dataclass(frozen=True)
class OwnData(Settings):
    """Where images and labels come from, as in `DataConfig`."""

    section: ClassVar[str] = "data."

    path: str = ""
    split: str | None = "train"
    images: str | None = None
    classes: str | tuple[str, ...] | None = None
    workers: Natural = 2


@dataclass(frozen=True)
class OwnConfig(Settings):
    """A trained model learns the labels of a user's own images (see `own.py`)."""

    learns: Annotated[str, OneOf(("labels",))] = "labels"
    output: str = "runs/own-data"
    model: OwnModel = field(default_factory=OwnModel)
    data: OwnData = field(default_factory=OwnData)
    folds: Annotated[int, Bound(2)] = 5  # each is kept aside once
    device: str | None = None  # None: CUDA where there is one


@dataclass(frozen=True)
class CachedConfig(LoopConfig):
    """Training RAM's adapters on cached features (`study`, `adapt`). Defaults are the paper's for natural images."""

    epochs: Count = 3
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(ema_decay=0.0, ema_restart=False, ema_warmup=True))
    log_every: Count = 50
    loss: Annotated[str, OneOf(LOSSES)] = "mmc"
    views: Count = 3  # of each image: as it is, its mirror, random parts
    mosaics: NotNegative = 0.0  # pictures of four images each, with the labels of all four, for each image
    focus: NotNegative = 0.0  # so many times the loss of the annotated labels alone is added


# Fields that change where or how a run is carried out but not what it computes: free to differ on resume.
FREE_ON_RESUME = (
    *("output", "device", "data.workers", "log_every", "tensorboard", "checkpoint"),
    *("eval.batch_size", "eval.test", "sync_batchnorm", "deterministic"),
)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Fields in which two configs (as dicts) differ so that one run cannot continue the other, as "name: old → new"."""
    out = []
    for key in dict.fromkeys([*old, *new]):
        name, a, b = prefix + key, old.get(key), new.get(key)
        if name in FREE_ON_RESUME or a == b:
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out += differences(a, b, name + ".")
        else:
            out.append(f"{name}: {a!r} → {b!r}")
    return out


def list_recipes() -> dict[str, str]:
    """Names of the recipes in the package, each with the first line of its comment."""
    files = sorted(RECIPES.glob("*.yaml"))
    return {file.stem: read_lines(file)[0].lstrip("# ") for file in files}


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig | OwnConfig:
    """A recipe of the package by name, or a YAML (or JSON) file, with overrides like "optim.lr=1e-4" applied on top.

    A value is read as JSON where it can be (`true`, `null`, `3`, `["a", "b"]`), else as text.
    """
    path, inside = Path(name_or_path).expanduser(), RECIPES / f"{name_or_path}.yaml"
    if not path.is_file():
        if len(path.parts) > 1 or not inside.is_file():
            raise RamatchError(f"no recipe '{path}': give a YAML file or one of {', '.join(list_recipes())}")
        path = inside
    values = read_values(path, "recipe")
    kind = OwnConfig if values.get("learns") == "labels" else TrainConfig
    return kind.from_dict(values).with_overrides(overrides)


def read_values(path: Path, what: str) -> dict[str, Any]:
    """Named values of a YAML (or JSON) file, which is a `what`."""
    text = read_text(path)
    try:
        values = json.loads(text)
    except ValueError:
        yaml = require("yaml", "train")
        try:
            values = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # dates and numbers that cannot be, deep nesting
            raise RamatchError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise RamatchError(f"{path}: a {what} is a set of named values, this is a {type(values).__name__}")
    return values


def dump_config(config: TrainConfig | OwnConfig) -> str:
    """YAML of the whole config. Without PyYAML it is written as JSON, which YAML readers take too."""
    try:
        import yaml
    except ImportError:
        return json.dumps(config.to_dict(), indent=2, ensure_ascii=False) + "\n"
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
