"""Settings check themselves, say what is wrong, and survive a round trip; the lists of names are those of the code."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramatch.config import LOSSES, MATCHERS, PRESETS, TEST_SETTINGS, RAMConfig
from ramatch.errors import RamatchError
from ramatch.settings import Bound, Count, OneOf, Settings, Share, field_types, parse_overrides


@dataclass(frozen=True)
class Inner(Settings):
    section: ClassVar[str] = "inner."
    share: Share = 0.5
    below: Annotated[float, Bound(0, 1, below=True)] = 0.0


@dataclass(frozen=True)
class Outer(Settings):
    kind: Annotated[str, OneOf(("a", "b"))] = "a"
    count: Count | None = None
    where: Share | str = 0.1
    pair: tuple[float, float] = (0.0, 1.0)
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "c"}, "setting 'kind' must be one of a, b, got 'c'"),
        ({"count": 0}, "'count' must be at least 1"),
        ({"count": True}, "a whole number"),
        ({"where": 2}, r"'where' must lie in \[0, 1\]"),
        ({"pair": [1]}, "list of 2"),
        ({"inner.share": 1.5}, r"'inner.share' must lie in \[0, 1\]"),
        ({"inner.below": 1}, r"'inner.below' must lie in \[0, 1\)"),
        ({"inner.nothing": 1}, "unknown setting 'inner.nothing'; known: inner.share, inner.below"),
        ({"inner": 3}, "'inner' must be a set of named values"),
        ({"kind.x": 1}, "'kind' is a value, not a group"),
        ({"inner.share": float("nan")}, "must be a number"),
    ],
)
def test_what_is_wrong_is_said(changes, message) -> None:
    with pytest.raises(RamatchError, match=message):
        Outer().replace(**changes)


def test_overrides_are_typed_by_their_fields() -> None:
    changed = Outer().with_overrides(["kind=b", "count=none", "where=path/7", "inner.share=1e-1", "pair=[2, 3]"])
    assert changed == Outer("b", None, "path/7", (2.0, 3.0), Inner(0.1))
    with pytest.raises(RamatchError, match="must look like name=value"):
        Outer().with_overrides(["kind"])
    with pytest.raises(RamatchError, match="a name of kind, count"):
        parse_overrides(["pair=1"], ["kind", "count"])


@given(st.sampled_from(sorted(PRESETS)), st.floats(0, 1), st.sampled_from(sorted(MATCHERS)))
def test_a_round_trip_changes_nothing(name, share, matcher) -> None:
    config = PRESETS[name].replace(region_share=share, matcher=matcher)
    assert RAMConfig.from_dict(config.to_dict()) == config


def test_lists_of_names_are_those_of_the_code() -> None:
    from ramatch.modeling import losses, matching

    assert tuple(matching.MATCHERS) == tuple(MATCHERS) == get_args(field_types(RAMConfig)["matcher"])[1].names
    assert tuple(losses.LOSSES) == LOSSES
    assert set(TEST_SETTINGS) <= set(RAMConfig().to_dict())


def test_names_come_without_torch() -> None:
    code = "import sys, ramatch.config, ramatch.cli; ramatch.cli.build_parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
