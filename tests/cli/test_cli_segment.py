"""segment, and eval with masks."""

from __future__ import annotations

import json

import numpy as np
from PIL import Image

from ramatch.masks import decode_rle


def test_segment_writes_masks_to_use_and_to_look_at(ramatch, model, photos, tmp_path):
    out = tmp_path / "new" / "masks"
    arguments = ("--labels", "cat, dog", "--model", model, "--device", "cpu", "--threshold", 0, "--no-background")
    result = ramatch("segment", photos / "img1.png", *arguments, "--out", out)
    assert (result.code, result.err) == (0, "")
    names = ["img1-masks.png", "img1-masks.json", "img1-overlay.png"]
    assert result.out.splitlines()[-3:] == [str(out / name) for name in names]
    found = json.loads((out / names[1]).read_text())
    with (
        Image.open(photos / "img1.png") as photo,
        Image.open(out / names[0]) as ids,
        Image.open(out / names[2]) as shown,
    ):
        assert ids.size == shown.size == photo.size == (found["width"], found["height"])
        pixels = np.asarray(ids)
    assert {mask["label"] for mask in found["masks"]} <= {"cat", "dog"}
    for mask in found["masks"]:
        assert np.array_equal(decode_rle(mask["rle"]), pixels == mask["id"])
        assert mask["area"] == (pixels == mask["id"]).sum()
    assert (pixels > 0).all()


def test_labels_that_nothing_shows_are_said(ramatch, model, photos, tmp_path):
    arguments = ("--labels", "cat, dog", "--model", model, "--device", "cpu", "--threshold", 1)
    result = ramatch("segment", photos / "img1.png", *arguments, "--out", tmp_path)
    assert result.code == 0
    assert "no label has a pixel" in result.err
    assert json.loads((tmp_path / "img1-masks.json").read_text())["masks"] == []


def test_eval_of_masks(ramatch, model, tmp_path):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    Image.effect_noise((48, 40), 50).convert("RGB").save(tmp_path / "images" / "a.png")
    Image.new("L", (48, 40), 1).save(tmp_path / "masks" / "a.png")
    content = {"classes": ["cat", "dog"], "images": [["images/a.png", ["cat"]]], "mask_values": {"cat": 1, "dog": 2}}
    (tmp_path / "labels.json").write_text(json.dumps(content))
    options = ("--model", model, "--data", tmp_path, "--device", "cpu", "--json", tmp_path / "out.json")
    result = ramatch("eval", "--segment", *options)
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["images"] == 1
    assert found["labels given"]["mIoU"] == 100  # the one label that is there gets every pixel
    assert "all labels" in result.out
    ramatch("eval", "--segment", *options, "--map", "both").refused("similarity, plan or fine")
    ramatch("eval", "--segment", "--model", model, "--data", tmp_path / "masks").refused("no masks", "mask_values")
