"""From raw scores to independent probabilities: "is this label there?", for a vocabulary of 1 or of 1,000.

A `Calibrator` looks at each (image, label) pair by itself: a few raw numbers (cosines of the global feature, of the
matched regions, of the best region) go through one logistic function. So the answer for a label does not depend on
which other labels were asked for, and the function fitted on seen labels serves unseen ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramatch.errors import RamatchError
from ramatch.evaluation._logistic import fit_logistic, moments
from ramatch.evaluation.metrics import Array
from ramatch.evaluation.reliability import best_f1, calibration_report

_TENSORS = ("weights", "bias", "mean", "scale", "label_bias", "label_variance")
_VALUES = ("labels", "feature_names", "spread", "base_rate", "threshold")
_MOST = 1e9  # of any number in a file


@dataclass(frozen=True)
class CalibrationSettings:
    """How to fit.

    l2: prior precision of the weights on standardized features (one prior for the whole data set, so it fades with
    its size). per_label: a bias per label, shrunk towards the common one as far as the data says labels are alike; a
    label not met in fitting gets the common bias and, for the uncertainty, a probability drawn towards 0.5.
    """

    l2: float = 1.0
    per_label: bool = False

    def __post_init__(self) -> None:
        if self.l2 < 0:
            raise RamatchError(f"l2 must not be negative, got {self.l2}")


@dataclass(frozen=True, eq=False)
class Calibrator:
    """A fitted map; call it on features (..., N, F) to get probabilities (..., N).

    `threshold` has the best F1 on the fitting data. `base_rate` is the share of positives there.
    """

    weights: Tensor  # (F,) on standardized features
    bias: Tensor  # ()
    mean: Tensor  # (F,)
    scale: Tensor  # (F,)
    label_bias: Tensor  # (K,) of the labels in `labels`, empty without per_label
    label_variance: Tensor  # (K,)
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
        feature_names: Sequence[str] = (),
    ) -> Calibrator:
        """Fit on held-out features (n, N, F) and targets (n, N)."""
        settings = settings or CalibrationSettings()
        x, y = _check(features, targets)
        width, size = x.shape[1:]
        if classes is not None and len(classes) != width:
            raise RamatchError(f"{len(classes)} classes for {width} columns of features")
        if settings.per_label and classes is None:
            raise RamatchError("per_label calibration needs the names of the labels: pass classes=[...]")
        if feature_names and len(feature_names) != size:
            raise RamatchError(f"{len(feature_names)} feature names for {size} features")
        mean, scale = moments(x)
        positives = y.double().sum()
        # Platt (1999): the posterior mean of each class's label; data without positives stay finite
        high, low = (positives + 1) / (positives + 2), 1 / (y.numel() - positives + 2)
        model = fit_logistic(x, torch.where(y, high, low), mean, scale, l2=settings.l2, per_label=settings.per_label)
        known = width if settings.per_label else 0
        fitted = cls(
            weights=model.weights.cpu(),
            bias=model.bias.cpu(),
            mean=mean.cpu(),
            scale=scale.cpu(),
            label_bias=model.label_bias[:known].cpu(),
            label_variance=model.label_variance[:known].cpu(),
            labels=tuple(classes or ())[:known],
            spread=model.spread,
            base_rate=float(positives) / y.numel(),
            settings=settings,
            feature_names=tuple(feature_names),
        )
        threshold, _ = best_f1(fitted(x, classes), y)
        return replace(fitted, threshold=min(max(threshold, 0.0), 1.0))

    def __call__(self, features: Array, labels: Sequence[str] | None = None) -> Any:
        """Features (..., N, F) to probabilities (..., N), an array for an array and a tensor for a tensor.

        `labels` names the N columns, so that those met in fitting get their own bias (per_label).
        """
        x = features if isinstance(features, Tensor) else torch.as_tensor(np.asarray(features))
        if x.shape[-1] != len(self.weights):
            raise RamatchError(f"this calibrator was fitted on {len(self.weights)} features a pair, got {x.shape[-1]}")
        x = x if x.dtype == torch.float64 else x.float()
        slope = self.weights / self.scale
        logits = x @ slope.to(x) + (self.bias - slope @ self.mean).to(x)
        if self.labels:
            bias, variance = self._label_terms(x.shape[-2], labels)
            # Averaging the sigmoid over a Gaussian bias: MacKay's approximation.
            logits = (logits + bias.to(x)) / torch.sqrt(1 + math.pi / 8 * variance.to(x))
        p = torch.sigmoid(logits)
        return p if isinstance(features, Tensor) else p.numpy()

    def _label_terms(self, width: int, labels: Sequence[str] | None) -> tuple[Tensor, Tensor]:
        """Bias and variance (N,); a label not met in fitting has the common bias and the labels' whole spread."""
        names: list[str | None] = [None] * width if labels is None else list(labels)
        if len(names) != width:
            raise RamatchError(f"{len(names)} labels for {width} columns of features")
        index: dict[str | None, int] = {name: i for i, name in enumerate(self.labels)}
        columns = torch.tensor([index.get(name, len(index)) for name in names], dtype=torch.long)
        bias = torch.cat([self.label_bias, torch.zeros(1).double()])
        variance = torch.cat([self.label_variance, torch.tensor([self.spread**2]).double()])
        return bias[columns], variance[columns]

    def report(
        self,
        features: Array,
        targets: Array,
        seen: Array | None = None,
        *,
        classes: Sequence[str] | None = None,
        before: Array | None = None,
    ) -> dict[str, Any]:
        """What calibration changes on held-out data, on all, `seen` (N,) bool, and unseen labels.

        `before` (n, N) in [0, 1]: what was shown as probability without it; by default the first feature, clipped.
        """
        x, y = _check(features, targets)
        old = x[..., 0].clamp(0, 1) if before is None else torch.as_tensor(before)
        return calibration_report(old, self(x, classes), y, seen=seen, threshold=self.threshold)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: a calibrator is a handful of numbers, worth being able to read."""
        values = {name: getattr(self, name) for name in _VALUES}
        values |= {name: list(values[name]) for name in ("labels", "feature_names")}
        tensors = {name: getattr(self, name).tolist() for name in _TENSORS}
        return {"ramatch_calibrator": {**values, "settings": asdict(self.settings)}, "tensors": tensors}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibrator:
        if "ramatch_calibrator" not in values or "tensors" not in values:
            raise RamatchError("not a calibrator: 'ramatch_calibrator' and 'tensors' are expected in it")
        config, tensors = values["ramatch_calibrator"], values["tensors"]
        missing = [name for name in _TENSORS if name not in tensors]
        if missing:
            raise RamatchError(f"not a calibrator: the tensors {', '.join(missing)} are missing")
        if tensors.get("curve"):  # earlier versions could bend the logistic by a second map
            raise RamatchError("this calibrator has a second map, which is no longer read; run ramatch calibrate again")
        try:
            settings = {name: float(config["settings"][name]) for name in ("l2", "per_label")}
            fields: dict[str, Any] = {name: torch.tensor(tensors[name], dtype=torch.float64) for name in _TENSORS}
            fields |= {name: tuple(v) if isinstance(v := config[name], list) else float(v) for name in _VALUES}
            numbers = [*(fields[name].flatten() for name in _TENSORS), torch.tensor([fields[n] for n in _VALUES[2:]])]
            shapes = {fields[name].shape for name in ("weights", "mean", "scale")}
            known = {len(fields["label_bias"]), len(fields["label_variance"]), len(fields["labels"])}
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise RamatchError(f"not a calibrator: a value is missing or of another kind ({error})") from None
        sound = all((part.abs() <= _MOST).all() for part in numbers) and (fields["scale"] > 0).all()
        if not (sound and len(shapes) == len(known) == 1 and fields["weights"].ndim == 1 and fields["bias"].ndim == 0):
            raise RamatchError("not a calibrator: its numbers are infinite, or their sizes do not fit")
        return cls(**fields, settings=CalibrationSettings(settings["l2"], bool(settings["per_label"])))


def _check(features: Array, targets: Array) -> tuple[Tensor, Tensor]:
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
        raise RamatchError("targets must be 0 or 1")
    return x if x.is_floating_point() else x.double(), y.bool()
