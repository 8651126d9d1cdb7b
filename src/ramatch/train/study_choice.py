"""Settings chosen on validation: which points of a grid are run, and which of them is best."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from ..errors import RamatchError
from ..files import read_json, write_json
from .study_rows import Row
from .study_spec import Point, Study, Variant

if TYPE_CHECKING:
    from .study import Options, Planned

SUFFIX = "-validation"  # of the study's name, in rows of validation
VALIDATION = 0.1  # share of the training images without held-out labels
RULE = "the largest mean of GZSL mAP and GZSL F1@3 on validation, over its seeds; of equals the first"


@dataclass
class Choices:
    """Points by (study, data, backbone, variant)."""

    found: dict[tuple[str, ...], Point] = field(default_factory=dict)
    where: str = "the choices"

    @classmethod
    def read(cls, path: str | Path) -> Choices:
        try:
            entries = read_json(path)["choices"]
            found: dict[tuple[str, ...], Point] = {_key(entry): dict(entry["settings"]) for entry in entries}
        except (KeyError, TypeError, ValueError) as error:
            raise RamatchError(
                f"{path}: not a file of chosen settings; `ramatch study --validate` writes one"
            ) from error
        return cls(found, str(path))

    def get(self, where: tuple[str, str, str], variant: str) -> Point | None:
        """`where`: study, data, backbone."""
        return self.found.get((*where, variant))


def with_points(study: Study, variant: Variant, options: Options, where: tuple[str, str, str]) -> list[Point]:
    """The points of a variant's grid that are to be run: all on validation; the chosen one, if there is one; or the
    settings as they are."""
    points = study.points(variant)
    if options.validate:
        return points
    if points and options.choices is not None:
        chosen = options.choices.get(where, variant.name)
        return [] if chosen is None else [chosen]
    return [{}]


def choose(planned: Sequence[Planned], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The best point of each variant whose points have all been measured, with what it was chosen among."""
    there, by_variant = {row["row"]: row for row in rows}, defaultdict(dict)  # type: ignore[var-annotated]
    for one in planned:
        [name] = one.rows.values()
        key = json.dumps(one.job.point, sort_keys=True)
        by_variant[one.job.variant.name, one.data].setdefault(key, []).append(there.get(name))
    found = []
    for (variant, data), points in by_variant.items():
        if any(row is None for measured in points.values() for row in measured):
            continue
        scores = {p: mean(map(_score, measured)) for p, measured in points.items()}
        best = max(scores, key=scores.__getitem__)
        row = next(iter(points.values()))[0]
        entry = {"study": row["table"].removesuffix(SUFFIX), "data": data, "backbone": row["backbone"]}
        entry |= {"variant": variant}
        entry |= {"settings": json.loads(best), "score": round(scores[best], 2)}
        entry |= {"among": [{"settings": json.loads(p), "score": round(s, 2)} for p, s in scores.items()]}
        found.append(entry)
    return found


def _score(row: Row) -> float:
    return (float(row["gzsl_map"]) + float(row["gzsl_f1"])) / 2


def write_choices(path: str | Path, entries: Sequence[dict[str, Any]]) -> None:
    """Into the file, in place of older choices of the same."""
    path = Path(path)
    before = read_json(path)["choices"] if path.exists() else []
    new = set(map(_key, entries))
    write_json(path, {"rule": RULE, "choices": [*(e for e in before if _key(e) not in new), *entries]})


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    return entry["study"], entry["data"], entry["backbone"], entry["variant"]
