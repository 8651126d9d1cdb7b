"""Predictions: ranking, thresholds, maps that lie the right way round, plain data."""

from __future__ import annotations

import dataclasses
import json
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from ramatch.errors import RamatchError
from ramatch.prediction import Prediction, Unreadable, to_pandas

LABELS = ("cat", "dog", "kite", "umbrella")


def prediction(grid: tuple[int, int] = (2, 3), *, maps: bool = True, **changes: object) -> Prediction:
    m, n = grid[0] * grid[1], len(LABELS)
    plan = np.random.default_rng(0).random((m, n)).astype(np.float32)
    values: dict = {
        "labels": LABELS,
        "values": np.array([0.5, 0.9, 0.1, 0.5]),
        "scores": np.array([1.0, 3.0, -2.0, 1.0]),
        "calibrated": True,
        "grid": grid,
        "plan": plan / plan.sum(0),
        "similarities": np.zeros((m, n)),
        "marginal": np.full(m, 1 / m),
        "source": "a.jpg",
        "size": (30, 20),
    }
    if not maps:
        values |= {"plan": None, "similarities": None, "marginal": None}
    return Prediction(**(values | changes))


def test_best_first_and_ties_in_the_order_of_the_vocabulary():
    found = prediction()
    assert [tag.label for tag in found.tags()] == ["dog", "cat", "umbrella", "kite"]
    assert found.top(2) == found.tags()[:2]
    assert found.top(2)[0] == ("dog", 0.9, 3.0, True, None, True)
    assert found.top(1)[0].probability == found.probabilities.max() == 0.9
    assert [tag.label for tag in found.above(0.5)] == ["dog", "cat", "umbrella"]  # 0.5 is enough
    assert found.above(0.95) == []
    assert len(found.top(99)) == 4


def test_a_result_is_frozen_and_checks_its_shapes():
    found = prediction()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.calibrated = False  # type: ignore[misc]
    for name, wrong in (
        ("values", np.zeros(3)),
        ("familiarity", np.zeros(5)),
        ("trust", np.zeros(5)),
        ("scores", np.zeros((1, 4))),
        ("plan", np.zeros((6, 3))),
        ("marginal", np.zeros(5)),
        ("similarities", np.zeros((4, 6))),
    ):
        with pytest.raises(ValueError, match=name):
            prediction(**{name: wrong})


@pytest.mark.parametrize("kind", ["similarity", "plan"])
@pytest.mark.parametrize("grid", [(4, 4), (3, 7), (8, 2)])
@pytest.mark.parametrize("corner", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=["nw", "ne", "sw", "se"])
def test_the_heat_stays_in_its_corner_when_resized(grid, corner, kind):
    """A region in one corner of the grid is in that corner of the image, whatever the two shapes are."""
    row, column = (0, grid[0] - 1)[corner[0]], (0, grid[1] - 1)[corner[1]]
    plan = np.full((grid[0] * grid[1], len(LABELS)), 0.01, dtype=np.float32)
    plan[row * grid[1] + column, 1] = 1.0  # row-major
    found = prediction(grid, **{"plan": plan, "similarities": plan} if kind == "similarity" else {"plan": plan})
    small = found.heatmap("dog", kind=kind)
    assert small.shape == grid
    assert small[row, column] == 1.0
    heat = found.heatmap("dog", kind=kind, size=(90, 60))
    assert heat.shape == (60, 90)
    assert 0 <= heat.min() <= heat.max() <= 1
    y, x = np.unravel_index(heat.argmax(), heat.shape)
    assert (y >= 30, x >= 45) == (bool(corner[0]), bool(corner[1]))
    # the pixel nearest to the region's centre is hot, the opposite corner is cold
    centre = int((row + 0.5) * 60 / grid[0]), int((column + 0.5) * 90 / grid[1])
    assert heat[centre] > 0.8
    assert heat[59 - centre[0], 89 - centre[1]] < 0.1
    assert found.heatmap("cat").max() == 1.0  # an even map too: the largest weight is 1


def test_two_kinds_of_map():
    similarities = np.random.default_rng(1).normal(0.2, 0.05, (6, 4)).astype(np.float32)
    found = prediction(similarities=similarities)
    plan, near = found.heatmap("dog", kind="plan"), found.heatmap("dog", kind="similarity")
    np.testing.assert_allclose(plan.ravel(), found.plan[:, 1] / found.plan[:, 1].max(), rtol=1e-5)
    assert (np.argsort(near.ravel()) == np.argsort(similarities[:, 1])).all()
    assert [near.min(), near.max()] == [0, 1]
    assert (found.heatmap("dog") == near).all()
    assert (prediction(similarities=None).heatmap("dog") == prediction().heatmap("dog", kind="plan")).all()
    with pytest.raises(RamatchError, match="unknown kind of map 'heat'"):
        found.heatmap("dog", kind="heat")


def test_a_map_needs_a_known_label_and_a_plan():
    with pytest.raises(RamatchError, match="'bird' is not in the vocabulary"):
        prediction().heatmap("bird")
    with pytest.raises(RamatchError, match="maps=True"):
        prediction(maps=False).heatmap("dog")


def test_plain_data():
    found = prediction()
    data = found.to_dict()
    assert list(data) == ["image", "labels", "calibrated", "width", "height"]
    assert (data["image"], data["width"], data["height"], data["calibrated"]) == ("a.jpg", 30, 20, True)
    first = {"label": "dog", "probability": 0.9, "score": 3.0, "calibrated": True, "familiarity": None}
    assert data["labels"][0] == first
    assert [e["label"] for e in found.to_dict(top=1)["labels"]] == ["dog"]
    assert [e["label"] for e in found.to_dict(threshold=0.4, top=2)["labels"]] == ["dog", "cat"]
    assert found.to_dict(threshold=0.99)["labels"] == []
    with_maps = json.loads(json.dumps(found.to_dict(top=1, maps=True)))
    assert with_maps["grid"] == [2, 3]
    assert np.allclose(with_maps["labels"][0]["map"], found.heatmap("dog"), atol=1e-3)
    assert "width" not in prediction(size=None).to_dict()


def test_a_word_that_was_not_learned_is_marked():
    found = prediction(familiarity=np.array([0.9, 0.4999, 0.5, 1.0]), trust=np.array([0.9, 0.4999, 0.5, 0.8]))
    assert found.trusted.tolist() == [True, False, True, True]
    assert [tag.trusted for tag in found.tags()] == [False, True, True, True]
    entry = found.to_dict(top=1)["labels"][0]
    assert (entry["label"], entry["calibrated"], entry["familiarity"]) == ("dog", False, 0.5)
    assert "dog 0.90?, cat 0.50, umbrella 0.50, of" in repr(found)
    assert found.to_dict()["calibrated"]  # the model is


def test_a_relative_score_is_never_called_a_probability():
    found = prediction(calibrated=False, familiarity=np.ones(4))
    with pytest.raises(RamatchError, match=r"not calibrated.*ramatch calibrate"):
        _ = found.probabilities
    with pytest.raises(RamatchError, match="relative score"):
        _ = found.top(1)[0].probability
    assert found.top(1)[0].value == 0.9
    assert [tag.label for tag in found.above(0.5)] == ["dog", "cat", "umbrella"]
    assert not found.trusted.any()
    data = found.to_dict()
    assert "probability" not in json.dumps(data)
    assert data["labels"][0]["relative"] == 0.9
    assert not any(entry["calibrated"] for entry in data["labels"])
    assert repr(found).endswith("relative scores, not calibrated)")


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    photo = Image.new("RGB", (30, 20), (90, 120, 60))
    photo.save(tmp_path / "a.png")
    found = prediction(source=str(tmp_path / "a.png"))
    figure = found.plot(photo, tmp_path / "maps.png", top=2)
    assert Image.open(tmp_path / "maps.png").size[0] > 200
    assert figure.get_size_inches()[0] > 1
    found.plot(path=str(tmp_path / "maps.svg"))  # the image is found by its name
    assert "<svg" in (tmp_path / "maps.svg").read_text()[:1000]
    with pytest.raises(RamatchError, match="plot\\(image\\)"):
        prediction(source=None).plot()


def test_a_result_shows_its_best_labels_in_one_line():
    shown = repr(prediction())
    assert shown.startswith(f"Prediction(a.jpg: {LABELS[1]} 0.90, ")
    assert shown.endswith(f"of {len(LABELS)} labels)")
    assert "\n" not in shown
    assert repr(prediction(source=None)).startswith("Prediction(image: ")


def test_a_tag_is_short_and_an_unreadable_image_is_false():
    found = prediction(trust=np.array([0.9, 0.1, 0.5, 0.8]), source="far/away/a.jpg")
    assert repr(found.top(2)) == "[Tag(dog 0.90?), Tag(cat 0.50)]"
    assert repr(found).startswith("Prediction(a.jpg: dog 0.90?, ")
    assert "\x1b" not in repr(prediction(source="a\x1b[31m.jpg", labels=("\x1b[1m", "dog", "kite", "red")))
    lost = Unreadable("far/b.jpg", "no such file")
    assert repr(lost) == "Unreadable(b.jpg: no such file)"
    assert list(filter(None, [found, lost])) == [found]
    assert lost.to_dict() == {"image": "far/b.jpg", "error": "no such file"}


def test_tables_for_pandas():
    pytest.importorskip("pandas")
    found = prediction()
    table = found.to_pandas(top=2)
    assert list(table.columns) == ["image", "label", "probability", "score", "calibrated", "familiarity"]
    assert table[["label", "probability"]].values.tolist() == [["dog", 0.9], ["cat", 0.5]]
    assert len(found.to_pandas()) == len(LABELS)
    assert found.to_pandas(threshold=0.95).empty
    both = to_pandas([found, Unreadable("b.jpg", "no such file"), prediction(source="c.jpg")], threshold=0.6)
    assert both["image"].tolist() == ["a.jpg", "b.jpg", "c.jpg"]
    assert both["error"].tolist()[1] == "no such file"
    assert both["label"].isna().tolist() == [False, True, False]
    assert "relative" in prediction(calibrated=False).to_pandas().columns
    assert "probability" not in prediction(calibrated=False).to_pandas().columns
    assert list(to_pandas([]).columns) == ["image", "label", "score", "calibrated", "familiarity"]


def test_without_pandas_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RamatchError, match=r"pip install 'ramatch\[pandas\]'"):
        prediction().to_pandas()


class Cells(HTMLParser):
    """Tags and texts of a notebook's output."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.names: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.texts += filter(None, [data.strip()])


def test_a_notebook_shows_the_picture_and_bars(tmp_path):
    Image.new("RGB", (900, 600), (90, 120, 60)).save(tmp_path / "a.png")
    shown = Cells(prediction(source=str(tmp_path / "a.png"))._repr_html_())
    [image] = shown.images
    assert image["width"] == "224"
    assert image["src"].startswith("data:image/jpeg;base64,")
    assert shown.texts[:4] == ["a.png", "dog", "█" * 18, "0.90"]
    assert str(tmp_path) not in prediction(source=str(tmp_path / "a.png"))._repr_html_(), "the folder stays private"
    gone = Cells(prediction(source="gone.png", calibrated=False)._repr_html_())
    assert gone.images == []
    assert "not calibrated" in gone.texts[-1]
    assert "dog" in gone.texts
    assert Cells(prediction(source=None)._repr_html_()).texts[0] == "image"


def test_hostile_names_stay_text_in_a_notebook():
    evil = '"><script>alert(1)</script>'
    shown = Cells(prediction(labels=(evil, "dog", "kite", "<b>"), source=evil + ".jpg")._repr_html_())
    assert shown.names == {"table", "tr", "th", "td", "p"}
    assert evil in shown.texts
