"""The pictures: right sizes, heat where the plan says, the right rows marked, nothing overlapping, files that parse."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from explain_helpers import make_prediction, saturation
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle
from PIL import Image

from ramatch.config import MATCHERS
from ramatch.errors import RamatchError
from ramatch.masks import FineScores
from ramatch.viz import (
    _sheet,
    compare_matchers,
    explanation,
    label_pictures,
    plan_picture,
    save,
)

SPOTS = {"kite": (1, 6), "dog": (4, 2), "person": (3, 4)}


def vocabulary(n):
    return [*SPOTS, *(f"other label {i}" for i in range(n - 3))]


def photos(figure):
    """The raster images on a figure that are photographs (three channels), in the order drawn."""
    arrays = [artist.get_array() for axes in figure.axes for artist in axes.images]
    return [np.asarray(array) for array in arrays if array.ndim == 3]


def texts(figure):
    return [text.get_text() for text in figure.texts]


def hottest_cell(picture, grid):
    colour = saturation(picture)
    y, x = np.unravel_index(colour.argmax(), colour.shape)
    return int(y * grid[0] // colour.shape[0]), int(x * grid[1] // colour.shape[1])


def test_label_pictures_show_each_label_where_its_weights_are(image):
    prediction = make_prediction(vocabulary(12), SPOTS)
    figure = label_pictures(prediction, image, top=5)
    original, *maps = photos(figure)
    assert len(maps) == 5
    assert np.array_equal(original, np.asarray(image))
    assert [hottest_cell(m, prediction.grid) for m in maps[:3]] == list(SPOTS.values())
    assert [t for t in texts(figure) if t in SPOTS] == list(SPOTS)
    assert "0.95" in texts(figure)
    named = label_pictures(prediction, image, labels=["person", "kite"])
    assert [hottest_cell(m, prediction.grid) for m in photos(named)[1:]] == [SPOTS["person"], SPOTS["kite"]]


def test_flat_maps_do_not_glow_and_improbable_ones_glow_less(image):
    prediction = make_prediction(["here", "maybe", "nowhere"], {"here": (2, 2), "maybe": (2, 2)})
    prediction.values[1] = prediction.scores[1] = 0.05
    prediction.values[2] = prediction.scores[2] = 0.01
    here, maybe, nowhere = (saturation(p).max() for p in photos(label_pictures(prediction, image))[1:])
    assert nowhere < 0.3 * here
    assert maybe < 0.9 * here
    raw = replace(prediction, calibrated=False)  # uncalibrated numbers say nothing about presence
    here, maybe, _ = (saturation(p).max() for p in photos(label_pictures(raw, image))[1:])
    assert maybe == pytest.approx(here, rel=0.05)


def test_the_marginal_is_drawn_hot_where_it_is(image):
    prediction = make_prediction(["a", "b"], {})
    marginal = np.ones(48)
    marginal[2 * 8 + 7] = 60
    figure = explanation(replace(prediction, marginal=marginal / marginal.sum()), image)
    assert hottest_cell(photos(figure)[1], (6, 8)) == (2, 7)  # the first photograph is the image
    assert "region marginal ũ" in texts(figure)


@pytest.mark.parametrize("size", [3, 20, 300])
@pytest.mark.parametrize("by_score", [True, False])
def test_plan_picture_marks_the_true_rows(size, by_score):
    labels = vocabulary(size)[::-1]
    prediction = make_prediction(labels, SPOTS)
    truth = ["dog", "person"]
    figure = plan_picture(prediction, truth=truth, by_score=by_score)
    axes = figure.axes[1]  # the first is the colour scale
    shown = np.asarray(axes.images[0].get_array())
    boxes = [patch for patch in axes.patches if (patch.get_gid() or "").startswith("marked-")]
    assert sorted(labels[int(box.get_gid().split("-")[1])] for box in boxes) == truth
    pixels = _render(figure)
    for box in boxes:
        column = int(box.get_gid().split("-")[1])
        row = round(box.get_y() + 0.5)
        np.testing.assert_allclose(shown[row], prediction.plan[:, column] * 48)
        x, y = axes.transData.transform((24.2, row - 0.5))  # the middle of the box's upper edge
        red, green, blue = (
            pixels[pixels.shape[0] - round(y) - 2 : pixels.shape[0] - round(y) + 2, round(x)].astype(int).T
        )
        assert (green - np.maximum(red, blue)).max() > 40
        name = next(t for t in figure.texts if t.get_text() == labels[column])
        assert to_hex(name.get_color()) == _sheet.GREEN  # as above, where a true label's bar is
        _, middle = figure.transFigure.transform(name.get_position())
        assert middle == pytest.approx(axes.transData.transform((0, row))[1], abs=1.5)
    if by_score:
        np.testing.assert_allclose(shown[0], prediction.plan[:, labels.index("kite")] * 48)


def test_plan_picture_of_many_labels_names_the_best_and_keeps_the_rest():
    prediction = make_prediction(vocabulary(300), SPOTS)
    worst = prediction.labels[int(prediction.scores.argmin())]
    figure = plan_picture(prediction, truth=[worst])
    names = [t for t in texts(figure) if t in prediction.labels]
    assert len(names) == 24
    assert worst in names
    assert "276 more labels" in texts(figure)
    shapes = [np.asarray(axes.images[0].get_array()).shape for axes in figure.axes if axes.images]
    assert (24, 48) in shapes
    assert (276, 48) in shapes
    assert len([t for t in texts(plan_picture(make_prediction(vocabulary(40), SPOTS))) if t in vocabulary(40)]) == 40


def test_without_truth_the_top_labels_are_marked():
    figure = plan_picture(make_prediction(vocabulary(9), SPOTS), top=2)
    marked = [t.get_text() for t in figure.texts if t.get_fontweight() == "bold"]
    assert marked == ["kite", "dog"]


def test_what_is_marked_without_truth_is_in_the_color_of_its_bars():
    figure = plan_picture(make_prediction(vocabulary(9), SPOTS), top=2)
    assert {to_hex(t.get_color()) for t in figure.texts if t.get_fontweight() == "bold"} == {_sheet.BLUE}


def test_where_a_label_is_stands_above_where_it_won(image):
    prediction = make_prediction(vocabulary(5), SPOTS)
    scores = np.zeros((12, 16, 5), dtype=np.float32)
    scores[1, 14, prediction.labels.index("dog")] = 1
    figure = explanation(replace(prediction, fine=FineScores(scores)), image, labels=["dog"])
    is_there, won = photos(figure)[2:4]  # after the image and its marginal
    assert hottest_cell(is_there, (12, 16)) == (1, 14)
    assert hottest_cell(won, (6, 8)) == SPOTS["dog"]
    assert {"Where each label is", "Where each label won"} <= set(texts(figure))
    assert "Where each label is" not in texts(explanation(prediction, image))


def matchers(size=12):
    good = make_prediction(vocabulary(size), SPOTS)
    wrong = make_prediction(vocabulary(size), {"kite": (1, 6), "other label 2": (0, 0), "person": (3, 4)}, seed=1)
    return {"reweight": replace(wrong, marginal=None), "kcot": good}


def test_comparison_has_green_and_red_cells(image):
    figure = compare_matchers(matchers(), image, truth=list(SPOTS))
    cells = [to_hex(p.get_facecolor()) for p in figure.findobj(Rectangle)]
    cells = [cell for cell in cells if cell in (_sheet.GREEN_CELL, _sheet.RED_CELL, _sheet.PLAIN_CELL)]
    green, red = _sheet.GREEN_CELL, _sheet.RED_CELL
    assert cells == [green, red, green, green, green, green]
    assert {MATCHERS["reweight"], MATCHERS["kcot"], "other label 2", "dog"} <= set(texts(figure))
    assert len(photos(figure)) == 2
    plain = compare_matchers(matchers(), image)
    assert not [p for p in plain.findobj(Rectangle) if to_hex(p.get_facecolor()) in (green, red)]


@pytest.mark.parametrize("size", [3, 20, 300])
def test_texts_are_legible_and_do_not_overlap(image, size):
    prediction = make_prediction(vocabulary(size), SPOTS)
    pair = matchers(max(size, 6))
    figures = [
        explanation(prediction, image, truth=["dog"], matchers=pair),
        plan_picture(prediction),
        compare_matchers(pair, image, truth=["kite"]),
        label_pictures(prediction, image),
    ]
    for figure in figures:
        renderer = figure.canvas.get_renderer() if hasattr(figure.canvas, "get_renderer") else _agg(figure)
        boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in figure.texts]
        width, height = figure.get_size_inches() * figure.dpi
        assert min(t.get_fontsize() for t in figure.texts) >= 7
        for text, box in boxes:
            assert 0 <= box.x0 < box.x1 <= width, text
            assert 0 <= box.y0 < box.y1 <= height, text
        for (a, one), (b, two) in itertools.combinations(boxes, 2):
            overlap = min(one.x1, two.x1) - max(one.x0, two.x0), min(one.y1, two.y1) - max(one.y0, two.y0)
            assert min(overlap) < 3, (a, b)  # up to 3 pixels of 160 an inch: ascenders and descenders


def test_long_and_odd_labels_are_cut_not_interpreted(image):
    labels = ["a label so long that no column of any picture could hold it in one line", "US$5 and $6", "x" * 200]
    prediction = make_prediction(labels, {labels[1]: (1, 1)})
    figure = explanation(prediction, image, title=labels[2])
    assert any(t.startswith("a label so") and t.endswith("…") for t in texts(figure))
    assert "US$5 and $6" in texts(figure)
    assert all(len(t) < 150 for t in texts(figure))
    _render(figure)


@pytest.mark.parametrize("grid", [(1, 1), (16, 8)])
def test_one_label_one_region_and_tall_images(grid):
    tall = Image.new("RGB", (48, 96), "grey")
    prediction = make_prediction(["hat"], {"hat": (0, 0)}, grid=grid)
    assert np.isfinite(_render(explanation(prediction, tall, matchers={"ot": prediction}))).all()


def test_images_are_turned_upright_and_kept_small(image):
    big = image.resize((3000, 1500))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    big.info["exif"] = exif.tobytes()
    big.getexif()[0x0112] = 6
    original = photos(label_pictures(make_prediction(["a"], {}), big))[0]
    assert original.shape == (960, 480, 3)


def test_files(tmp_path, image):
    prediction = make_prediction(vocabulary(5), SPOTS)
    path = save(explanation(prediction, image, truth=["dog"]), tmp_path / "new" / "page.png", dpi=50)
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.width == 12 * 50
        assert picture.height > picture.width
    figure = plan_picture(prediction, truth=["dog"])
    save(figure, tmp_path / "plan.png", dpi=40)
    with Image.open(tmp_path / "plan.png") as picture:
        assert picture.size == tuple(int(inches * 40) for inches in figure.get_size_inches())
    save(figure, tmp_path / "plan.svg")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    ids = [element.get("id") for element in root.iter()]
    assert "marked-1" in ids
    assert "marked-0" not in ids
    assert float(root.get("width").removesuffix("pt")) == pytest.approx(11 * 72)
    with pytest.raises(RamatchError, match=r"\.png, \.svg or \.pdf"):
        save(figure, tmp_path / "plan.bmp")


def test_pyplot_is_not_touched(image, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would fail
    _render(explanation(make_prediction(vocabulary(4), SPOTS), image))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda p, i: label_pictures(replace(p, plan=None), i), "maps=True"),
        (lambda p, i: plan_picture(replace(p, plan=None)), "maps=True"),
        (lambda p, i: explanation(replace(p, marginal=None), i), "marginal"),
        (lambda p, i: label_pictures(p, i, labels=["zebra"]), "'zebra' is not in the vocabulary"),
        (lambda p, i: label_pictures(p, i, labels=[]), "no label to draw"),
        (lambda p, i: plan_picture(p, truth=["zebra"]), "true label 'zebra'"),
        (lambda p, i: plan_picture(make_prediction([], {})), "vocabulary is empty"),
        (lambda p, i: compare_matchers({}, i), "no prediction"),
        (lambda p, i: compare_matchers({"a": p, "b": make_prediction(["x"], {})}, i), "other labels"),
    ],
)
def test_bad_calls_are_named(image, draw, message):
    with pytest.raises(RamatchError, match=message):
        draw(make_prediction(vocabulary(4), SPOTS), image)


def _agg(figure):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return FigureCanvasAgg(figure).get_renderer()


def _render(figure):
    """(H, W, 3) pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
