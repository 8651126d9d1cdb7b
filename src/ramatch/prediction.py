"""What a recognition returns: typed, validated, able to show itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from .config import MAPS
from .data.kinds import each_once
from .data.lexicon import Lexicon
from .errors import RamatchError, printable, require
from .masks import FineScores, Masks

if TYPE_CHECKING:
    from pandas import DataFrame

TRUSTED = 0.5  # from here on a label's probability is more than a guess
RELATIVE = (
    "the model is not calibrated, so there is no probability: a 'value' is a relative score, which compares the labels "
    "of this vocabulary with each other; see ramatch calibrate"
)
SHARPNESS = 12.0  # of similarity maps
MASKED = 0.1  # from here on a label is tried for masks, where it must look the better the less probable it is


class Tag(NamedTuple):
    """One label of one image. `value` is its probability, or where the model is not calibrated its relative score.
    `trusted`: the value is a probability, and of a word that the model knows well (as far as can be said)."""

    label: str
    value: float
    score: float
    calibrated: bool = True
    familiarity: float | None = None
    trusted: bool = True

    @property
    def probability(self) -> float:
        if not self.calibrated:
            raise RamatchError(RELATIVE)
        return self.value

    def __repr__(self) -> str:
        return f"Tag({self})"

    def __str__(self) -> str:
        return f"{printable(self.label)} {self.value:.2f}{'?' * (not self.trusted)}"


@dataclass(frozen=True)
class Unreadable:
    """Stands in a list of predictions for an image that could not be read, and is false, so that `filter(None, found)`
    gives the predictions. source: the file's name; reason: what is wrong with it."""

    source: str | None
    reason: str

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return f"Unreadable({short_name(self.source)}: {self.reason})"

    def to_dict(self) -> dict[str, Any]:
        return {"image": self.source, "error": self.reason}


@dataclass(frozen=True, eq=False)
class Prediction:
    """One image's answer for every label of the vocabulary.

    labels: N names. scores (N,): for ranking. values (N,) in [0, 1]; `calibrated` says of which kind: probabilities,
    which answer "is it there?" for each label by itself, or relative scores, which share out one certainty among the
    labels of the vocabulary and so sum to 1. familiarity (N,) in [0, 1]: how much each label itself is like the words
    that the model learned; trust (N,) in [0, 1]: what each probability is worth, by the word that it comes from (see
    `Sought`); both where that is known. grid: rows and columns of the M regions. similarities, plan (M, N) and marginal
    (M,) are there when maps were asked for; each column of the plan sums to 1. source: the file's name; size: (width,
    height) of the image. lexicon: with it, tags say each thing once, the specific before the general (see `each_once`).
    fine: there when masks were asked for.
    """

    labels: tuple[str, ...]
    values: np.ndarray
    scores: np.ndarray
    calibrated: bool
    grid: tuple[int, int]
    similarities: np.ndarray | None = None
    plan: np.ndarray | None = None
    marginal: np.ndarray | None = None
    source: str | None = None
    size: tuple[int, int] | None = None
    familiarity: np.ndarray | None = None
    trust: np.ndarray | None = None
    lexicon: Lexicon | None = None
    fine: FineScores | None = None

    def __post_init__(self) -> None:
        n, m = len(self.labels), self.grid[0] * self.grid[1]
        for name, shape in (
            ("values", (n,)),
            ("scores", (n,)),
            ("familiarity", (n,)),
            ("trust", (n,)),
            ("similarities", (m, n)),
            ("plan", (m, n)),
            ("marginal", (m,)),
        ):
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(f"{name} has shape {value.shape}, expected {shape}")

    @property
    def probabilities(self) -> np.ndarray:
        """The values, if they are probabilities."""
        if not self.calibrated:
            raise RamatchError(RELATIVE)
        return self.values

    @property
    def trusted(self) -> np.ndarray:
        """(N,) bool: see `Tag`."""
        return (np.ones(len(self.labels)) if self.trust is None else self.trust) >= (TRUSTED if self.calibrated else 2)

    def __repr__(self) -> str:
        best = ", ".join(map(str, self.top(3)))
        kind = "" if self.calibrated else "; relative scores, not calibrated"
        return f"Prediction({short_name(self.source)}: {best}, of {len(self.labels)} labels{kind})"

    def _repr_html_(self) -> str:
        from .viz.notebook import prediction_html

        return prediction_html(self)

    def tags(self) -> list[Tag]:
        """All labels, best first; ties in the order of the vocabulary. With a lexicon, those that say something new."""
        return list(self._tags())

    def _tags(self) -> Iterator[Tag]:
        order: Iterable[int] = np.argsort(-self.scores, kind="stable").tolist()
        if self.lexicon is not None:
            order = each_once(self.labels, self.values, order, self.lexicon)
        known = [None] * len(self.labels) if self.familiarity is None else self.familiarity.tolist()
        values, scores, trusted = self.values.tolist(), self.scores.tolist(), self.trusted.tolist()
        for i in order:
            yield Tag(self.labels[i], values[i], scores[i], self.calibrated, known[i], trusted[i])

    def parents(self, label: str) -> list[str]:
        """What a label is a kind of, nearest first, where the labels are those of a lexicon."""
        return [] if self.lexicon is None else self.lexicon.above(self.lexicon.find(label))

    def top(self, k: int = 10) -> list[Tag]:
        """The k best labels."""
        return list(islice(self._tags(), max(0, min(k, len(self.labels)))))

    def above(self, threshold: float = 0.5) -> list[Tag]:
        """The labels that are at least this probable (or have this relative score), best first."""
        return [tag for tag in self._tags() if tag.value >= threshold]

    def heatmap(self, label: str, *, kind: str = "similarity", size: tuple[int, int] | None = None) -> np.ndarray:
        """Where a label is, over the grid (rows, columns), in [0, 1] with the largest at 1.

        kind "similarity": how much each region looks like the label, which shows the whole object; "plan": the label's
        transport weights, which show where it won against the other labels (the paper's individual view); "both": their
        geometric mean; "fine": of a prediction with masks, the steadier scores that these are made of. `size` =
        (width, height) resizes smoothly to an image. The map says where the label would be; whether it is there says
        its probability.
        """
        if label not in self.labels:
            raise RamatchError(f"'{label}' is not in the vocabulary of this prediction")
        column = self.labels.index(label)
        if kind == "both":
            found = self.heatmap(label) * self.heatmap(label, kind="plan")
            heat = np.sqrt(found / max(float(found.max()), 1e-12))
            return heat if size is None else _resized(heat, size)
        weights = self._weights(column, kind)
        if kind == "fine" or (kind == "similarity" and self.similarities is not None):
            # cosines lie close together: stretch them so that 0.1 below the best is a third of it
            weights = np.exp((weights - weights.max()) * SHARPNESS)
            weights = weights - weights.min() if np.ptp(weights) > 0 else weights
        heat = weights / max(float(weights.max()), 1e-12)
        return heat if size is None else _resized(heat, size)

    def _weights(self, column: int, kind: str) -> np.ndarray:
        """What a map shows before it is put between 0 and 1, (rows, columns); without cosines the plan is shown."""
        values = {"similarity": self.plan if self.similarities is None else self.similarities, "plan": self.plan}
        values["fine"] = None if self.fine is None else self.fine.scores
        if kind not in values:
            raise RamatchError(f"unknown kind of map '{kind}'; known: {', '.join(MAPS)}")
        if (chosen := values[kind]) is None:
            asked = "masks=True" if kind == "fine" else "maps=True"
            raise RamatchError(f"this prediction has no maps; predict with {asked}")
        grid = chosen.shape[:2] if kind == "fine" else self.grid
        return chosen[..., column].reshape(grid).astype(np.float32)

    def masks(
        self,
        threshold: float | None = None,
        *,
        labels: Collection[str] | None = None,
        background: bool = True,
        size: tuple[int, int] | None = None,
    ) -> Masks:
        """Which pixels show which label: the labels named, or those at least as probable as `threshold` (and the best
        one, where without `background` every pixel must be something); by default 0.1, of relative scores that share
        of the largest. `size`: (W, H), by default that of the image. Labels that get no pixel are left out.
        """
        if self.fine is None:
            raise RamatchError("this prediction has no masks; predict with masks=True")
        if (size := size or self.size) is None:
            raise RamatchError("this prediction does not know its image's size; give it: masks(size=(width, height))")
        if labels is not None:
            if unknown := [label for label in labels if label not in self.labels]:
                raise RamatchError(f"'{unknown[0]}' is not in the vocabulary of this prediction")
            chosen = [i for i, label in enumerate(self.labels) if label in set(labels)]
        else:
            least = MASKED * (1.0 if self.calibrated else float(self.values.max(initial=0)))
            chosen = np.flatnonzero(self.values >= (least if threshold is None else threshold)).tolist()
            if not chosen and not background:
                chosen = [int(self.values.argmax())]
        how = {"background": background, "doubted": labels is None}
        return self.fine.masks(self.labels, self.values, chosen, size, **how)

    def plot(self, image: Any = None, path: str | Path | None = None, *, top: int = 8) -> Any:
        """The best labels' maps over the image as a matplotlib figure, also written to `path` (PNG, SVG, PDF) if given.

        `image`: anything `predict` takes; by default the file this prediction was made from.
        """
        from .data.images import load_image
        from .viz import label_pictures, save

        if image is None and self.source is None:
            raise RamatchError("this prediction does not know its image; give it: plot(image)")
        figure = label_pictures(self, load_image(self.source if image is None else image), top=top)
        if path is not None:
            save(figure, path)
        return figure

    def to_pandas(self, *, top: int | None = None, threshold: float | None = None) -> DataFrame:
        """A table with a row for each label, best first; the choice and the columns are those of `to_dict`."""
        return to_pandas([self], top=top, threshold=threshold)

    def to_dict(self, *, top: int | None = None, threshold: float | None = None, maps: bool = False) -> dict[str, Any]:
        """Plain data for JSON: the chosen labels, each with `probability` (`relative` if the model is not calibrated),
        `score`, `calibrated` (whether to trust its probability) and `familiarity`; their maps if asked for."""
        tags = self.above(threshold) if threshold is not None else self.tags() if top is None else self.top(top)
        entries: list[dict[str, Any]] = [
            {
                "label": tag.label,
                "probability" if self.calibrated else "relative": round(tag.value, 4),
                "score": round(tag.score, 5),
                "calibrated": tag.trusted,
                "familiarity": None if tag.familiarity is None else round(tag.familiarity, 3),
            }
            | ({} if self.lexicon is None else {"parents": self.parents(tag.label)})
            for tag in tags[:top]
        ]
        if maps:
            for entry in entries:
                entry["map"] = self.heatmap(entry["label"]).astype(float).round(3).tolist()
        out: dict[str, Any] = {"image": self.source, "labels": entries, "calibrated": self.calibrated}
        if self.size is not None:
            out["width"], out["height"] = self.size
        if maps:
            out["grid"] = list(self.grid)
        return out


def _resized(heat: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return np.clip(np.asarray(Image.fromarray(heat).resize(size, Image.Resampling.BICUBIC)), 0, 1)


def to_pandas(
    predictions: Iterable[Prediction | Unreadable], *, top: int | None = None, threshold: float | None = None
) -> DataFrame:
    """One table of many images, a row for each label of each (see `Prediction.to_dict`); an image that could not be
    read has one row, with the reason as its `error`."""
    pandas: Any = require("pandas", extra="pandas")
    rows: list[dict[str, Any]] = []
    columns = {"image": None, "label": None}
    for found in predictions:
        if isinstance(found, Unreadable):
            rows.append(found.to_dict())
        else:
            columns["probability" if found.calibrated else "relative"] = None
            entries = found.to_dict(top=top, threshold=threshold)["labels"]
            rows += [{"image": found.source, **entry} for entry in entries]
    names = [*columns, "score", "calibrated", "familiarity"]
    return pandas.DataFrame(rows, columns=list(dict.fromkeys([*names, *(name for row in rows for name in row)])))


def short_name(source: str | None) -> str:
    """What to call an image in a line: its file's name, without the folder."""
    return printable(Path(source).name) if source else "image"
