"""Localization scores by hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest

from ramatch.errors import RamatchError
from ramatch.evaluation.localization import Localization, Truth, map_iou, mass_inside, pointing_game

SIZE = (80, 40)  # width, height; a 4 x 8 grid has cells of 10 x 10 pixels


def spot(row, column, shape=(4, 8)):
    heat = np.zeros(shape)
    heat[row, column] = 1.0
    return heat


def test_pointing_hits_the_box_its_cell_lies_in():
    truth = Truth(SIZE, boxes=np.array([[60, 20, 80, 40]]))
    assert pointing_game(spot(3, 7), truth, tolerance=0) == 1
    assert pointing_game(spot(2, 6), truth, tolerance=0) == 1
    assert pointing_game(spot(3, 5), truth, tolerance=0) == 0
    assert pointing_game(spot(3, 5), truth, tolerance=5) == 1  # its centre is 5 pixels to the left of the box
    assert pointing_game(spot(7, 3, (8, 4)), truth, tolerance=0) == 1  # another grid: rows are not columns


def test_any_of_several_boxes_counts():
    truth = Truth(SIZE, boxes=np.array([[0, 0, 10, 10], [70, 30, 80, 40]]))
    assert pointing_game(spot(0, 0), truth, tolerance=0) == pointing_game(spot(3, 7), truth, tolerance=0) == 1
    assert pointing_game(spot(0, 7), truth, tolerance=0) == 0


def test_a_flat_map_gets_chance():
    truth = Truth(SIZE, boxes=np.array([[0, 0, 20, 40]]))
    flat = np.full((4, 8), 0.3)
    assert pointing_game(flat, truth, tolerance=0) == pytest.approx(0.25)
    assert mass_inside(flat, truth) == pytest.approx(0.25)
    assert mass_inside(np.zeros((4, 8)), truth) == pytest.approx(0.25)


def test_mass_counts_shares_of_cells():
    truth = Truth(SIZE, boxes=np.array([[5, 0, 25, 10]]))
    heat = np.zeros((4, 8))
    heat[0, 0], heat[0, 1], heat[3, 3] = 0.5, 0.3, 0.2
    assert mass_inside(heat, truth) == pytest.approx(0.5 * 0.5 + 0.3)


@pytest.mark.parametrize("grid", [(3, 7), (40, 80), (5, 5), (90, 100)])
def test_mass_of_a_flat_map_is_area_on_any_grid(grid):
    truth = Truth(SIZE, boxes=np.array([[13, 7, 51, 30]]))
    assert mass_inside(np.ones(grid), truth) == pytest.approx(38 * 23 / (80 * 40))


def test_cells_end_between_pixels():
    heat = np.array([[1.0, 0.0, 0.0]])  # 26.67 pixels wide
    assert mass_inside(heat, Truth(SIZE, boxes=np.array([[0, 0, 27, 40]]))) == pytest.approx(1.0)
    assert mass_inside(heat, Truth(SIZE, boxes=np.array([[26, 0, 80, 40]]))) == pytest.approx(2 / 80)


def test_iou_by_hand():
    truth = Truth(SIZE, boxes=np.array([[0, 0, 40, 40]]))
    left = np.zeros((40, 80))
    left[:, :20] = 1
    assert map_iou(left, truth) == pytest.approx(0.5)
    left[:, :40] = 1
    assert map_iou(left, truth) == 1.0
    left[:, :60] = np.where(left[:, :60] > 0, 1, 0.4)
    assert map_iou(left, truth, threshold=0.5) == 1.0
    assert map_iou(left, truth, threshold=0.3) == pytest.approx(40 / 60)
    assert map_iou(np.zeros((40, 80)), truth) == 0.0
    assert map_iou(3 * left, truth) == map_iou(left, truth)  # the threshold is relative


def test_coarse_map_is_resized_to_the_image():
    truth = Truth(SIZE, boxes=np.array([[0, 0, 40, 40]]))
    half = np.array([[1.0, 0.0]])  # bilinear: crosses 0.5 at pixel 40
    assert map_iou(half, truth) == pytest.approx(1.0, abs=0.03)


def test_sums_per_class_and_overall():
    score = Localization(tolerance=0)
    box = Truth(SIZE, boxes=np.array([[0, 0, 10, 10]]))
    wide = Truth(SIZE, boxes=np.array([[0, 0, 80, 40]]))
    score.add("cat", spot(0, 0), box)
    score.add("dog", spot(3, 3), wide)
    score.add("cat", spot(1, 1), box)
    result = score.result()
    assert result["pairs"] == 3
    assert result["per_class"]["cat"]["pointing"] == 50
    assert result["per_class"]["dog"]["pointing"] == 100
    assert result["pointing"] == pytest.approx(200 / 3)
    assert result["class_pointing"] == 75
    assert result["per_class"]["cat"]["chance"] == pytest.approx(100 * 100 / 3200)
    assert result["per_class"]["cat"]["centre"] == 0
    assert result["per_class"]["dog"]["centre"] == 100
    assert "66.7" in score.to_table()
    assert score.to_table(markdown=True).startswith("|  | pointing |")
    assert Localization().result()["pointing"] == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Truth(SIZE, boxes=np.zeros((0, 4))), "x0 < x1"),
        (lambda: Truth(SIZE, boxes=np.array([[5, 5, 5, 9]])), "x0 < x1"),
        (lambda: pointing_game(np.full((2, 2), np.nan), Truth(SIZE, boxes=np.array([[0, 0, 1, 1]]))), "finite"),
        (lambda: Localization().add("a", np.ones((2, 3, 3)), Truth(SIZE, boxes=np.array([[0, 0, 1, 1]]))), r"\(h, w\)"),
    ],
)
def test_bad_calls_are_named(call, message):
    with pytest.raises(RamatchError, match=message):
        call()
