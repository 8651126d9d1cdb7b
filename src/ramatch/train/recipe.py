"""Recipes: training configs as YAML, one per experiment a person would want to run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import RamatchError, require
from ..files import read_text
from .config import TrainConfig


def list_recipes() -> dict[str, str]:
    """Names of the recipes in the package, each with the first line of its comment."""
    found = {}
    for file in sorted(_folder().glob("*.yaml")):
        first = file.read_text(encoding="utf-8").split("\n", 1)[0]
        found[file.stem] = first.lstrip("# ").rstrip()
    return found


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """A recipe of the package by name, or a YAML (or JSON) file, with overrides like "optim.lr=1e-4" applied on top.

    A value is read as JSON where it can be (`true`, `null`, `3`, `["a", "b"]`), else as text.
    """
    return TrainConfig.from_dict(_read(_find(name_or_path))).with_overrides(overrides)


def dump_config(config: TrainConfig) -> str:
    """YAML of the whole config. Without PyYAML it is written as JSON, which YAML readers take too."""
    try:
        import yaml
    except ImportError:
        return json.dumps(config.to_dict(), indent=2, ensure_ascii=False) + "\n"
    return yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)


def _folder() -> Path:
    return Path(__file__).parent / "recipes"


def _find(name: str | Path) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    inside = _folder() / f"{name}.yaml"
    if len(Path(name).parts) == 1 and inside.is_file():
        return inside
    raise RamatchError(f"no recipe '{name}': give a YAML file or one of {', '.join(list_recipes())}")


def _read(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        values = json.loads(text)
    except ValueError:
        yaml = require("yaml", "train")
        try:
            values = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # dates and numbers that cannot be, deep nesting
            raise RamatchError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise RamatchError(f"{path}: a recipe is a set of named values, this is a {type(values).__name__}")
    return values
