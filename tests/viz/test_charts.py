"""Charts of studies: what is drawn is what was given."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramatch.errors import RamatchError
from ramatch.viz import chart, save

pytest.importorskip("matplotlib")


def test_lines_stand_at_their_places():
    [axes] = chart("line", ["0", "0.05", "0.2"], {"ours": [1.0, None, 3.0]}, "Title", "λ2").axes
    [line] = axes.lines
    assert list(zip(*line.get_data(), strict=True)) == [(0.0, 1.0), (0.2, 3.0)]
    assert (axes.get_title(), axes.get_xlabel()) == ("Title", "λ2")


def test_bars_have_their_heights_and_a_radar_closes():
    [axes] = chart("bars", ["a", "b"], {"zsl": [50.0, 52.0], "gzsl": [60.0, None]}).axes
    assert [bar.get_height() for bar in axes.patches] == [50.0, 52.0, 60.0]
    [axes] = chart("radar", ["a x", "b x", "c x"], {"ours": [1.0, 2.0, 3.0]}).axes
    assert list(axes.lines[0].get_ydata()) == [1.0, 2.0, 3.0, 1.0]


@pytest.mark.parametrize("kind", ["line", "bars", "radar"])
def test_files(kind: str, tmp_path: Path):
    figure = chart(kind, ["1", "2", "3"], {"a": [1.0, 2.0, 3.0], "b": [2.0, 2.5, 1.0]})
    assert save(figure, tmp_path / "chart.svg").read_text(encoding="utf-8").count("<svg") == 1


def test_what_cannot_be_drawn_is_said():
    for wrong, words in (
        (("pie", ["a"], {"x": [1.0]}), "no chart of kind 'pie'"),
        (("line", [], {}), "nothing to draw"),
        (("radar", ["a", "b"], {"x": [1.0, 2.0]}), "three places"),
    ):
        with pytest.raises(RamatchError, match=words):
            chart(*wrong)
