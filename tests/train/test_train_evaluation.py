"""Scores, protocols, baselines and calibration on the tiny benchmark."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from train_tiny import COLOURS, SEEN, UNSEEN, tiny_backbone, tiny_config

from ramatch.config import preset
from ramatch.data.records import read_annotations
from ramatch.errors import RamatchError
from ramatch.evaluation import evaluate_scores
from ramatch.evaluation.calibrate import Further
from ramatch.modeling.ram import RAM
from ramatch.recognizer import Recognizer
from ramatch.train import ImageCache, calibrate, collect_scores, evaluate, evaluate_all, read_test, train

QUIET = {"device": "cpu", "workers": 0, "progress": False}


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = tiny_config(
        tiny, output=str(folder), epochs=25, optim__lr=0.02, eval__every=100, augment={"enabled": False}
    )
    train(config, progress=False)
    return folder


def test_scores_are_those_of_the_recognizer(tiny: Path, run: Path) -> None:
    data = read_annotations(tiny / "data", split="test_gzsl")
    recognizer = Recognizer.from_pretrained(run / "model", device="cpu")
    found = collect_scores(recognizer.ram, data, batch_size=7, workers=0, progress=False)
    assert found.labels == SEEN + UNSEEN
    assert found.scores.shape == (40, 6)
    assert found.features.shape == (40, 6, 3)
    assert found.keys[0] == data.records[0].key
    recognizer.set_vocabulary(found.labels)
    expected = recognizer.predict([str(tiny / "data" / key) for key in found.keys[:5]])
    np.testing.assert_allclose(found.scores[:5], [p.scores for p in expected], atol=1e-5)
    cached = collect_scores(recognizer.ram, data, images=ImageCache(1), progress=False)
    np.testing.assert_allclose(cached.scores, found.scores, atol=1e-5)
    np.testing.assert_array_equal(found.targets, data.targets().numpy())


def test_collecting_leaves_the_model_as_it_was(tiny: Path) -> None:
    ram = RAM(tiny_backbone(), preset("ramatch", adapted_layers=1, saa_layers=1, prompt_layers=1)).train()
    before = {name: t.clone() for name, t in ram.adapters().items()}
    data = read_annotations(tiny / "data", split="test_zsl")
    collect_scores(ram, data, workers=0, progress=False)
    assert ram.training
    assert not ram.backbone.training
    assert all(torch.equal(t, before[name]) for name, t in ram.adapters().items()), "BatchNorm must not move"


def test_protocols_of_a_benchmark_folder(tiny: Path, run: Path) -> None:
    gzsl = evaluate(run, tiny / "data", "gzsl", **QUIET)
    zsl = evaluate(run, tiny / "data", "zsl", **QUIET)
    assert (gzsl.labels, gzsl.images) == (6, 40)
    assert zsl.labels == 2
    assert zsl.images < 40, "only images that show an unseen label"
    assert {"P@3", "R@3", "F1@3", "mAP", "mAP_seen", "mAP_unseen", "mAP_H"} <= set(gzsl.values)
    assert gzsl["mAP_seen"] > 60, "it has learned the colours it was taught"


def test_other_annotations_with_a_list_of_unseen_labels(tiny: Path, run: Path, tmp_path: Path) -> None:
    """The same test images as a CSV with class lists give the same figures."""
    rows = json.loads((tiny / "data/test_gzsl.json").read_text())
    table = tmp_path / "test.csv"
    table.write_text("path,labels\n" + "".join(f"{p},{'|'.join(labels)}\n" for p, labels in rows["images"]))
    (tmp_path / "unseen.txt").write_text("\n".join(UNSEEN))
    options = {
        **QUIET,
        "images_root": str(tiny / "data"),
        "unseen": str(tmp_path / "unseen.txt"),
        "classes": SEEN + UNSEEN,
    }
    for protocol in ("gzsl", "zsl"):
        assert evaluate(run, table, protocol, **options)["mAP"] == pytest.approx(
            evaluate(run, tiny / "data", protocol, **QUIET)["mAP"], abs=1e-3
        )
    with pytest.raises(RamatchError, match="unseen labels"):
        evaluate(run, table, "zsl", **{**options, "unseen": None})
    with pytest.raises(RamatchError, match="'zsl' or 'gzsl'"):
        read_test(table, "zero")


def test_zero_shot_baselines_from_one_pass(tiny: Path) -> None:
    reports = evaluate_all(
        tiny / "backbone", tiny / "data", "gzsl", preset=preset("ramatch", adapted_layers=1, saa_layers=1), **QUIET
    )
    assert set(reports) == {"model", "image", "region", "best"}
    backbone = tiny_backbone()
    data = read_annotations(tiny / "data", split="test_gzsl")
    with torch.no_grad():
        pixels = torch.stack([backbone.preprocess.resize(r.load()) for r in data.records])
        image, _ = backbone.encode_image(backbone.preprocess.normalize(pixels))
        text = backbone.encode_text([f"A photo of a {c}." for c in data.classes])
        scores = torch.nn.functional.normalize(image, dim=-1) @ torch.nn.functional.normalize(text, dim=-1).T
    expected = evaluate_scores(scores, data.targets(), data.classes)
    assert reports["image"]["mAP"] == pytest.approx(expected["mAP"], abs=1e-6), "plain CLIP's class token"
    assert reports["best"]["mAP"] != reports["image"]["mAP"]


def test_matcher_can_be_chosen(tiny: Path, run: Path) -> None:
    found = {m: evaluate(run, tiny / "data", matcher=m, **QUIET)["mAP"] for m in ("kcot", "average")}
    assert found["kcot"] != found["average"]
    assert evaluate(run, tiny / "data", **QUIET)["mAP"] == found["kcot"], "the model's own is back"


def test_unknown_score_and_precision(tiny: Path, run: Path) -> None:
    with pytest.raises(RamatchError, match=r"unknown score 'sum'.*best"):
        evaluate(run, tiny / "data", score="sum", **QUIET)
    with pytest.raises(RamatchError, match="precision"):
        evaluate(run, tiny / "data", precision="int8", **QUIET)


def test_calibration_uses_what_the_run_held_out(tiny: Path, run: Path) -> None:
    result = calibrate(run, tiny / "data", **QUIET)
    assert result.path == run / "model" / "calibration.json"
    assert "held out from training" in " ".join(result.notes)
    json.loads(result.path.read_text())
    for part in ("all", "seen", "unseen"):
        assert set(result.report["before"][part]) >= {"ECE", "F1@threshold"}
    assert result.report["after"]["seen"]["ECE"] < result.report["before"]["seen"]["ECE"]
    assert "ECE" in result.to_table()
    recognizer = Recognizer.from_pretrained(run / "model", device="cpu")
    assert recognizer.calibrated
    one, all_of_them = [], []
    picture = str(tiny / "data/images/test000.png")
    for labels, out in ((["red"], one), (SEEN + UNSEEN, all_of_them)):
        recognizer.set_vocabulary(labels)
        out.append(recognizer.predict(picture).probabilities[0])
    assert 0 <= one[0] <= 1
    assert 0 <= all_of_them[0] <= 1


def test_calibration_on_a_split_or_a_random_part(tiny: Path, run: Path, tmp_path: Path) -> None:
    given = calibrate(run, tiny / "data", split="test_gzsl", **QUIET)
    assert "split test_gzsl" in " ".join(given.notes)
    assert "which fitting did not get" in " ".join(given.notes), "not reported on the images it was fitted on"
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in (run / "model").iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    part = calibrate(moved, tiny / "data", share=0.5, **QUIET)
    assert "a random 50 %" in " ".join(part.notes)
    with pytest.raises(RamatchError, match="not a model folder"):
        calibrate(tiny / "backbone", tiny / "data", **QUIET)


def test_a_folder_named_as_the_shipped_model_is_calibrated_by_its_own_scores(
    tiny: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run / "model", tmp_path / "ramatch-mini")
    monkeypatch.chdir(tmp_path)
    by_name = calibrate("ramatch-mini", tiny / "data", share=0.5, **QUIET)
    assert by_name.path.resolve() == tmp_path / "ramatch-mini" / "calibration.json"
    by_path = calibrate(tmp_path / "ramatch-mini", tiny / "data", share=0.5, **QUIET)
    assert by_name.calibrator.to_dict() == by_path.calibrator.to_dict()


def test_calibration_with_known_words_other_labels_and_captions(tiny: Path, run: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in (run / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    names = [r.key for r in read_annotations(tiny / "data", split="train").records]
    only, told = names[:30], names[20:40]
    captions = {"images": [[key, [f"a {SEEN[i % 2]} square", "a photo"]] for i, key in enumerate(told)]}
    (tmp_path / "captions.json").write_text(json.dumps(captions))
    words = [f"a {first} {second} photo" for first in COLOURS for second in COLOURS] + [*COLOURS] * 3
    words += [f"photo of {first} {second}" for first in COLOURS for second in COLOURS]
    (tmp_path / "known.txt").write_text("\n".join(words))
    further = Further(
        known=str(tmp_path / "known.txt"),
        also=[str(tiny / "data")],
        captions=[str(tmp_path / "captions.json")],
        only=only,
    )
    result = calibrate(model, tiny / "data", images_root=str(tiny / "data"), further=further, **QUIET)
    said = " ".join(result.notes)
    assert "fitted on 30 images and 4 labels" in said
    assert "the 30 that were named" in said
    assert "by 78 known words" in said
    assert "30 images and 4 labels of other data" in said, "only the images that were named"
    assert "10 images and" in said, "of captions too"
    assert result.calibrator.doubt is not None
    recognizer = Recognizer.from_pretrained(model, device="cpu")
    recognizer.set_vocabulary(["red", "blue"])
    found = recognizer.predict(str(tiny / "data" / "images/test000.png"))
    assert found.familiarity is not None
    assert ((found.familiarity >= 0) & (found.familiarity <= 1)).all()
    assert (found.probabilities <= found.familiarity + 1e-6).all()
    kept = tmp_path / "kept"
    recognizer.save_pretrained(kept, with_backbone=True)
    again = Recognizer.from_pretrained(kept, device="cpu")
    again.set_vocabulary(["red", "blue"])
    same = again.predict(str(tiny / "data" / "images/test000.png"))
    np.testing.assert_allclose(same.probabilities, found.probabilities, atol=1e-4)
    plain = calibrate(model, tiny / "data", **QUIET)  # the known words stay, the doubt does not
    assert plain.calibrator.doubt is None
    assert (model / "known.safetensors").is_file()


def test_a_calibrated_model_is_ranked_by_its_probability(tiny: Path, run: Path) -> None:
    calibrator = calibrate(run, tiny / "data", **QUIET).calibrator
    recognizer = Recognizer.from_pretrained(run / "model", device="cpu")
    test = read_test(tiny / "data", "gzsl")
    found = collect_scores(recognizer.ram, test.annotations, workers=0, progress=False)
    shown = np.asarray(calibrator(found.features, found.words))
    assert not np.array_equal(np.argsort(shown), np.argsort(found.scores)), "a case where the two rankings differ"
    by_hand = evaluate_scores(shown, found.targets, found.labels, test.seen, test.unseen)
    assert evaluate(run, tiny / "data", **QUIET)["mAP"] == pytest.approx(by_hand["mAP"], abs=1e-6)
