"""Settings of a training run. A recipe (recipe.py) is `TrainConfig` written as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from ..config import LOSSES, PRECISIONS, RAMConfig, preset
from ..errors import RamatchError
from ..settings import Bound, Count, Natural, NotNegative, OneOf, Positive, Settings, Share, Span


@dataclass(frozen=True)
class ModelConfig(Settings):
    """What learns: a frozen backbone, a preset of RAM and changes to it."""

    section: ClassVar[str] = "model."

    backbone: str = "ramatch-mini"  # bundled model, Hugging Face id, folder or state-dict file
    preset: str = "ramatch"
    ram: dict[str, Any] = field(default_factory=dict)  # fields of RAMConfig that differ from the preset
    image_size: tuple[Count, Count] | None = None  # (height, width); None: the backbone's own
    label_features: str | None = None  # safetensors file, for a backbone without a text tower
    init: str | None = None  # model folder whose adapters the run starts from

    def check(self) -> None:
        self.ram_config()  # raises for an unknown preset or setting

    def ram_config(self) -> RAMConfig:
        return preset(self.preset, **self.ram)


@dataclass(frozen=True)
class DataConfig(Settings):
    """Where images and labels come from. `path` is anything `read_annotations` reads; a relative path is also looked for in
    $RAMATCH_DATA."""

    section: ClassVar[str] = "data."

    path: str = ""
    split: str | None = "train"  # used where the path has several
    images: str | None = None  # folder or tar with the pictures, where they are not beside the annotations
    classes: str | tuple[str, ...] | None = None  # labels to learn: names or a text file; None: those of the data
    validation: Annotated[float, Bound(0, 1, below=True)] | str = (
        0.05  # share of the training images; or a path; 0: none
    )
    validation_split: str | None = None  # where `validation` is a path with several
    holdout_classes: tuple[str, ...] = ()  # labels kept from training to measure unseen ones on validation
    limit: Count | None = None  # train on so many images, drawn at random
    cache: Annotated[str, OneOf(("none", "device"))] = "none"  # device: decoded once, kept as uint8 where the model is
    workers: Natural = 4


@dataclass(frozen=True)
class AugmentConfig(Settings):
    """Random crop, flip, blur, erasing (appendix A.6 names them; the numbers are ours). `enabled: false`: plain resize."""

    section: ClassVar[str] = "augment."

    enabled: bool = True
    crop: Annotated[str, OneOf(("resized", "plain", "none"))] = "resized"  # a part of area `scale`; a shifted window
    scale: Span = (0.5, 1.0)
    ratio: Span = (0.75, 1.3333)
    margin: NotNegative = 0.125  # plain: the image is this much larger than the window
    flip: Share = 0.5
    blur: Share = 0.2
    blur_sigma: Span = (0.1, 2.0)
    erasing: Share = 0.25
    erasing_scale: Span = (0.02, 0.2)
    erasing_ratio: Span = (0.3, 3.3)

    def check(self) -> None:
        for name in ("scale", "ratio", "blur_sigma", "erasing_scale", "erasing_ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise RamatchError(f"augment.{name} must be two positive numbers in order, got {(low, high)}")
        if self.scale[1] > 1 or self.erasing_scale[1] > 1:
            raise RamatchError("augment.scale and augment.erasing_scale are shares of the image, at most 1")


@dataclass(frozen=True)
class OptimConfig(Settings):
    """AdamW for adapters, SGD for prompts, both after linear warm-up and cosine decay."""

    section: ClassVar[str] = "optim."

    lr: NotNegative = 5e-6
    weight_decay: NotNegative = 1e-4
    betas: tuple[Share, Share] = (0.9, 0.999)
    prompt_lr: NotNegative = 1e-3  # SGD, label prompts and visual prompts
    prompt_momentum: Share = 0.9
    prompt_weight_decay: NotNegative = 0.0
    temperature_lr: NotNegative = 5e-5
    temperature_floor: Share = 0.1  # a temperature never falls below this share of where it started
    warmup: Share = 0.05  # share of all steps
    final_lr: Share = 0.0  # share of each rate left at the end
    clip_norm: Positive | None = 1.0  # of all gradients: where the temperatures' are large, SGD's prompts hardly move
    accumulate: Count = 1  # batches per step
    ema_decay: Annotated[float, Bound(0, 1, below=True)] = 0.9997  # 0: no EMA
    ema_restart: bool = True  # at each epoch, as the authors' program does


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
class TrainConfig(Settings):
    """One training run. Defaults are the paper's where it has them (method: 6 epochs, batch 32, AdamW 5e-6, SGD 1e-3)."""

    output: str = "runs/ramatch"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    loss: Annotated[str, OneOf(LOSSES)] = "mmc"
    epochs: Count = 6
    max_steps: Count | None = None  # stop earlier; the schedule then ends there
    batch_size: Count = 32  # per process
    precision: Annotated[str, OneOf(PRECISIONS)] = "fp32"
    seed: int = 0
    device: str | None = None  # None: CUDA where there is one
    deterministic: bool = False  # torch's deterministic algorithms on the GPU too, slower
    sync_batchnorm: bool = True  # statistics over all processes, on several GPUs
    log_every: Count = 20  # steps
    tensorboard: bool = True  # where it is installed


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
