"""train, eval, calibrate, align and adapt, end to end on tiny data."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from align_helpers import put_squares, tiny_towers
from sklearn.metrics import average_precision_score
from train_tiny import COLOURS, UNSEEN, squares, tiny_backbone, tiny_values

from ramatch.config import preset
from ramatch.modeling.checkpoints.folder import save_backbone
from ramatch.modeling.ram import RAM
from ramatch.recognizer import Recognizer

CPU = ("--device", "cpu", "--workers", 0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data/` as plain files, `tars/` in the form of the shared benchmarks, `backbone/` and an untrained `model/`."""
    root = tmp_path_factory.mktemp("world")
    squares(root / "data", train=60, test=30)
    (root / "tars").mkdir()
    for split in ("train", "test_gzsl", "test_zsl"):
        shutil.copy(root / "data" / f"{split}.json", root / "tars")
    for part in ("train", "test"):
        with tarfile.open(root / "tars" / f"{part}-00.tar", "w") as archive:
            for file in sorted((root / "data" / "images").glob(f"{part}*.png")):
                archive.add(file, f"images/{file.name}")
    save_backbone(tiny_backbone(), root / "backbone")
    torch.manual_seed(0)
    config = preset("ramatch", adapted_layers=1, saa_layers=1, prompt_layers=1, visual_prompts=2, prompt_tokens=2)
    Recognizer(RAM(tiny_backbone(), config)).save_pretrained(root / "model", with_backbone=True)
    return root


@pytest.fixture
def model(world: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world / "model", tmp_path / "model"))


# ----------------------------------------------------------------------------------------------------------- eval


@pytest.mark.parametrize("protocol", ["zsl", "gzsl"])
def test_eval_of_a_folder_with_tars(ramatch, world, tmp_path, protocol):
    options = ("--model", world / "model", "--protocol", protocol, *CPU)
    result = ramatch("eval", "--data", world / "tars", "--json", tmp_path / "r.json", *options)
    assert (result.code, result.err) == (0, "")
    report = json.loads((tmp_path / "r.json").read_text())
    labels = UNSEEN if protocol == "zsl" else tuple(COLOURS)
    rows = json.loads((world / "tars" / f"test_{protocol}.json").read_text())["images"]
    assert (report["images"], report["labels"], report["protocol"]) == (len(rows), len(labels), protocol)
    for key in ("P@3", "R@3", "F1@3", "P@5", "R@5", "F1@5", "mAP"):
        assert 0 <= report[key] <= 100
        assert f"{report[key]:.1f}" in result.out  # the same figures in the table

    recognizer = Recognizer.from_pretrained(world / "model", device="cpu")
    recognizer.set_vocabulary(labels)
    scores = np.stack([p.scores for p in recognizer.predict([world / "data" / path for path, _ in rows])])
    truth = np.array([[label in shown for label in labels] for _, shown in rows])
    k = min(3, len(labels))
    top = np.argsort(-scores, axis=1)[:, :k]
    hits = np.take_along_axis(truth, top, axis=1).sum()
    assert report["P@3"] == pytest.approx(100 * hits / (k * len(rows)), abs=1e-6)
    assert report["R@3"] == pytest.approx(100 * hits / truth.sum(), abs=1e-6)
    expected = np.mean([average_precision_score(truth[:, j], scores[:, j]) for j in range(len(labels))])
    assert report["mAP"] == pytest.approx(100 * expected, abs=1e-3)
    plain = ramatch("eval", "--data", world / "data", *options)
    assert plain.out == result.out  # files and tars are one


def test_eval_of_the_parts_and_with_another_matcher(ramatch, world, tmp_path):
    options = ("--model", world / "model", "--data", world / "tars", *CPU)
    result = ramatch("eval", *options, "--all-scores", "--json", tmp_path / "all.json", "--markdown")
    assert result.code == 0
    assert result.out.count("| Method |") == 4
    for name in ("GZSL image", "GZSL region", "GZSL best"):
        assert name in result.out
    report = json.loads((tmp_path / "all.json").read_text())
    assert set(report["scores"]) == {"model", "image", "region", "best"}
    assert report["scores"]["model"]["mAP"] == report["mAP"]
    assert report["scores"]["image"]["mAP"] != report["mAP"]
    ramatch("eval", *options, "--matcher", "average", "--json", tmp_path / "average.json")
    assert json.loads((tmp_path / "average.json").read_text())["mAP"] != report["mAP"]


def test_eval_with_other_settings_of_the_score(ramatch, world, tmp_path):
    """The parts of the score, asked for by name, are the parts that --all-scores prints; the model keeps its own."""
    options = ("--model", world / "model", "--data", world / "tars", *CPU)

    def measured(*settings):
        assert ramatch("eval", *options, "--all-scores", "--json", tmp_path / "r.json", *settings).code == 0
        return {name: values["mAP"] for name, values in json.loads((tmp_path / "r.json").read_text())["scores"].items()}

    own = measured()
    assert measured("score=cosine", "region_share=0")["model"] == own["image"]
    assert measured("score=cosine", "region_share=1", "best_share=0")["model"] == own["region"]
    assert measured("score=cosine", "region_share=1", "best_share=1")["model"] == own["best"]
    assert measured() == own
    ramatch("eval", *options, "tss=false").refused("tss=false", "region_share")
    ramatch("eval", *options, "best_share=2").refused("best_share", "[0, 1]")
    ramatch("eval", *options, "region_share=half").refused("region_share", "a number", "half")
    ramatch("eval", *options, "--localise", "score=cosine").refused("score=cosine", "--matcher")


def test_eval_of_a_plain_table_with_named_unseen_labels(ramatch, world, tmp_path):
    rows = json.loads((world / "data" / "test_gzsl.json").read_text())["images"]
    with (tmp_path / "test.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "labels"])
        writer.writerows([world / "data" / path, ";".join(shown)] for path, shown in rows)
    (tmp_path / "unseen.txt").write_text("\n".join(UNSEEN))
    options = ("eval", "--model", world / "model", "--data", tmp_path / "test.csv", *CPU)
    ramatch(*options).refused("none of its", "images_root")  # tables are not followed out of their folder
    options = (*options, "--images-root", world / "data")
    result = ramatch(*options, "--protocol", "zsl", "--unseen", tmp_path / "unseen.txt", "--json", tmp_path / "r.json")
    assert result.code == 0
    assert json.loads((tmp_path / "r.json").read_text())["labels"] == len(UNSEEN)
    ramatch(*options, "--protocol", "zsl").refused("zsl needs to know the unseen labels")


def test_eval_refuses(ramatch, world, tmp_path):
    model = ("--model", world / "model")
    ramatch("eval", *model, "--data", tmp_path / "none").refused("no such")
    ramatch("eval", *model, "--data", world / "data", "--protocol", "all").refused("all", "gzsl")
    ramatch("eval", "--model", world / "backbone", "--data", world / "data", "--preset", "best").refused(
        "preset 'best'"
    )
    shutil.copytree(world / "data", tmp_path / "data")
    (tmp_path / "data" / "images" / "test003.png").write_bytes(b"broken")
    ramatch("eval", *model, "--data", tmp_path / "data", *CPU).refused("test003.png", "ramatch data check")


# ------------------------------------------------------------------------------------------------------- localise


def test_eval_localise_on_coco_instances(ramatch, world, tmp_path):
    """Boxes of the coloured squares; crowds and boxes without area do not count."""
    from PIL import Image

    Image.fromarray(np.full((40, 40, 3), 100, np.uint8)).save(tmp_path / "a.png")
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 40, "height": 40}],
        "categories": [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}, {"id": 3, "name": "green"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 40, 40]},
            {"id": 2, "image_id": 1, "category_id": 2, "bbox": [0, 0, 40, 20]},
            {"id": 3, "image_id": 1, "category_id": 2, "bbox": [5, 5, 0, 3]},
            {"id": 4, "image_id": 1, "category_id": 3, "bbox": [0, 0, 9, 9], "iscrowd": 1},
        ],
    }
    (tmp_path / "instances_val.json").write_text(json.dumps(content))
    options = ("eval", "--localise", "--model", world / "model", "--device", "cpu")
    result = ramatch(*options, "--data", tmp_path / "instances_val.json", "--json", tmp_path / "r.json")
    assert (result.code, result.err) == (0, "")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["pairs"] == 2
    assert set(report["per_class"]) == {"red", "blue"}
    assert [report["per_class"]["red"][key] for key in ("pointing", "mass")] == pytest.approx([100, 100])
    assert report["per_class"]["blue"]["chance"] == pytest.approx(50)
    assert "pointing" in result.out
    ramatch(*options, "--data", world / "data" / "train.json").refused("no image has boxes", "COCO")


# ------------------------------------------------------------------------------------------------ train, calibrate


@pytest.fixture(scope="module")
def recipe(world: Path) -> Path:
    (world / "recipe.json").write_text(json.dumps(tiny_values(world, output="unset")))
    return world / "recipe.json"


def test_train_then_calibrate_then_tag(ramatch, world, recipe, tmp_path):
    run = tmp_path / "run"
    result = ramatch("train", "epochs=1", "--recipe", recipe, "--out", run, "optim.lr=0.002", "log_every=1")
    assert result.code == 0, result.err
    assert f"{run}: 3 steps" in result.out
    config = (run / "config.yaml").read_text()
    assert "lr: 0.002" in config
    assert "epochs: 1" in config
    assert (run / "model" / "ram.safetensors").is_file()
    assert len([line for line in (run / "log.jsonl").read_text().splitlines() if '"step"' in line.split(",")[0]]) == 3
    ramatch("train", "--recipe", recipe, "--out", run).refused("already holds a run", "--resume auto")
    result = ramatch(
        "train", "--recipe", recipe, "--out", run, "--resume", "auto", "epochs=1", "optim.lr=0.002", "log_every=1"
    )
    assert result.code == 0, result.err

    image = world / "data" / "images" / "test000.png"
    tag = ("tag", image, "--labels", ",".join(COLOURS), "--format", "json", "--device", "cpu", "--threshold", 0)
    before = ramatch(*tag, "--model", run)
    assert "not calibrated" in before.err
    entry = json.loads(before.out)[0]
    assert entry["calibrated"] is False
    assert sum(e["relative"] for e in entry["labels"]) == pytest.approx(1, abs=1e-3)
    result = ramatch("calibrate", run, "--data", world / "tars", *CPU)
    assert result.code == 0, result.err
    assert "images: the 12 that this model's run held out from training" in result.out
    assert "ECE" in result.out
    after = ramatch(*tag, "--model", run)
    assert after.err == ""
    entry = json.loads(after.out)[0]
    assert entry["calibrated"] is True
    probabilities = {e["label"]: e["probability"] for e in entry["labels"]}
    assert abs(sum(probabilities.values()) - 1) > 0.01  # no longer shares of one
    one = json.loads(ramatch(*tag[:3], "red", *tag[4:], "--model", run).out)[0]["labels"]
    assert one[0]["probability"] < 1  # a label alone is not certain


def test_train_refuses(ramatch, recipe, tmp_path):
    out = ("--out", tmp_path / "run")
    ramatch("train", "--recipe", recipe, *out, "optim.speed=3").refused("unknown setting 'optim.speed'")
    ramatch("train", "--recipe", recipe, *out, "epochs=many").refused("'epochs' must be a whole number")
    ramatch("train", "--recipe", recipe, *out, "fast").refused("name=value")
    ramatch("train", "--recipe", "nowhere", *out).refused("no recipe 'nowhere'", "coco-ov")
    ramatch("train", "--recipe", recipe, *out, "--data", tmp_path / "none").refused("no such")
    ramatch("train", "--recipe", recipe, *out, "--resume", tmp_path / "x.pt").refused("no such checkpoint")
    assert not (tmp_path / "run").exists()


def test_recipes_are_listed(ramatch):
    result = ramatch("train", "--recipe", "list")
    assert result.code == 0
    names = [line.split()[0] for line in result.out.splitlines()]
    assert {"coco", "coco-ov", "coco-ov-smoke", "nus-wide", "peta-ov", "rap", "ucm-ov"} <= set(names)


def test_calibrate_refuses_what_is_no_model(ramatch, world, model, tmp_path):
    ramatch("calibrate", world / "data", "--data", world / "data").refused("not a model folder")
    ramatch("calibrate", model, "--data", tmp_path / "none").refused("no such")
    result = ramatch("calibrate", model, "--data", world / "data", "--split", "train", *CPU)
    assert result.code == 0, result.err
    assert "images: split train" in result.out
    fitted = Recognizer.from_pretrained(model, device="cpu").calibrator
    assert fitted is not None
    assert fitted.feature_names == ("image", "region", "best")


# --------------------------------------------------------------------------------------------------- align, adapt


def test_align_then_adapt_then_tag(ramatch, tmp_path):
    vision, text = tiny_towers(tmp_path)
    data = put_squares(tmp_path / "data", 30)
    aligned, mini = tmp_path / "aligned", tmp_path / "mini"
    result = ramatch(
        "align",
        "epochs=2",
        "vision_layers=1",
        "--vision",
        vision,
        "--text",
        text,
        "--captions",
        data,
        "--out",
        aligned,
        "--test",
        6,
        "--device",
        "cpu",
        "image_size=32",
        "dim=16",
        "batch_size=12",
        "min_images=3",
        "views=1",
        "ignore_above=0.9999",
    )
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["images"] == 24
    assert "image→text R@1" in report["retrieval"]
    assert [json.loads(line)["epoch"] for line in result.err.splitlines()[-2:]] == [1, 2]
    ramatch("align", "--vision", vision, "--text", text, "--captions", data, "--out", aligned).refused("not an empty")
    ramatch(
        "align",
        "--vision",
        text,
        "--text",
        text,
        "--captions",
        data,
        "--out",
        tmp_path / "new",
        "--device",
        "cpu",
        "min_images=1",
    ).refused("has no vision tower")

    (tmp_path / "skip.txt").write_text("images/000.png\nimages/007.png\n")
    (tmp_path / "background.txt").write_text("square\nphoto\n")
    shape = ("adapted_layers=1", "saa_layers=1", "prompt_layers=1", "visual_prompts=2", "prompt_tokens=2")
    fixed = ("--captions", data / "captions.json", "--data", data / "labels.json", "--device", "cpu")
    result = ramatch(
        "adapt",
        "--backbone",
        aligned,
        "--out",
        mini,
        *fixed,
        "--exclude",
        tmp_path / "skip.txt",
        "--views",
        2,
        "--min-images",
        3,
        "--max-tags",
        8,
        "--background",
        tmp_path / "background.txt",
        "epochs=2",
        "optim.lr=0.001",
        "lexicon=none",
        *shape,
    )
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert (report["images"], report["excluded"], report["labelled"], report["background"]) == (28, 2, 14, 2)
    assert 0 < report["tags"] < 8  # eight were mined, some are labels already
    written = json.loads((mini / "adapt.json").read_text())
    assert written["settings"]["optim"]["lr"] == 0.001
    assert (written["settings"]["focus"], written["settings"]["omitted"]) == (1.0, 1.0)
    assert written["settings"]["ram"]["visual_prompts"] == 2
    shutil.rmtree(aligned)  # the folder stands alone
    found = ramatch(
        "tag",
        data / "images",
        "--labels",
        "red,blue,square",
        "--model",
        mini,
        "--device",
        "cpu",
        "--format",
        "csv",
        "--top",
        1,
    )
    assert found.code == 0, found.err
    assert len(list(csv.DictReader(io.StringIO(found.out)))) == 30
    ramatch("adapt", "--backbone", mini, "--out", mini, *fixed).refused("not an empty folder")
    ramatch("adapt", "--backbone", mini, "--out", tmp_path / "new", *fixed, "speed=1").refused("speed=1", "epochs")
    ramatch("adapt", "--backbone", mini, "--out", tmp_path / "new", *fixed, "--exclude", "none.txt").refused("none.txt")
    ramatch("adapt", "--backbone", mini, "--out", tmp_path / "new", *fixed, "--omitted=-1").refused("omitted", "-1")
    ramatch("adapt", "--backbone", mini, "--out", tmp_path / "new").refused("--captions")
    assert not (tmp_path / "new").exists()
