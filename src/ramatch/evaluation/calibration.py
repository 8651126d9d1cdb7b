"""From raw scores to independent probabilities: "is this label there?", for a vocabulary of 1 or of 1,000.

A `Calibrator` looks at each (image, label) pair by itself: a few raw numbers (cosines of the global feature, of the
matched regions, of the best region) go through one logistic function. So the answer for a label does not depend on
which other labels were asked for, and the function fitted on seen labels serves unseen ones.

Of some labels it can be known that this is not enough: words whose probabilities were off on other labelled data are
drawn towards even odds, and words that the model has not learned towards "not there".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from ramatch.errors import RamatchError
from ramatch.evaluation._logistic import fit_logistic, moments
from ramatch.evaluation.metrics import Array
from ramatch.evaluation.reliability import best_f1
from ramatch.modeling.types import Labels

FEATURES = ("image", "region", "best")  # s_G, s_R, cosine of the best region: what calibration looks at
_TENSORS = ("weights", "bias", "mean", "scale")
_MOST = 1e9  # of any number in a file
DOUBT_L2 = 0.005  # prior precision of the doubt's weights; each label of the evidence counts as one


class Words(NamedTuple):
    """What the text says of N labels: unit features (N, D), where the model's words are known familiarity (N,), and
    which of them its user taught it (N,): of these there is no doubt."""

    unit: Tensor
    familiarity: Tensor | None = None
    learned: Tensor | None = None

    @classmethod
    def of(cls, labels: Labels) -> Words:
        said = (None if x is None else torch.from_numpy(x) for x in (labels.familiarity, labels.learned))
        return cls(labels.unit[: len(labels)].detach(), *said)


class Evidence(NamedTuple):
    """Labelled images to learn from: features (n, N, F), targets (n, N), and the labels' words."""

    features: Array
    targets: Array
    words: Words


@dataclass(frozen=True, eq=False)
class Calibrator:
    """A fitted map; call it on features (..., N, F) to get probabilities (..., N).

    `threshold` has the best F1 on the fitting data. `base_rate` is the share of positives there. `doubt`: how far a
    label's probability is drawn towards even odds is a logistic function of its text feature, with these weights.
    `own`: nothing was fitted, these are the numbers of the checkpoint's own sigmoid (`of_sigmoid`).
    """

    weights: Tensor  # (F,) on standardized features
    bias: Tensor  # ()
    mean: Tensor  # (F,)
    scale: Tensor  # (F,)
    doubt: Tensor | None = None  # (D + 1,), the bias last
    base_rate: float = 0.0
    threshold: float = 0.5
    feature_names: tuple[str, ...] = ()
    own: bool = False

    @classmethod
    def of_sigmoid(cls, scale: float, bias: float) -> Calibrator:
        """That of a checkpoint which learned with a sigmoid (SigLIP): sigmoid(scale · s_G + bias), without regions. Its
        threshold of 0.5 is not tuned: what it learned is which text of a batch belongs to an image."""
        weights = torch.tensor([scale if name == "image" else 0.0 for name in FEATURES], dtype=torch.float64)
        zero, one = torch.zeros_like(weights), torch.ones_like(weights)
        return cls(weights, zero.new_tensor(bias), zero, one, feature_names=FEATURES, own=True)

    @classmethod
    def fit(
        cls, features: Array, targets: Array, words: Words | None = None, *, l2: float = 1.0, names: Sequence[str] = ()
    ) -> Calibrator:
        """Fit on held-out features (n, N, F), with their names, and targets (n, N).

        l2: prior precision of the weights on standardized features (one prior for the whole data set, so it fades with
        its size)."""
        if l2 < 0:
            raise RamatchError(f"l2 must not be negative, got {l2}")
        x, y = _check(features, targets)
        if names and len(names) != x.shape[-1]:
            raise RamatchError(f"{len(names)} feature names for {x.shape[-1]} features")
        mean, scale = moments(x)
        positives = y.double().sum()
        # Platt (1999): the posterior mean of each class's label; data without positives stay finite
        high, low = (positives + 1) / (positives + 2), 1 / (y.numel() - positives + 2)
        theta = fit_logistic(x, torch.where(y, high, low), mean, scale, l2=l2).cpu()
        rate = float(positives) / y.numel()
        fitted = cls(theta[:-1], theta[-1], mean.cpu(), scale.cpu(), base_rate=rate, feature_names=tuple(names))
        return fitted._with_threshold(x, y, words)

    def with_doubt(self, evidence: Sequence[Evidence]) -> Calibrator:
        """This calibrator, with `doubt` fitted to what it gets wrong on several labelled sets, the first being the one
        it was fitted on. Every label counts the same, so that no set rules by its images; the labels of the first
        together at least as much as all others, so that what was calibrated well is left alone."""
        sets: list[tuple[Tensor, Tensor, Tensor, Tensor, float]] = []
        others = sum(len(e.words.unit) for e in evidence[1:])
        for features, targets, words in evidence:
            x, y = _check(features, targets)
            known = torch.ones(len(words.unit)) if words.familiarity is None else words.familiarity
            share = 1.0 if sets else max(1.0, others / len(words.unit))
            logits = self.log_odds(x.cpu()).double()
            sets.append((words.unit.double().cpu(), logits, y.cpu(), known.double().cpu(), share))
        theta = torch.zeros(sets[0][0].shape[1] + 1, dtype=torch.float64)
        theta[-1] = -2.0  # begin with little of it
        theta.requires_grad_()
        search = torch.optim.LBFGS([theta], max_iter=200, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            search.zero_grad()
            total = DOUBT_L2 * theta[:-1].square().sum()
            for unit, logits, y, known, share in sets:
                z, known = logits * (1 - _share(unit, theta)), known.clamp(1e-6, 1 - 1e-9)
                absent = softplus(z + torch.log1p(-known)) - softplus(z)  # log(1 - known * sigmoid(z))
                total = total - share * torch.where(y, known.log() + logsigmoid(z), absent).mean(0).sum()
            total.backward()
            return total

        search.step(loss)
        x, y, words = evidence[0]
        return replace(self, doubt=theta.detach())._with_threshold(*_check(x, y), words)

    def _with_threshold(self, x: Tensor, y: Tensor, words: Words | None) -> Calibrator:
        threshold, _ = best_f1(self(x, words), y)
        return replace(self, threshold=min(max(threshold, 0.0), 1.0))

    def __call__(self, features: Array, words: Words | None = None) -> Any:
        """Features (..., N, F) to probabilities (..., N), an array for an array and a tensor for a tensor."""
        x = features if isinstance(features, Tensor) else torch.as_tensor(np.asarray(features))
        if x.shape[-1] != len(self.weights):
            raise RamatchError(f"this calibrator was fitted on {len(self.weights)} features a pair, got {x.shape[-1]}")
        logits = self.log_odds(x if x.dtype == torch.float64 else x.float())
        if words is None and self.doubt is not None:
            raise RamatchError("this calibrator looks at the labels' words too; give them")
        if words is not None and len(words.unit) != x.shape[-2]:
            raise RamatchError(f"{len(words.unit)} labels for {x.shape[-2]} columns of features")
        if words is not None and self.doubt is not None:
            logits = logits * (1 - _drawn(words, self.doubt)).to(logits)
        p = torch.sigmoid(logits)
        if words is not None and words.familiarity is not None:
            p = p * words.familiarity.to(p)
        return p if isinstance(features, Tensor) else p.numpy()

    def trust(self, words: Words) -> np.ndarray:
        """(N,) in [0, 1]: how much a label's probability is worth; less for a strange word, and for one in doubt."""
        trust = torch.ones(len(words.unit)) if words.familiarity is None else words.familiarity.float()
        return (trust if self.doubt is None else torch.minimum(trust, 1 - _drawn(words, self.doubt).cpu())).numpy()

    def log_odds(self, x: Tensor) -> Tensor:
        """Of features (..., N, F), before words have a say."""
        slope = self.weights / self.scale
        return x @ slope.to(x) + (self.bias - slope @ self.mean).to(x)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: a calibrator is a handful of numbers, worth being able to read."""
        values: dict[str, Any] = {
            "feature_names": list(self.feature_names),
            "base_rate": self.base_rate,
            "threshold": self.threshold,
        }
        values |= {"own": True} if self.own else {}
        tensors = {name: getattr(self, name).tolist() for name in _TENSORS}
        if self.doubt is not None:
            tensors["doubt"] = self.doubt.tolist()
        return {"ramatch_calibrator": values, "tensors": tensors}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibrator:
        given = values if isinstance(values, Mapping) else {}
        config, tensors = given.get("ramatch_calibrator"), given.get("tensors")
        if not (isinstance(config, Mapping) and isinstance(tensors, Mapping)):
            raise RamatchError("not a calibrator: 'ramatch_calibrator' and 'tensors' are expected in it")
        missing = [name for name in _TENSORS if name not in tensors]
        if missing:
            raise RamatchError(f"not a calibrator: the tensors {', '.join(missing)} are missing")
        if tensors.get("curve") or tensors.get("label_bias"):  # earlier versions could bend the logistic, and per label
            raise RamatchError(
                "this calibrator has a second map or a bias per label, which are no longer read; run ramatch calibrate "
                "again"
            )
        try:
            names = _TENSORS if tensors.get("doubt") is None else (*_TENSORS, "doubt")
            found: dict[str, Any] = {name: torch.tensor(tensors[name], dtype=torch.float64) for name in names}
            values = {name: float(config[name]) for name in ("base_rate", "threshold")}
            features = tuple(map(str, config["feature_names"]))
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise RamatchError(f"not a calibrator: a value is missing or of another kind ({error})") from None
        numbers = torch.cat([*(part.flatten() for part in found.values()), torch.tensor([*values.values()])])
        shapes = {found[name].shape for name in ("weights", "mean", "scale")}
        vectors = all(found[name].ndim == (name != "bias") for name in found)
        if not ((numbers.abs() <= _MOST).all() and (found["scale"] > 0).all() and len(shapes) == 1 and vectors):
            raise RamatchError("not a calibrator: its numbers are infinite, or their sizes do not fit")
        return cls(**found, **values, feature_names=features, own=config.get("own") is True)


def _drawn(words: Words, doubt: Tensor) -> Tensor:
    share = _share(words.unit, doubt)
    return share if words.learned is None else share.masked_fill(words.learned.to(share.device), 0.0)


def _share(unit: Tensor, doubt: Tensor) -> Tensor:
    """How far each label's log odds are drawn to 0, (N,) in [0, 1]."""
    if unit.shape[-1] != len(doubt) - 1:
        raise RamatchError(
            f"this calibrator is of another model: it looks at text features of {len(doubt) - 1} numbers, here are "
            f"{unit.shape[-1]}; run ramatch calibrate again"
        )
    doubt = doubt.to(unit.device, torch.promote_types(unit.dtype, torch.float32))
    return torch.sigmoid(unit.to(doubt.dtype) @ doubt[:-1] + doubt[-1])


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
