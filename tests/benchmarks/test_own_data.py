"""The bench of what a model learns of few images, on a tiny model and pictures of squares."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from train_tiny import squares, tiny_backbone

from benchmarks.own_data import measure
from ramatch.config import preset
from ramatch.data.records import read_annotations
from ramatch.evaluation.calibration import Calibrator
from ramatch.evaluation.models import FEATURES, collect_scores, evaluate
from ramatch.modeling.ram import RAM
from ramatch.recognizer import Recognizer


def test_rows_of_a_set(tmp_path: Path) -> None:
    squares(tmp_path / "squares", train=60, test=30)
    ram = RAM(tiny_backbone(), preset("aligned-best", adapted_layers=1, max_iter=20)).eval()
    found = collect_scores(ram, read_annotations(tmp_path / "squares", split="train"), workers=0, progress=False)
    calibrator = Calibrator.fit(found.features, found.targets, names=FEATURES)
    Recognizer(ram, calibrator=calibrator).save_pretrained(tmp_path / "model", with_backbone=True)
    asked = argparse.Namespace(model=str(tmp_path / "model"), images=40, seeds=[0, 1], test_images=None)
    before, *taught = measure("squares", tmp_path, asked)
    report = evaluate(tmp_path / "model", tmp_path / "squares", "gzsl", workers=0, device="cpu", progress=False)
    assert before["mAP"] == pytest.approx(report["mAP"], abs=0.01), "the model as it was, as eval finds it"
    assert [row["seed"] for row in taught] == [0, 1]
    assert {row["images"] for row in taught} == {40}
    assert min(row["mAP_seen"] for row in taught) > before["mAP_seen"]
    some = measure("squares", tmp_path, argparse.Namespace(**{**vars(asked), "seeds": [], "test_images": 7}))
    assert [row["test_images"] for row in some] == [7]
