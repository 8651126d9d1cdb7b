"""What a study is: a YAML file with a base for each kind of backbone, variants of it, and the paper's figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from ..config import METHODS as METHOD_NAMES
from ..config import TEST_SETTINGS, RAMConfig, preset
from ..errors import RamatchError
from ..files import read_lines
from ..methods import METHODS
from ..modeling.backbone import Backbone
from ..settings import Natural, OneOf, Settings
from .config import CachedConfig, read_values

STUDIES = Path(__file__).parent / "studies"
KINDS = ("aligned", "clip")  # of backbones: an encoder of `ramatch align`, or a CLIP
FIGURES = ("none", "line", "bars", "radar", "maps")
# columns of results, and how tables head them
METRICS = {
    f"{protocol}_{key}": f"{protocol.upper()} {name}"
    for protocol in ("zsl", "gzsl")
    for key, name in (("p3", "P@3"), ("r3", "R@3"), ("f1", "F1@3"), ("f1_5", "F1@5"), ("map", "mAP"))
}
COSTS = {
    "seconds": "training, s",
    "images_per_s": "training, images/s",
    "memory_gb": "memory, GB",
    "step_images_per_s": "train step, images/s",
    "step_memory_gb": "train step, GB",
    "test_images_per_s": "test, images/s",
    "test_memory_gb": "test, GB",
}
Point = dict[str, Any]  # values by name: of the training, "ram.…" of RAM, "settings.…" of another method


@dataclass(frozen=True)
class Base(Settings):
    """What all variants change something of."""

    section: ClassVar[str] = "base."

    preset: str = "ramatch"
    ram: dict[str, Any] = field(default_factory=dict)  # fields of RAMConfig
    train: dict[str, Any] = field(default_factory=dict)  # fields of CachedConfig, dotted names inside


@dataclass(frozen=True)
class Bases(Settings):
    """One for each kind of backbone."""

    section: ClassVar[str] = "base."

    aligned: Base = field(default_factory=lambda: Base("aligned"))
    clip: Base = field(default_factory=Base)


@dataclass(frozen=True)
class Figure(Settings):
    """The study's picture."""

    section: ClassVar[str] = "figure."

    kind: Annotated[str, OneOf(FIGURES)] = "none"
    metrics: tuple[Annotated[str, OneOf((*METRICS, *COSTS))], ...] = ("zsl_f1", "gzsl_f1")
    x: str = ""  # name of the variants' `x` (line)
    variants: tuple[str, ...] = ()  # those shown (maps); none named: all


@dataclass(frozen=True)
class Variant(Settings):
    """A row of the table."""

    section: ClassVar[str] = "variants."

    name: str = ""  # as the paper prints it
    method: Annotated[str, OneOf(tuple(METHOD_NAMES))] = "ram"
    settings: dict[str, Any] = field(default_factory=dict)  # of that method
    preset: str | None = None  # instead of the base's
    ram: dict[str, Any] = field(default_factory=dict)
    aligned: dict[str, Any] = field(default_factory=dict)  # more fields of RAMConfig, on that kind of backbone alone
    clip: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    needs_text: bool = False  # has no meaning where label features are given
    grid: dict[str, Any] | tuple[dict[str, Any], ...] = ()  # see `points`; instead of the study's
    also: dict[str, Any] = field(default_factory=dict)  # more rows of the same weights: name → TEST_SETTINGS
    x: float | None = None  # where it stands in the picture
    paper: dict[str, Any] = field(default_factory=dict)  # benchmark → {column: figure}


@dataclass(frozen=True)
class Study(Settings):
    """One table of figures."""

    title: str = ""
    paper: str = ""  # what the paper calls it, and how its figures came about
    base: Bases = field(default_factory=Bases)
    columns: tuple[Annotated[str, OneOf((*METRICS, *COSTS))], ...] = ("zsl_f1", "zsl_map", "gzsl_f1", "gzsl_map")
    variants: tuple[Variant, ...] = ()
    every_method: bool = False  # those of config.METHODS that no variant names are variants too
    paper_rows: dict[str, Any] = field(default_factory=dict)  # figures by the variant's name, also of systems not here
    beside: dict[str, Any] = field(default_factory=dict)  # data set → the paper's benchmarks; all of one not named
    parts: tuple[str, ...] = ()  # a name such as "SAA + OT" is shown as marks in columns of these
    grid: dict[str, Any] | tuple[dict[str, Any], ...] = ()  # of all variants that learn
    cost: Natural = 0  # measure a step and recognizing from pixels, with so many images at once
    figure: Figure = field(default_factory=Figure)

    def check(self) -> None:
        if self.every_method:
            object.__setattr__(self, "variants", (*self.variants, *self._unnamed()))
        if not self.variants:
            raise RamatchError("a study needs 'variants'; name at least one")
        names = [name for v in self.variants for name in (v.name, *v.also)]
        if "" in names:
            raise RamatchError("a variant has no 'name'")
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise RamatchError(f"two variants are called '{twice[0]}'")
        for variant in self.variants:
            for kind in KINDS:
                try:
                    for point in (Point(), *self.points(variant)):
                        Job(self, variant, kind, point)
                except RamatchError as error:
                    raise RamatchError(f"variant '{variant.name}' on {kind}: {error}") from None
        if lost := [name for name in self.figure.variants if name not in names]:
            raise RamatchError(f"figure.variants: there is no variant '{lost[0]}'")
        _check_paper(self)
        sizes = {v.name: len(p) for v in self.variants if (p := self.points(v))}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in sizes.items())
            raise RamatchError(f"every grid needs the same number of points, for a fair choice: {told}")

    def _unnamed(self) -> Iterator[Variant]:
        known = {_plain(name): name for name in self.paper_rows}
        for method in METHOD_NAMES:
            if method not in {v.method for v in self.variants}:
                yield Variant(name=known.get(_plain(method), method), method=method)

    def points(self, variant: Variant) -> list[Point]:
        """Settings among which validation chooses: a list of them, or all combinations of values by name."""
        learns = variant.method == "ram" or METHODS[variant.method].learns
        grid = variant.grid or (self.grid if learns else ())
        if not isinstance(grid, Mapping):
            return list(grid)
        if wrong := [name for name, values in grid.items() if not isinstance(values, list) or not values]:
            raise RamatchError(f"grid: '{wrong[0]}' must be a list of values, got {grid[wrong[0]]!r}")
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []

    def printed(self, variant: Variant) -> dict[str, Any]:
        """The paper's figures of a variant: benchmark → {column: figure}."""
        return variant.paper or self.paper_rows.get(variant.name, {})


@dataclass(frozen=True)
class Job:
    """A variant on a kind of backbone, with a point of its grid and further changes of the training."""

    study: Study
    variant: Variant
    kind: str
    point: Point = field(default_factory=dict)
    changes: Point = field(default_factory=dict)  # of the training, for all variants

    def __post_init__(self) -> None:
        self.ram_config()
        self.train_config()
        if (kind := METHODS.get(self.variant.method)) is not None:
            kind.settings_type.from_dict(self.method["settings"])
        for name, changes in self.variant.also.items():
            if not isinstance(changes, Mapping):
                raise RamatchError(f"also '{name}' must be a set of named values, got {changes!r}")
            if wrong := sorted(set(changes) - set(TEST_SETTINGS)):
                raise RamatchError(f"also '{name}': '{wrong[0]}' is not of {', '.join(TEST_SETTINGS)}")
            self.ram_config().replace(**changes)

    @property
    def base(self) -> Base:
        return getattr(self.study.base, self.kind)

    @property
    def ram(self) -> Point:
        """Fields of RAMConfig that differ from the preset."""
        own = {**self.variant.ram, **getattr(self.variant, self.kind)}
        return {**self.base.ram, **own, **self._of_point("ram.")}

    @property
    def preset(self) -> str:
        return self.variant.preset or self.base.preset

    @property
    def method(self) -> Point:
        return {"name": self.variant.method, "settings": {**self.variant.settings, **self._of_point("settings.")}}

    @property
    def train(self) -> Point:
        """Fields of CachedConfig that differ from its defaults, seed aside."""
        chosen = {name: v for name, v in self.point.items() if not name.startswith(("ram.", "settings."))}
        return {**self.base.train, **self.variant.train, **chosen, **self.changes}

    def _of_point(self, prefix: str) -> Point:
        return {name.removeprefix(prefix): v for name, v in self.point.items() if name.startswith(prefix)}

    def ram_config(self) -> RAMConfig:
        return preset(self.preset, **self.ram)

    def train_config(self, seed: int = 0) -> CachedConfig:
        return CachedConfig().replace(**self.train).replace(seed=seed)

    @property
    def learns(self) -> bool:
        return self.variant.method == "ram" or METHODS[self.variant.method].learns

    @property
    def looks(self) -> bool:
        """Whether it sees training images at all."""
        return self.learns or METHODS[self.variant.method].needs_images

    @property
    def settings(self) -> Point:
        """What is set by name: two rows with the same are the same experiment."""
        found = {"preset": self.preset, "ram": self.ram, "train": self.train if self.learns else {}}
        method = self.method
        found |= {"method": method["name"], "settings": method["settings"]} if method["name"] != "ram" else {}
        return {name: value for name, value in found.items() if value}


def _check_paper(study: Study) -> None:
    """Figures are numbers in columns that are measured."""
    given = [(v.name, v.paper) for v in study.variants] + list(study.paper_rows.items())
    for name, benchmarks in given:
        for benchmark, figures in benchmarks.items():
            if not isinstance(figures, Mapping):
                raise RamatchError(f"variant '{name}': paper: '{benchmark}' must be a set of figures, got {figures!r}")
            for column, figure in figures.items():
                if column not in METRICS and column not in COSTS:
                    known = ", ".join((*METRICS, *COSTS))
                    raise RamatchError(f"variant '{name}': paper: unknown column '{column}'; known: {known}")
                if not isinstance(figure, (int, float)):
                    raise RamatchError(f"variant '{name}': paper: '{column}' must be a number, got {figure!r}")


def _plain(name: str) -> str:
    """ "DualCoOp++" and "dualcoop_pp" are one name."""
    return "".join(c for c in name.lower().replace("+", "p") if c.isalnum())


def kind_of(backbone: Backbone) -> str:
    """Which base a backbone gets: encoders of `ramatch align` pool their patches into the global feature."""
    return "aligned" if backbone.global_pool == "cls+mean" else "clip"


def list_studies() -> dict[str, str]:
    """Names of the studies in the package, each with the first line of its comment."""
    return {file.stem: read_lines(file)[0].lstrip("# ") for file in sorted(STUDIES.glob("*.yaml"))}


def load_study(name_or_path: str | Path) -> tuple[str, Study]:
    """A study of the package by name, or a YAML file: its name, and what it says."""
    path, inside = Path(name_or_path).expanduser(), STUDIES / f"{name_or_path}.yaml"
    if not path.is_file():
        if len(path.parts) > 1 or not inside.is_file():
            raise RamatchError(f"no study '{path}': give a YAML file or one of {', '.join(list_studies())}")
        path = inside
    try:
        return path.stem, Study.from_dict(read_values(path, "study"))
    except RamatchError as error:
        raise RamatchError(f"{path.name}: {str(error).removeprefix(f'{path}: ')}") from None
