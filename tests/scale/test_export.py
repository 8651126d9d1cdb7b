"""`ramatch export`: what it writes, run by onnxruntime, gives the model's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from ramatch.assets import photo_paths
from ramatch.cli import main
from ramatch.data.images import load_image
from ramatch.modeling.checkpoints.folder import load_ram
from ramatch.modeling.checkpoints.loading import bundled_model
from ramatch.scale.export import export_onnx

LABELS = ["boat", "lake", "traffic light", "person"]
PARITY = 1e-3


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    out = tmp_path_factory.mktemp("export") / "onnx"
    assert main(["export", "ramatch-mini", str(out), "--onnx"]) == 0
    return out


def run(folder: Path, part: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / f"{part}.onnx"), options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def text_features(folder: Path, sentences: list[str]) -> np.ndarray:
    about, tokenizer = (
        json.loads((folder / "export.json").read_text()),
        Tokenizer.from_file(str(folder / "tokenizer.json")),
    )
    tokenizer.enable_truncation(about["tokens"])
    tokenizer.enable_padding()
    batch = tokenizer.encode_batch(sentences)
    ids, mask = (np.array([getattr(e, name) for e in batch], dtype=np.int64) for name in ("ids", "attention_mask"))
    return run(folder, "text", {"ids": ids, "mask": mask})[0]


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2])
def test_onnxruntime_tags_as_torch_does(exported: Path, count: int) -> None:
    """From pictures and words to scores without any of torch's numbers, for batches that the export has not seen."""
    ram = load_ram(bundled_model("ramatch-mini"))
    about = json.loads((exported / "export.json").read_text())
    pictures = [load_image(path) for path in photo_paths()[:count]]
    size, filters = tuple(about["pixels"]["size"][::-1]), {"bicubic": 3, "bilinear": 2}
    resized = [picture.resize(size, filters[about["pixels"]["resize"]]) for picture in pictures]
    pixels = np.stack([np.asarray(picture).transpose(2, 0, 1) for picture in resized])
    words = [*LABELS, *(word for word in about["background"] if word not in LABELS)]
    each = [text_features(exported, [form.replace("{}", word) for word in words]) for form in about["templates"]]
    unit = np.mean(each, axis=0)
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    trunk = dict(zip(about["trunk"], run(exported, "image", {"pixels": pixels}), strict=True))
    region, image, best = run(exported, "match", {"unit": unit, "looked_at": unit} | trunk)

    labels = ram.encode_labels(LABELS)
    ours = ram.trunk(torch.stack([ram.preprocess.resize(picture) for picture in pictures]))
    wanted = ram.recognize(ours, labels)
    np.testing.assert_allclose(unit, labels.unit, atol=PARITY)
    for name, value in zip(about["trunk"], ours.tensors, strict=True):
        np.testing.assert_allclose(trunk[name], value, atol=PARITY, rtol=PARITY, err_msg=name)
    pairs = (region, wanted.region), (image, wanted.image), (best, wanted.best)
    for found, value in pairs:
        np.testing.assert_allclose(found[:, : len(LABELS)], value, atol=PARITY)
    score = about["score"]
    assert score["rule"] == "cosine"
    mixed = region + (best - region) * score["best_share"]
    mixed = (image + (mixed - image) * score["region_share"])[:, : len(LABELS)]
    np.testing.assert_allclose(mixed, ram.score(wanted), atol=PARITY)


def test_what_cannot_be_exported_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "out"), "--onnx"]) == 2
    assert "is not a model that ramatch wrote" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["export", "ramatch-mini", str(tmp_path / "full"), "--onnx"]) == 2
    assert "not an empty folder" in capsys.readouterr().err


def test_a_missing_exporter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(Exception, match=r"ramatch\[onnx\]"):
        export_onnx("ramatch-mini", tmp_path / "out")
    assert not (tmp_path / "out").exists()
