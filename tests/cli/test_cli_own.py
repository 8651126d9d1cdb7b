"""`ramatch train --data` without a recipe, `--resume auto` without anything, and `calibrate` by name, with the model
that ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from train_tiny import squares, tiny_backbone, tiny_values, tiny_world

from ramatch.assets import photo_paths
from ramatch.modeling.checkpoints.folder import save_backbone

CPU = ("--device", "cpu")
LABELS = {"boats": "boat;lake", "coffee": "cup", "street": "person;building", "tourist": "person", "barn": "house"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of eight photographs and their labels, as a person would write it."""
    folder = tmp_path_factory.mktemp("mine")
    lines = ["image,labels"]
    for path in photo_paths()[:8]:
        with Image.open(path) as picture:
            picture.convert("RGB").resize((160, 120)).save(folder / f"{path.stem}.png")
        lines.append(f"{path.stem}.png,{LABELS.get(path.stem, 'flower')}")
    (folder / "mine.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_eight_photographs(ramatch, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = ramatch("train", "--data", photos / "mine.csv", *CPU)
    assert result.code == 0, result.err
    assert "8 images" in result.out
    assert "better on images" not in result.out
    run = Path("runs/own-data")
    assert json.loads((run / "run.json").read_text())["model"] == "ramatch-mini"
    picture = photos / "coffee.png"
    tag = ("tag", picture, "--labels", "dog,pizza", "--format", "json", "--threshold", 0, *CPU)
    assert json.loads(ramatch(*tag, "--model", run).out)[0]["labels"] == json.loads(ramatch(*tag).out)[0]["labels"]
    ramatch("train", "--data", photos / "mine.csv", *CPU).refused("already holds a run", "--resume auto")
    ramatch("train", "--resume", "auto").refused("no run to go on with", "all finished")

    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(state | {"status": "running"}))  # as if it had been killed
    again = ramatch("train", "--resume", "auto")
    assert again.code == 0, again.err
    assert again.out == result.out, "nothing has to be said twice"
    named = ramatch("train", "--out", run, "--resume", "auto")
    assert named.out == result.out


def test_train_wants_data_or_a_recipe(ramatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ramatch("train").refused("--data", "--recipe")
    ramatch("train", "--data", tmp_path / "none").refused("no such file or folder")
    ramatch("train", "--data", tmp_path, "epochs=3").refused("unknown setting 'epochs'", "folds")
    ramatch("train", "--resume", "auto").refused("no run to go on with", "--out")
    assert not (tmp_path / "runs").exists()


def test_calibrate_a_model_by_its_name(ramatch, photos, tmp_path):
    ramatch("calibrate", "ramatch-mini", "--data", photos / "mine.csv").refused("part of the installation", "--out")
    out = tmp_path / "mini"
    result = ramatch("calibrate", "ramatch-mini", "--data", photos / "mine.csv", "--out", out, "--workers", 0, *CPU)
    assert result.code == 0, result.err
    assert "images: all 8 of mine.csv" in result.out
    assert "too little data to rely on: it was fitted on 4 images" in result.out
    assert "give at least 50 that show 100" in result.out
    tag = ("tag", photos / "coffee.png", "--labels", "cup", "--format", "json", "--threshold", 0, *CPU)
    shown = [json.loads(ramatch(*tag, *of).out)[0] for of in ((), ("--model", out))]
    assert all(entry["calibrated"] for entry in shown)
    assert shown[0]["labels"] != shown[1]["labels"]
    ramatch("calibrate", "ramatch-mini", "--data", photos / "mine.csv", "--out", out).refused("not an empty folder")


def test_calibrate_a_plain_encoder(ramatch, tmp_path):
    """What is no model folder yet becomes one: its scores, with probabilities."""
    data, clip, out = squares(tmp_path / "data", train=60, test=10), tmp_path / "clip", tmp_path / "out"
    save_backbone(tiny_backbone(), clip)
    ramatch("calibrate", clip, "--data", data / "train.json").refused("not a model folder", "--out")
    result = ramatch("calibrate", clip, "--data", data / "train.json", "--out", out, "--workers", 0, *CPU)
    assert result.code == 0, result.err
    assert "images: all 60" in result.out
    assert "too little data" in result.out, "30 of them are for the report"
    picture = data / "images" / "test000.png"
    tag = ("tag", picture, "--labels", "red,blue", "--format", "json", "--threshold", 0, *CPU)
    assert json.loads(ramatch(*tag, "--model", clip).out)[0]["calibrated"] is False
    assert json.loads(ramatch(*tag, "--model", out).out)[0]["calibrated"] is True


def test_resume_alone_goes_on_with_any_recipe(ramatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_world(tmp_path)
    (tmp_path / "recipe.json").write_text(json.dumps(tiny_values(tmp_path, output="runs/tiny", epochs=1)))
    assert ramatch("train", "--recipe", "recipe.json", "optim.lr=0.002").code == 0
    state = Path("runs/tiny/run.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"status": "running"}))
    result = ramatch("train", "--resume", "auto")
    assert result.code == 0, result.err
    assert "continuing at step 4" in result.err, "where it ended, with the rate that it was given"
    assert json.loads(state.read_text())["status"] == "finished"
