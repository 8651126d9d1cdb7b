"""Masks: shares of a picture, and the forms in which they are handed on."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageDraw

from ramatch.errors import RamatchError
from ramatch.masks import Masks, box_of, decode_rle, encode_rle, outlines, palette

BLOBS = arrays(bool, st.tuples(st.integers(1, 9), st.integers(1, 9)))


def two() -> Masks:
    ids = np.zeros((6, 8), dtype=np.uint8)
    ids[1:4, 2:5], ids[4:, 6:] = 1, 2
    return Masks(("dog", "kite"), np.array([0.9, 0.6]), ids)


@given(BLOBS)
def test_rle_there_and_back(mask):
    rle = encode_rle(mask)
    assert sum(rle["counts"]) == mask.size
    assert all(rle["counts"][1:])  # only the first run may be empty
    assert np.array_equal(decode_rle(rle), mask)


def test_rle_runs_down_the_columns():
    assert encode_rle(np.array([[0, 1], [1, 1]], dtype=bool)) == {"size": [2, 2], "counts": [1, 3]}
    assert encode_rle(np.array([[1, 0], [1, 0]], dtype=bool))["counts"] == [0, 2, 2]


@given(BLOBS)
def test_polygons_cover_the_mask_and_its_holes_exactly(mask):
    drawn = Image.new("1", (4 * mask.shape[1], 4 * mask.shape[0]))
    for polygon in outlines(mask):
        points = np.array(polygon).reshape(-1, 2)
        assert len(points) >= 4
        ImageDraw.Draw(drawn).polygon([(4 * x, 4 * y) for x, y in points.tolist()], fill=1)
    covered = np.asarray(drawn)[2::4, 2::4]  # the middle of each pixel
    padded = np.pad(mask, 1)
    outside = np.zeros_like(padded)
    outside[0, 0] = True
    while True:  # all that is reached from outside without crossing the mask, corners included
        near = np.pad(outside, 1)
        windows = [near[y : y + padded.shape[0], x : x + padded.shape[1]] for y in range(3) for x in range(3)]
        grown = np.any(windows, axis=0) & ~padded
        if np.array_equal(grown, outside):
            break
        outside = grown
    sure_inside, sure_outside = mask, outside[1:-1, 1:-1]
    assert covered[sure_inside].all()
    assert not covered[sure_outside].any() or len(outlines(mask)) > 1  # parts that close a ring at their corners


def test_polygon_of_a_rectangle_and_parts():
    masks = two()
    assert outlines(masks["dog"]) == [[2, 1, 5, 1, 5, 4, 2, 4]]
    corners = np.eye(2, dtype=bool)
    assert sorted(map(len, outlines(corners))) == [8, 8]
    ring = np.ones((3, 3), dtype=bool)
    ring[1, 1] = False
    assert outlines(ring) == [[0, 0, 3, 0, 3, 3, 0, 3]]
    assert outlines(np.zeros((2, 2), dtype=bool)) == []


def test_masks_are_a_mapping_and_share_the_picture_out():
    masks = two()
    assert list(masks) == ["dog", "kite"]
    assert masks["dog"].sum() == 9
    assert masks["kite"].sum() == 4
    assert not (masks["dog"] & masks["kite"]).any()
    assert "cat" not in masks
    with pytest.raises(KeyError):
        masks["cat"]
    assert repr(masks) == "Masks(8 × 6: dog 19 %, kite 8 %)"


def test_plain_data_is_json_and_says_what_coco_says():
    found = json.loads(json.dumps(two().to_dict()))
    assert (found["width"], found["height"]) == (8, 6)
    dog, kite = found["masks"]
    assert (dog["label"], dog["value"], dog["area"], dog["box"]) == ("dog", 0.9, 9, [2, 1, 3, 3])
    assert np.array_equal(decode_rle(kite["rle"]), two()["kite"])
    assert kite["polygons"] == [[6, 4, 8, 4, 8, 6, 6, 6]]
    assert "polygons" not in two().to_dict(polygons=False)["masks"][0]
    assert box_of(np.zeros((2, 2), dtype=bool)) == [0, 0, 0, 0]


def test_png_holds_the_ids_and_the_overlay_their_colors(tmp_path):
    masks = two()
    masks.save(tmp_path / "ids.png")
    with Image.open(tmp_path / "ids.png") as picture:
        assert picture.mode == "P"
        assert np.array_equal(np.asarray(picture), masks.ids)
    assert palette()[:4].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    big = Masks(masks.names, masks.values, masks.ids.repeat(40, 0).repeat(40, 1))
    shown = np.asarray(big.overlay(Image.new("RGB", (320, 240), (100, 100, 100))))
    assert shown.shape == (240, 320, 3)
    assert shown[5, 5].tolist() == [100, 100, 100]
    red, green = shown[50, 90].astype(int), shown[170, 250].astype(int)
    assert red[0] > red[1] + 40
    assert green[1] > green[0] + 40


def test_too_many_labels_for_one_byte():
    with pytest.raises(RamatchError, match="at most 254"):
        Masks(tuple(map(str, range(255))), np.zeros(255), np.zeros((2, 2), dtype=np.uint8))
