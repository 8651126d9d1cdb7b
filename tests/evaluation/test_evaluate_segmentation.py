"""Segmentation: confusions by hand, and a model's masks against masks of classes."""

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

from ramatch.data.masks import read_masks
from ramatch.errors import RamatchError
from ramatch.evaluation.segmentation import Confusion, plain, segment
from ramatch.recognizer import Recognizer

NAMES = ["cat", "dog", "kite"]


def put_data(folder: Path, pictures: int = 4) -> Path:
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(pictures):
        noise = np.random.default_rng(i).integers(0, 256, (4, 6, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((60, 40)).save(folder / "images" / f"{i}.png")
        mask = np.zeros((40, 60), dtype=np.uint8)
        mask[:20], mask[30:, :30], mask[25:30] = 5, 9, 255
        Image.fromarray(mask).save(folder / "masks" / f"{i}.png")
    content = {"classes": NAMES, "images": [[f"images/{i}.png", ["cat", "kite"]] for i in range(pictures)]}
    content |= {"mask_values": {"background": 0, "cat": 5, "kite": 9}, "void": 255}
    (folder / "labels.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Recognizer(tiny_ram()).save_pretrained(tmp_path / "model", with_backbone=True)
    return tmp_path / "model"


def test_confusion_by_hand():
    found = Confusion(("cat", "dog"))
    found.add(np.array([[1, 1, 0], [2, 0, 0]]), np.array([[1, 1, 1], [0, 0, -1]]))
    assert found.iou() == {"background": pytest.approx(100 / 3), "cat": pytest.approx(200 / 3)}  # no dog in the truth
    assert found.mean_iou == pytest.approx(50)
    assert Confusion(("cat",)).mean_iou == 0
    with pytest.raises(RamatchError, match="against a truth"):
        found.add(np.zeros((2, 2), dtype=int), np.zeros((2, 3), dtype=int))


def test_truth_is_read_by_what_the_values_mean(tmp_path):
    images = read_masks(put_data(tmp_path / "data"))
    truth = images.truth(images.annotations.records[0])
    assert truth.shape == (40, 60)
    assert truth[0, 0] == 1
    assert truth[39, 0] == 3
    assert truth[39, 59] == 0
    assert truth[26, 0] == -1


def test_data_without_masks_or_with_strange_values(tmp_path):
    data = put_data(tmp_path / "data")
    with pytest.raises(RamatchError, match="needs a JSON file"):
        read_masks(tmp_path)
    content = json.loads((data / "labels.json").read_text())
    (data / "labels.json").write_text(json.dumps(content | {"mask_values": {"bear": 3}}))
    with pytest.raises(RamatchError, match="'bear'"):
        read_masks(data)
    (data / "labels.json").write_text(json.dumps(content))
    (data / "masks" / "1.png").unlink()
    images = read_masks(data)
    with pytest.raises(RamatchError, match=r"no mask masks/1\.png"):
        images.truth(images.annotations.records[1])


@pytest.mark.parametrize("kind", ["fine", "similarity", "plan"])
def test_masks_of_a_model_against_those_of_the_data(model, tmp_path, kind):
    data = put_data(tmp_path / "data")
    report = segment(model, data, kind=kind, batch_size=3, device="cpu")
    recognizer = Recognizer.from_pretrained(model, device="cpu")
    recognizer.set_vocabulary(NAMES)
    expected = Confusion(tuple(NAMES))
    images = read_masks(data)
    for record in images.annotations.records:
        prediction = recognizer.predict(record.load(), maps=True, masks=True)
        masks = (prediction if kind == "fine" else plain(prediction, kind)).masks(size=(60, 40))
        ids = np.zeros((40, 60), dtype=int)
        for label, mask in masks.items():
            ids[mask] = 1 + NAMES.index(label)
        expected.add(ids, images.truth(record))
    assert np.array_equal(report.ways["background"].counts, expected.counts)
    assert report.ways["labels given"].counts[:, 2].sum() == 0  # dog was not among the labels given
    assert report.ways["all labels"].counts[0].sum() == 0  # nothing of the background counts
    assert report.to_dict()["images"] == 4
    assert "labels given" in report.to_table()


def test_halves_share_the_images_out(model, tmp_path):
    data = put_data(tmp_path / "data", 5)
    halves = [segment(model, data, part=part, kind="similarity", device="cpu") for part in ("val", "test", "all")]
    assert halves[0].images + halves[1].images == halves[2].images == 5
    both = halves[0].ways["background"].counts + halves[1].ways["background"].counts
    assert np.array_equal(both, halves[2].ways["background"].counts)
    with pytest.raises(RamatchError, match="unknown part"):
        segment(model, data, part="train", device="cpu")
