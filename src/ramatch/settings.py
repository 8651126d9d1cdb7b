"""Settings as frozen dataclasses that check themselves: type, bounds and choices stand in each field's annotation.

    @dataclass(frozen=True)
    class Example(Settings):
        matcher: Annotated[str, OneOf(MATCHERS)] = "kcot"
        region_share: Share = 0.5

One way to set anything: in Python by keyword, in YAML and JSON through `from_dict`, on the command line as `name=value`
through `with_overrides`; dotted names reach inside. Our own, because pydantic would be a dependency of the core for a
page of code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from .errors import RamatchError

if typing.TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Bound:
    """A number from `low` to `high`; `above`: greater than `low`, `below`: less than `high`."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def complaint(self, value: Any) -> str | None:
        low = value > self.low if self.above else value >= self.low
        high = value < self.high if self.below else value <= self.high
        if low and high:
            return None
        if self.high < math.inf:
            brackets = "(" if self.above else "[", ")" if self.below else "]"
            return f"must lie in {brackets[0]}{self.low:g}, {self.high:g}{brackets[1]}"
        if self.low == 0:
            return "must be positive" if self.above else "must not be negative"
        return f"must be {'greater than' if self.above else 'at least'} {self.low:g}"


@dataclass(frozen=True)
class OneOf:
    """One of these names."""

    names: tuple[str, ...]

    def complaint(self, value: Any) -> str | None:
        return None if value in self.names else f"must be one of {', '.join(self.names)}"


Share = Annotated[float, Bound(0, 1)]
Positive = Annotated[float, Bound(0, above=True)]
NotNegative = Annotated[float, Bound(0)]
Natural = Annotated[int, Bound(0)]
Count = Annotated[int, Bound(1)]
Span = tuple[Positive, Positive]  # low and high


class Settings:
    """Base of every group of settings. `section` is how errors call the group, "optim." say."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():  # type: ignore[arg-type]
            object.__setattr__(self, name, convert(getattr(self, name), kind, self.section + name))
        self.check()

    def check(self) -> None:
        """What concerns several fields at once; raises `RamatchError`."""

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """From nested plain data; an unknown name is an error that lists the known ones."""
        if not isinstance(values, Mapping):
            group = cls.section.rstrip(".") or "settings"
            raise RamatchError(f"'{group}' must be a set of named values, got {values!r}")
        known = field_types(cls)  # type: ignore[arg-type]
        for name in values:
            if name not in known:
                listed = ", ".join(cls.section + n for n in known)
                raise RamatchError(f"unknown setting '{cls.section}{name}'; known: {listed}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested data, for YAML and JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[call-overload]

    def replace(self, **changes: Any) -> Self:
        """A copy with settings changed; dotted names reach inside: replace(**{"optim.lr": 1e-4})."""
        values = self.to_dict()
        for name, value in changes.items():
            set_name(values, name, value)
        return self.from_dict(values)

    def with_overrides(self, texts: Iterable[str]) -> Self:
        """A copy with `name=value` texts applied."""
        return self.replace(**parse_overrides(texts))


def parse_overrides(texts: Iterable[str], known: Iterable[str] | None = None) -> dict[str, Any]:
    """Values by name from texts such as "optim.lr=1e-4". `known`: the names that are allowed, if not all."""
    allowed, found = None if known is None else list(known), {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise RamatchError(f"override '{text}' must look like name=value, for example optim.lr=1e-4")
        if allowed is not None and name.strip() not in allowed:
            raise RamatchError(f"'{text}': expected name=value with a name of {', '.join(allowed)}")
        found[name.strip()] = parse_value(value.strip())
    return found


def parse_value(text: str) -> Any:
    """A value from the command line: JSON where it parses, None for `none` and `null`, else the text itself."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def set_name(values: dict[str, Any], dotted: str, value: Any) -> None:
    """values["a"]["b"] = value for "a.b"; missing levels are made, and found unknown by `from_dict`."""
    *path, last = dotted.split(".")
    for part in path:
        inner = values.setdefault(part, {})
        if not isinstance(inner, dict):
            raise RamatchError(f"'{dotted}': '{part}' is a value, not a group of settings")
        values = inner
    values[last] = value


@functools.cache
def field_types(cls: Any) -> dict[str, Any]:
    """Name → annotation of each field of a dataclass."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def dotted_names(cls: type) -> list[str]:
    """Names of all settings, with those inside: "epochs", "optim.lr", …"""
    out = []
    for name, kind in field_types(cls).items():
        inner = isinstance(kind, type) and issubclass(kind, Settings)
        out += [f"{name}.{n}" for n in dotted_names(kind)] if inner else [name]
    return out


def convert(value: Any, kind: Any, name: str) -> Any:
    """The value as its field's type ("5e-6", text to YAML, becomes a number), checked against bounds and choices."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        value = convert(value, args[0], name)
        for rule in args[1:]:
            if complaint := rule.complaint(value):
                raise RamatchError(f"setting '{name}' {complaint}, got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, args, name)
    if origin is tuple:
        return _convert_tuple(value, args, name)
    if isinstance(kind, type) and issubclass(kind, Settings):
        return value if isinstance(value, kind) else kind.from_dict(value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise RamatchError(f"setting '{name}' must be a set of named values, got {value!r}")
        return dict(value)
    return _convert_plain(value, kind, name)


def _convert_plain(value: Any, kind: type, name: str) -> Any:
    if kind is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not math.isnan(number := float(value)):
                return number
        raise RamatchError(f"setting '{name}' must be a number, got {value!r}")
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # a folder called 7
    if kind is str and value is None:
        return "none"  # augment.crop=none, prompts=none: a word here, and nothing where a setting may be empty
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "a whole number", bool: "true or false", str: "text", float: "a number"}
        raise RamatchError(f"setting '{name}' must be {words[kind]}, got {value!r}")
    return value


def _convert_union(value: Any, kinds: tuple[Any, ...], name: str) -> Any:
    """The first of the kinds that takes the value; numbers before text, so that "0.05" is one."""
    if value is None and type(None) in kinds:
        return None
    kinds = tuple(sorted((k for k in kinds if k is not type(None)), key=lambda k: k is str))
    if len(kinds) > 1 and not isinstance(value, str):
        kinds = tuple(k for k in kinds if k is not str)  # a number out of bounds is not a name
    errors = []
    for kind in kinds:
        try:
            return convert(value, kind, name)
        except RamatchError as error:
            errors.append(error)
    raise errors[0]


def _convert_tuple(value: Any, kinds: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    many = kinds[-1] is Ellipsis
    if not isinstance(value, (list, tuple)) or not (many or len(value) == len(kinds)):
        raise RamatchError(f"setting '{name}' must be a list{'' if many else f' of {len(kinds)}'}, got {value!r}")
    return tuple(convert(v, kinds[0] if many else kinds[i], name) for i, v in enumerate(value))
