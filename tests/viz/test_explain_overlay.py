"""Heat over an image, without matplotlib."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from explain_helpers import make_prediction, saturation
from PIL import Image

from ramatch.errors import RamatchError
from ramatch.viz import label_pictures, overlay
from ramatch.viz.overlay import HEAT, INK, upsample


@pytest.mark.parametrize(("row", "column"), [(0, 0), (2, 5), (5, 7), (3, 1)])
def test_heat_lands_on_its_cell_and_nowhere_else(image, row, column):
    heat = np.zeros((6, 8))
    heat[row, column] = 0.01  # the scale of the weights does not matter
    picture = overlay(image, heat)
    assert picture.size == image.size
    colour = saturation(picture)
    y, x = np.unravel_index(colour.argmax(), colour.shape)
    assert row * 20 <= y < (row + 1) * 20
    assert column * 20 <= x < (column + 1) * 20
    rows, columns = np.mgrid[:120, :160]
    far = (abs(rows - (row * 20 + 10)) > 45) | (abs(columns - (column * 20 + 10)) > 45)
    assert colour[far].max() <= 2


def test_opacity_grows_with_the_weight(image):
    heat = np.array([[0.0, 0.25, 0.5, 1.0]])
    change = np.asarray(overlay(image, heat), dtype=float) - np.asarray(overlay(image, 0 * heat), dtype=float)
    levels = [abs(change[:, x]).sum() for x in (5, 60, 100, 150)]
    assert levels[0] == 0
    assert levels == sorted(levels)


def test_vmax_puts_maps_on_one_scale(image):
    weak = np.array([[0.0, 0.1]])
    assert np.array_equal(overlay(image, weak), overlay(image, 10 * weak))
    assert saturation(overlay(image, weak, vmax=1.0)).max() < saturation(overlay(image, weak)).max() / 2


def test_upsampling_stays_in_range():
    heat = np.random.default_rng(0).random((7, 7)) > 0.5
    big = upsample(heat, (50, 30))
    assert big.shape == (30, 50)
    assert (big.min(), big.max()) == (0.0, 1.0)


def test_ramps_are_perceptual():
    for ramp, sign in ((HEAT, 1), (INK, -1)):
        linear = np.where(ramp / 255 <= 0.04045, ramp / 255 / 12.92, ((ramp / 255 + 0.055) / 1.055) ** 2.4)
        luminance = linear @ np.array([0.2126, 0.7152, 0.0722])
        assert (sign * np.diff(luminance) > -2e-3).all()  # up to rounding to 8 bits
        assert abs(luminance[-1] - luminance[0]) > 0.6


def test_grey_and_transparent_images_and_bad_maps(image):
    for mode in ("L", "RGBA", "P"):
        assert overlay(image.convert(mode), np.eye(3)).mode == "RGB"
    with pytest.raises(RamatchError, match="finite"):
        overlay(image, np.array([[np.nan, 1.0]]))
    assert np.isfinite(np.asarray(overlay(Image.new("RGB", (1, 1)), np.zeros((1, 1))))).all()


def test_only_the_figures_need_matplotlib(image, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    overlay(image, np.eye(3))
    with pytest.raises(RamatchError, match=r"ramatch\[explain\]"):
        label_pictures(make_prediction(["a"], {}), image)
