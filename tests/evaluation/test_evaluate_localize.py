"""Localization of a model on data with boxes: the right maps meet the right boxes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import tiny_ram

from ramatch.errors import RamatchError
from ramatch.evaluation.localization import Truth, localize, map_iou, mass_inside, pointing_game
from ramatch.recognizer import Recognizer

BOXES = {"cat": [(0, 0, 30, 20), (30, 20, 60, 40)], "kite": [(45, 0, 60, 12)]}  # of a picture of 60 × 40


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Recognizer(tiny_ram()).save_pretrained(tmp_path / "model", with_backbone=True)
    return tmp_path / "model"


def put_coco(folder: Path, pictures: int = 3, *, declared: tuple[int, int] = (60, 40), extra: tuple = ()) -> Path:
    folder.mkdir()
    names, images, annotations = ["cat", "dog", "kite"], [], []
    for i in range(pictures):
        noise = np.random.default_rng(i).integers(0, 256, (4, 6, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((60, 40)).save(folder / f"{i}.png")
        images.append({"id": i, "file_name": f"{i}.png", "width": declared[0], "height": declared[1]})
        for label, boxes in BOXES.items():
            for x0, y0, x1, y1 in boxes:
                sx, sy = declared[0] / 60, declared[1] / 40
                box = [x0 * sx, y0 * sy, (x1 - x0) * sx, (y1 - y0) * sy]
                annotations.append({"image_id": i, "category_id": names.index(label), "bbox": box})
    categories = [{"id": i, "name": name} for i, name in enumerate(names)]
    for number, entry in enumerate([*annotations, *extra]):
        entry["id"] = number
    content = {"images": images, "categories": categories, "annotations": [*annotations, *extra]}
    (folder / "instances.json").write_text(json.dumps(content))
    return folder / "instances.json"


@pytest.mark.parametrize("kind", ["similarity", "plan"])
def test_maps_of_the_labels_present_against_their_boxes(model, tmp_path, kind):
    data = put_coco(tmp_path / "data")
    found = localize(model, data, device="cpu", batch_size=2, kind=kind).result()
    recognizer = Recognizer.from_pretrained(model, device="cpu")
    recognizer.set_vocabulary(["cat", "dog", "kite"])
    expected: dict[str, list] = {"cat": [], "kite": []}
    for i in range(3):
        prediction = recognizer.predict(tmp_path / "data" / f"{i}.png", maps=True)
        for label, boxes in BOXES.items():
            heat, truth = prediction.heatmap(label, kind=kind), Truth((60, 40), boxes=np.array(boxes))
            expected[label].append([pointing_game(heat, truth), mass_inside(heat, truth), map_iou(heat, truth)])
    assert found["pairs"] == 6
    for label, numbers in expected.items():
        mean = 100 * np.mean(numbers, axis=0)
        ours = [found["per_class"][label][key] for key in ("pointing", "mass", "IoU")]
        np.testing.assert_allclose(ours, mean, rtol=1e-4)
    both = [*expected["cat"], *expected["kite"]]
    assert found["mass"] == pytest.approx(100 * np.mean(both, axis=0)[1], rel=1e-4)
    assert found["per_class"]["cat"]["chance"] == pytest.approx(50)
    other = localize(model, data, device="cpu", matcher="average", kind="plan").result()
    assert other["per_class"]["cat"]["mass"] == pytest.approx(50)  # an even map gets what chance gets
    assert found["per_class"]["cat"]["mass"] != pytest.approx(50, abs=0.1)


def test_boxes_are_in_the_annotated_size_not_in_that_of_the_file(model, tmp_path):
    """Resized images: everything is measured in relative terms."""
    found = localize(model, put_coco(tmp_path / "a"), device="cpu").result()
    scaled = localize(model, put_coco(tmp_path / "b", declared=(600, 400)), device="cpu").result()
    for label in BOXES:
        assert scaled["per_class"][label]["mass"] == pytest.approx(found["per_class"][label]["mass"], rel=1e-3)
        assert scaled["per_class"][label]["chance"] == pytest.approx(found["per_class"][label]["chance"], rel=1e-3)


def test_crowds_and_empty_boxes_are_left_out(model, tmp_path, capsys):
    extra = (
        {"image_id": 0, "category_id": 1, "bbox": [0, 0, 30, 30], "iscrowd": 1},
        {"image_id": 1, "category_id": 1, "bbox": [3, 3, 0, 9]},
        {"image_id": 1, "category_id": 0, "bbox": [3, 3, 9, 0]},
    )
    found = localize(model, put_coco(tmp_path / "a", extra=extra), device="cpu", progress=True).result()
    plain = localize(model, put_coco(tmp_path / "b"), device="cpu").result()
    assert found == plain
    assert "localizing 3/3" in capsys.readouterr().err


def test_data_without_boxes(model, tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.json").write_text(json.dumps({"classes": ["cat"], "images": [["a.png", ["cat"]]]}))
    loads: list[int] = []
    monkeypatch.setattr(Recognizer, "__init__", lambda *a, **k: loads.append(1))
    with pytest.raises(RamatchError, match="no image has boxes"):
        localize(model, tmp_path / "a.json", device="cpu")
    assert loads == []  # said before the model is loaded
