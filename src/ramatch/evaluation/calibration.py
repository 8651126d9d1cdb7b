"""From raw scores to independent probabilities: "is this label there?", for a vocabulary of 1 or of 1,000.

A `Calibrator` looks at each (image, label) pair by itself: a few raw numbers (cosines of the global feature, of the
matched regions, of the best region) go through one logistic function. So the answer for a label does not depend on
which other labels were asked for, and the function fitted on seen labels serves unseen ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ramatch.errors import RamatchError
from ramatch.evaluation._curves import CURVES
from ramatch.evaluation._logistic import fit_logistic, moments
from ramatch.evaluation.calibration_report import calibration_report
from ramatch.evaluation.metrics import Array
from ramatch.evaluation.reliability import best_f1

_TENSORS = ("weights", "bias", "mean", "scale", "label_bias", "label_variance", "curve")


@dataclass(frozen=True)
class CalibrationSettings:
    """How to fit.

    l2: prior precision of the weights on standardised features (one prior for the whole data set, so it fades with
    its size). monotone: True keeps every weight >= 0; a tuple gives each feature's sign (-1, 0 free, 1). per_label: a
    bias per label, shrunk towards the common one as far as the data says labels are alike; a label not met in fitting
    gets the common bias and, for the uncertainty, a probability drawn towards 0.5. variant: a second monotone map on
    top, `beta` or `isotonic`. completeness: share of the labels truly present that the annotations mark; below 1 an
    unmarked label counts as "absent or missed". smooth: Platt's targets, which keep data without positives finite.
    """

    l2: float = 1.0
    monotone: bool | tuple[int, ...] = False
    per_label: bool = False
    variant: Literal["none", "beta", "isotonic"] = "none"
    completeness: float = 1.0
    smooth: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.completeness <= 1:
            raise RamatchError(f"completeness must be in (0, 1], got {self.completeness}")
        if self.l2 < 0:
            raise RamatchError(f"l2 must not be negative, got {self.l2}")
        if self.variant not in ("none", "beta", "isotonic"):
            raise RamatchError(f"variant must be none, beta or isotonic, got {self.variant!r}")


@dataclass(frozen=True, eq=False)
class Calibrator:
    """A fitted map; call it on features (..., N, F) to get probabilities (..., N).

    `threshold` has the best F1 on the fitting data. `base_rate` is the share of positives there, marked or not.
    """

    weights: Tensor  # (F,) on standardised features
    bias: Tensor  # ()
    mean: Tensor  # (F,)
    scale: Tensor  # (F,)
    label_bias: Tensor  # (K,) of the labels in `labels`, empty without per_label
    label_variance: Tensor  # (K,)
    curve: Tensor  # second map: (3,) for beta, (2, knots) for isotonic, empty for none
    labels: tuple[str, ...] = ()
    spread: float = 0.0
    base_rate: float = 0.0
    threshold: float = 0.5
    settings: CalibrationSettings = field(default_factory=CalibrationSettings)
    feature_names: tuple[str, ...] = ()

    @classmethod
    def fit(
        cls,
        features: Array,
        targets: Array,
        classes: Sequence[str] | None = None,
        *,
        settings: CalibrationSettings | None = None,
        known: Array | None = None,
        feature_names: Sequence[str] = (),
    ) -> Calibrator:
        """Fit on held-out features (n, N, F) and targets (n, N); pairs with `known` False are left out."""
        settings = settings or CalibrationSettings()
        x, y, k = _check(features, targets, known)
        width, size = x.shape[1:]
        if classes is not None and len(classes) != width:
            raise RamatchError(f"{len(classes)} classes for {width} columns of features")
        if settings.per_label and classes is None:
            raise RamatchError("per_label calibration needs the names of the labels: pass classes=[...]")
        if feature_names and len(feature_names) != size:
            raise RamatchError(f"{len(feature_names)} feature names for {size} features")
        mean, scale = moments(x, k)
        positives = y.double().sum() if k is None else (y & k).double().sum()
        total = y.numel() if k is None else int(k.sum())
        soft = y.double()
        if settings.smooth:  # Platt (1999): the posterior mean of each class's label under a uniform prior
            high, low = (positives + 1) / (positives + 2), 1 / (total - positives + 2)
            soft = torch.where(y, high, low)
        model = fit_logistic(
            x, soft, known=k, mean=mean, scale=scale, l2=settings.l2, signs=_signs(settings.monotone, size),
            per_label=settings.per_label, completeness=settings.completeness,
        )  # fmt: skip
        none = torch.zeros(0, dtype=torch.float64)
        fitted = cls(
            weights=model.weights.cpu(),
            bias=model.bias.cpu(),
            mean=mean.cpu(),
            scale=scale.cpu(),
            label_bias=model.label_bias.cpu() if settings.per_label else none,
            label_variance=model.label_variance.cpu() if settings.per_label else none,
            curve=none,
            labels=tuple(classes or ()) if settings.per_label else (),
            spread=model.spread,
            base_rate=min(float(positives) / max(total, 1) / settings.completeness, 1.0),
            settings=settings,
            feature_names=tuple(feature_names),
        )
        where = slice(None) if k is None else k
        if settings.variant != "none":
            logits = fitted.logits(x, classes)[where].double()
            fit_curve, _ = CURVES[settings.variant]
            curve = fit_curve(logits.flatten(), soft[where].flatten(), settings.completeness)
            fitted = replace(fitted, curve=curve.cpu())
        threshold, _ = best_f1(fitted(x, classes)[where], y[where])
        return replace(fitted, threshold=min(max(threshold, 0.0), 1.0))

    def __call__(self, features: Array, labels: Sequence[str] | None = None) -> Any:
        """Features (..., N, F) to probabilities (..., N), an array for an array and a tensor for a tensor.

        `labels` names the N columns, so that those met in fitting get their own bias (per_label).
        """
        p = torch.sigmoid(self._curved(self.logits(features, labels)))
        return p if isinstance(features, Tensor) else p.numpy()

    def logits(self, features: Array, labels: Sequence[str] | None = None) -> Tensor:
        """Log-odds (..., N) before the second map."""
        x = features if isinstance(features, Tensor) else torch.as_tensor(np.asarray(features))
        if x.shape[-1] != len(self.weights):
            raise RamatchError(f"this calibrator was fitted on {len(self.weights)} features a pair, got {x.shape[-1]}")
        x = x if x.dtype == torch.float64 else x.float()
        slope = self.weights / self.scale
        f = x @ slope.to(x) + (self.bias - slope @ self.mean).to(x)
        if not self.labels:
            return f
        names: list[str | None] = [None] * x.shape[-2] if labels is None else list(labels)
        if len(names) != x.shape[-2]:
            raise RamatchError(f"{len(names)} labels for {x.shape[-2]} columns of features")
        # One entry more, for labels not met in fitting: the common bias and the labels' whole spread.
        index: dict[str | None, int] = {name: i for i, name in enumerate(self.labels)}
        columns = torch.tensor([index.get(name, len(index)) for name in names], dtype=torch.long)
        bias = torch.cat([self.label_bias, torch.zeros(1).double()])[columns]
        variance = torch.cat([self.label_variance, torch.tensor([self.spread**2]).double()])[columns]
        # Averaging the sigmoid over a Gaussian bias: MacKay's approximation.
        return (f + bias.to(f)) / torch.sqrt(1 + math.pi / 8 * variance.to(f))

    def with_base_rate(self, base_rate: float) -> Calibrator:
        """The same evidence under another prior: where labels are present more or less often than in fitting."""
        if not 0 < base_rate < 1 or not 0 < self.base_rate < 1:
            raise RamatchError(f"base rates must lie between 0 and 1: fitted {self.base_rate}, asked {base_rate}")
        if self.settings.variant == "isotonic":
            raise RamatchError("an isotonic map cannot be moved to another base rate; use variant 'none' or 'beta'")
        shift = _logit(base_rate) - _logit(self.base_rate)
        threshold = float(torch.sigmoid(torch.logit(torch.tensor(self.threshold).double()) + shift))
        moved = replace(self, base_rate=base_rate, threshold=threshold)
        if self.settings.variant == "beta":
            return replace(moved, curve=self.curve + torch.tensor([0.0, 0.0, shift]).double())
        return replace(moved, bias=self.bias + shift)

    def report(
        self,
        features: Array,
        targets: Array,
        seen: Array | None = None,
        *,
        classes: Sequence[str] | None = None,
        before: Array | None = None,
        known: Array | None = None,
        bins: int = 15,
    ) -> dict[str, Any]:
        """What calibration changes on held-out data, on all, `seen` (N,) bool, and unseen labels.

        `before` (n, N) in [0, 1]: what was shown as probability without it; by default the first feature, clipped.
        """
        x, y, k = _check(features, targets, known)
        old = x[..., 0].clamp(0, 1) if before is None else torch.as_tensor(before)
        return calibration_report(old, self(x, classes), y, seen=seen, known=k, threshold=self.threshold, bins=bins)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, config): the tensors for safetensors, the config for JSON."""
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        config = {
            "labels": list(self.labels),
            "feature_names": list(self.feature_names),
            "spread": self.spread,
            "base_rate": self.base_rate,
            "threshold": self.threshold,
            "settings": asdict(self.settings),
        }
        return tensors, config

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Calibrator:
        missing = [name for name in _TENSORS if name not in tensors]
        if missing:
            raise RamatchError(f"not a calibrator: the tensors {', '.join(missing)} are missing")
        settings = dict(config["settings"])
        if isinstance(settings.get("monotone"), list):
            settings["monotone"] = tuple(settings["monotone"])
        return cls(
            **{name: tensors[name].double() for name in _TENSORS},
            labels=tuple(config["labels"]),
            feature_names=tuple(config["feature_names"]),
            spread=float(config["spread"]),
            base_rate=float(config["base_rate"]),
            threshold=float(config["threshold"]),
            settings=CalibrationSettings(**settings),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: a calibrator is a handful of numbers, worth being able to read."""
        tensors, config = self.state()
        return {"ramatch_calibrator": config, "tensors": {name: t.tolist() for name, t in tensors.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibrator:
        if "ramatch_calibrator" not in values or "tensors" not in values:
            raise RamatchError("not a calibrator: 'ramatch_calibrator' and 'tensors' are expected in it")
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values["tensors"].items()}
        return cls.from_state(tensors, values["ramatch_calibrator"])

    def save(self, path: str | Path) -> None:
        """One safetensors file with the config in its header."""
        tensors, config = self.state()
        save_file(tensors, path, metadata={"ramatch_calibrator": json.dumps(config)})

    @classmethod
    def load(cls, path: str | Path) -> Calibrator:
        if not Path(path).is_file():
            raise RamatchError(f"there is no calibrator file {path}")
        with safe_open(path, framework="pt") as file:
            config = (file.metadata() or {}).get("ramatch_calibrator")
            if config is None:
                raise RamatchError(f"{path} is not a calibrator file: its header has no ramatch_calibrator")
            return cls.from_state({name: file.get_tensor(name) for name in file.keys()}, json.loads(config))  # noqa: SIM118

    def _curved(self, logits: Tensor) -> Tensor:
        if self.settings.variant == "none":
            return logits
        _, apply = CURVES[self.settings.variant]
        return apply(self.curve.to(logits), logits)


def _check(features: Array, targets: Array, known: Array | None) -> tuple[Tensor, Tensor, Tensor | None]:
    x = torch.as_tensor(features)
    y = torch.as_tensor(targets, device=x.device)
    if x.ndim != 3 or y.shape != x.shape[:2] or 0 in x.shape:
        raise RamatchError(
            f"features must be (images, labels, numbers per pair) and targets (images, labels), got {tuple(x.shape)}"
            f" and {tuple(y.shape)}"
        )
    if not torch.isfinite(x).all():
        raise RamatchError("features hold NaN or infinite numbers: calibrate on finite scores")
    if ((y != 0) & (y != 1)).any():
        raise RamatchError("targets must be 0 or 1 (mark pairs of unknown truth with known=False)")
    x = x if x.is_floating_point() else x.double()
    k = None if known is None else torch.as_tensor(known, device=x.device).bool()
    if k is not None and (k.shape != y.shape or not k.any()):
        raise RamatchError(f"known must have the shape {tuple(y.shape)} of the targets and mark at least one pair")
    return x, y.bool(), k


def _signs(monotone: bool | tuple[int, ...], size: int) -> Tensor:
    signs = torch.full((size,), float(monotone)) if isinstance(monotone, bool) else torch.tensor(monotone).double()
    if len(signs) != size:
        raise RamatchError(f"monotone names {len(signs)} signs for {size} features")
    return signs


def _logit(p: float) -> float:
    return math.log(p) - math.log1p(-p)
