"""Settings of a training run as frozen dataclasses that check themselves.

A recipe (recipes.py) is one of these written as YAML; `TrainConfig(...)` in Python needs no YAML.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..config import RAMConfig, preset
from ..errors import RamatchError
from ..modeling.losses import LOSSES

PRECISIONS = ("fp32", "bf16", "fp16")
CACHES = ("none", "device")
CROPS = ("resized", "plain", "none")


@dataclass(frozen=True)
class ModelConfig:
    """What learns: a frozen backbone, a preset of RAM and changes to it."""

    backbone: str = "ramatch-mini"  # bundled model, Hugging Face id, folder or state-dict file
    preset: str = "ramatch"
    ram: dict[str, Any] = field(default_factory=dict)  # fields of RAMConfig that differ from the preset
    image_size: tuple[int, int] | None = None  # (height, width); None: the backbone's own
    label_features: str | None = None  # safetensors file, for a backbone without a text tower
    init: str | None = None  # model folder whose adapters the run starts from

    def __post_init__(self) -> None:
        self.ram_config()  # raises for an unknown preset or setting

    def ram_config(self) -> RAMConfig:
        return preset(self.preset, **ram_settings(self.ram))


@dataclass(frozen=True)
class DataConfig:
    """Where images and labels come from. `path` is anything `read_annotations` reads; a relative path is also looked for in
    $RAMATCH_DATA."""

    path: str = ""
    split: str | None = "train"  # used where the path has several
    images: str | None = None  # folder or tar with the pictures, where they are not beside the annotations
    classes: str | tuple[str, ...] | None = None  # labels to learn: names or a text file; None: those of the data
    validation: float | str = 0.05  # share of the training images held out; or a path; 0: none
    validation_split: str | None = None  # where `validation` is a path with several
    holdout_classes: tuple[str, ...] = ()  # labels kept from training to measure unseen ones on validation
    limit: int | None = None  # train on so many images, drawn at random
    cache: str = "none"  # device: all images decoded once and kept, as uint8, where the model is; augmented there
    workers: int = 4

    def __post_init__(self) -> None:
        _choose("data.cache", self.cache, CACHES)
        if not isinstance(self.validation, str) and not 0 <= self.validation < 1:
            raise RamatchError(f"data.validation is a share in [0, 1) or a path, got {self.validation}")
        if self.workers < 0 or (self.limit is not None and self.limit < 1):
            raise RamatchError("data.workers must not be negative and data.limit must be at least 1")


@dataclass(frozen=True)
class AugmentConfig:
    """Random crop, flip, blur, erasing (appendix A.6 names them; the numbers are ours). `enabled: false`: plain resize."""

    enabled: bool = True
    crop: str = "resized"  # resized: a part of relative area `scale`; plain: a shifted window; none
    scale: tuple[float, float] = (0.5, 1.0)
    ratio: tuple[float, float] = (0.75, 1.3333)
    margin: float = 0.125  # plain: the image is this much larger than the window
    flip: float = 0.5
    blur: float = 0.2
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    erasing: float = 0.25
    erasing_scale: tuple[float, float] = (0.02, 0.2)
    erasing_ratio: tuple[float, float] = (0.3, 3.3)

    def __post_init__(self) -> None:
        _choose("augment.crop", self.crop, CROPS)
        for name in ("flip", "blur", "erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise RamatchError(f"augment.{name} is a probability, got {getattr(self, name)}")
        for name in ("scale", "ratio", "blur_sigma", "erasing_scale", "erasing_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise RamatchError(f"augment.{name} must be two positive numbers in order, got {(low, high)}")
        if self.scale[1] > 1 or self.erasing_scale[1] > 1 or self.margin < 0:
            raise RamatchError(
                "augment.scale and erasing_scale are shares of the image, augment.margin is not negative"
            )


@dataclass(frozen=True)
class OptimConfig:
    """AdamW for adapters, SGD for prompts, both after linear warm-up and cosine decay."""

    lr: float = 5e-6
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    prompt_lr: float = 1e-3  # SGD, label prompts and visual prompts
    prompt_momentum: float = 0.9
    prompt_weight_decay: float = 0.0
    temperature_lr: float = 5e-5
    temperature_floor: float = 0.1  # a temperature never falls below this share of where it started
    warmup: float = 0.05  # share of all steps
    final_lr: float = 0.0  # share of each rate left at the end
    clip_norm: float | None = 1.0  # of all gradients: where the temperatures' are large, SGD's prompts hardly move
    accumulate: int = 1  # batches per step
    ema_decay: float = 0.9997  # 0: no EMA
    ema_restart: bool = True  # at each epoch, as the authors' program does

    def __post_init__(self) -> None:
        for name in ("lr", "prompt_lr", "temperature_lr", "weight_decay", "prompt_weight_decay"):
            if not getattr(self, name) >= 0:
                raise RamatchError(f"optim.{name} must not be negative, got {getattr(self, name)}")
        for name in ("prompt_momentum", "temperature_floor", "warmup", "final_lr", "ema_decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise RamatchError(f"optim.{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.accumulate < 1 or (self.clip_norm is not None and self.clip_norm <= 0):
            raise RamatchError("optim.accumulate must be at least 1, optim.clip_norm positive or null")
        if self.ema_decay == 1:
            raise RamatchError("optim.ema_decay of 1 would never learn; use a value below 1, or 0 for no EMA")


@dataclass(frozen=True)
class EvalConfig:
    """When and how validation runs, and what counts as best."""

    every: int = 0  # steps; 0: at the end of each epoch
    at_start: bool = True
    metric: str = "mAP"  # of the validation report: mAP, F1@3, mAP_H, ...
    batch_size: int = 64
    test: bool = True  # at the end, on the data folder's test_zsl and test_gzsl where it has them

    def __post_init__(self) -> None:
        if self.every < 0 or self.batch_size < 1:
            raise RamatchError("eval.every must not be negative and eval.batch_size must be at least 1")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of the run is saved, and how often over."""

    every: int = 0  # steps; 0: at the end of each epoch (and with each evaluation)
    keep: int = 2  # last so many; 0: no checkpoints, such a run cannot be resumed

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 0:
            raise RamatchError("checkpoint.every and checkpoint.keep must not be negative")


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Defaults are the paper's where it has them (method: 6 epochs, batch 32, AdamW 5e-6, SGD 1e-3)."""

    output: str = "runs/ramatch"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loss: str = "mmc"
    epochs: int = 6
    max_steps: int | None = None  # stop earlier; the schedule then ends there
    batch_size: int = 32  # per process
    precision: str = "fp32"
    seed: int = 0
    device: str | None = None  # None: CUDA where there is one
    deterministic: bool = False  # torch's deterministic algorithms on the GPU too, slower
    sync_batchnorm: bool = True  # statistics over all processes, on several GPUs
    log_every: int = 20  # steps
    tensorboard: bool = True  # where it is installed

    def __post_init__(self) -> None:
        _choose("precision", self.precision, PRECISIONS)
        _choose("loss", self.loss, tuple(LOSSES))
        for name in ("epochs", "batch_size", "log_every"):
            if getattr(self, name) < 1:
                raise RamatchError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_steps is not None and self.max_steps < 1:
            raise RamatchError(f"max_steps must be at least 1, got {self.max_steps}")

    def to_dict(self) -> dict[str, Any]:
        """Plain nested data, for YAML and JSON."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Unknown keys are an error that lists the known ones; "5e-6" (a string to YAML) becomes a number."""
        return build(cls, values)

    def replace(self, **changes: Any) -> TrainConfig:
        """A copy with fields changed; dotted names reach inside: replace(**{"optim.lr": 1e-4})."""
        values = self.to_dict()
        for key, value in changes.items():
            set_key(values, key, value)
        return self.from_dict(values)


# Fields that change where or how a run is carried out but not what it computes: free to differ on resume.
FREE_ON_RESUME = ("output", "device", "data.workers", "log_every", "tensorboard", "checkpoint", "eval.batch_size",
                  "eval.test", "sync_batchnorm", "deterministic")  # fmt: skip


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


# ------------------------------------------------------------------------------------------- dict → dataclass

T = TypeVar("T")


def build(cls: type[T], values: Any, where: str = "") -> T:
    """A dataclass from nested plain data, each value brought to its field's type."""
    if not isinstance(values, Mapping):
        raise RamatchError(f"'{where or 'the config'}' must be a set of named values, got {values!r}")
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise RamatchError(f"unknown setting '{where}{key}'; known: {', '.join(where + name for name in hints)}")
    return cls(**{key: _coerce(value, hints[key], where + key) for key, value in values.items()})


def ram_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Some settings of RAM, each brought to its field's type; an error names what is wrong."""
    typed = build(RAMConfig, values)
    return {name: getattr(typed, name) for name in values}


def set_key(values: dict[str, Any], dotted: str, value: Any) -> None:
    """values["a"]["b"] = value for "a.b"; missing levels are made (and found unknown by `build`)."""
    *path, last = dotted.split(".")
    for part in path:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise RamatchError(f"'{dotted}': '{part}' is a value, not a group of settings")
        values = inner
    values[last] = value


def _coerce(value: Any, kind: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return build(typing.cast(type, kind), value, name + ".")
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, args, name)
    if origin is tuple:
        items = [args[0]] * len(value) if isinstance(value, (list, tuple)) and args[-1] is Ellipsis else list(args)
        if not isinstance(value, (list, tuple)) or len(value) != len(items):
            raise RamatchError(
                f"'{name}' must be a list{'' if args[-1] is Ellipsis else f' of {len(args)}'}, got {value!r}"
            )
        return tuple(_coerce(v, k, name) for v, k in zip(value, items, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise RamatchError(f"'{name}' must be a set of named values, got {value!r}")
        return dict(value)
    if kind is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            raise RamatchError(f"'{name}' must be a number, got {value!r}") from None
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # a folder called 7
    if kind is str and value is None:
        return "none"  # augment.crop=none, prompts=none: a word here, and nothing where a setting may be empty
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "a whole number", bool: "true or false", str: "text", float: "a number"}
        raise RamatchError(f"'{name}' must be {words[kind]}, got {value!r}")
    return value


def _coerce_union(value: Any, kinds: tuple[Any, ...], name: str) -> Any:
    """The first of the kinds that takes the value; numbers before text, so that "0.05" is one."""
    if value is None and type(None) in kinds:
        return None
    errors = []
    for kind in sorted((k for k in kinds if k is not type(None)), key=lambda k: k is str):
        try:
            return _coerce(value, kind, name)
        except RamatchError as error:
            errors.append(error)
    raise errors[0]


def _choose(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RamatchError(f"'{name}' is '{value}'; it must be one of {', '.join(allowed)}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
