"""explain, serve, bench ot, data, import-authors, help and version."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import LABELS
from PIL import Image

import ramatch
from ramatch.cli import build_parser
from ramatch.serve.settings import ServeSettings

# ------------------------------------------------------------------------------------------------ help, version


def verbs(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every verb and every action of a verb."""
    found = [path] if path else []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found += verbs(inner, (*path, name))
    return found


VERBS = verbs(build_parser())


def test_all_verbs_are_there():
    assert {" ".join(v) for v in VERBS} >= {
        "tag",
        "explain",
        "serve",
        "train",
        "eval",
        "calibrate",
        "align",
        "adapt",
        "data check",
        "data prepare",
        "import-authors",
        "study",
    }


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_of_every_verb(ramatch, verb):
    result = ramatch(*verb, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"usage: ramatch {' '.join(verb)}")


def test_help_and_version(ramatch):
    result = ramatch("--help")
    assert result.code == 0
    for verb in VERBS:
        assert f"\n    {verb[0]}" in result.out
    assert "examples:" in result.out
    assert ramatch("--version").out == f"ramatch {ramatch_version()}\n"


def ramatch_version() -> str:
    return ramatch.__version__


def test_words_that_are_no_verb_are_refused_in_one_line(ramatch):
    ramatch().refused("VERB")
    ramatch("tagg", "a.jpg").refused("tagg", "tag")
    ramatch("data").refused("ACTION")
    ramatch("eval").refused("--data")
    ramatch("data", "check", "x", "--foo").refused("--foo")
    ramatch("data", "check", "x", "a=1").refused("'data' does not know 'a=1'")


def test_the_command_line_answers_for_help_without_loading_torch():
    code = "import sys, ramatch.cli; ramatch.cli.build_parser(); sys.exit('torch' in sys.modules)"
    paths = {"PYTHONPATH": str(Path(ramatch.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=paths, check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------- explain


def test_names_come_from_one_place(ramatch):
    from ramatch.assets import vocabulary_names
    from ramatch.config import MATCHERS

    text = " ".join(ramatch("tag", "--help").out.split())
    assert f"a bundled list: {', '.join(vocabulary_names())}" in text
    assert f"--matcher {{{','.join(MATCHERS)}}}" in text


def test_the_interface_of_the_server_is_described_without_loading_torch():
    pytest.importorskip("fastapi")
    code = "import sys, ramatch.serve.schema as s; s.TagRequest.model_json_schema(); sys.exit('torch' in sys.modules)"
    paths = {"PYTHONPATH": str(Path(ramatch.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=paths, check=False).returncode == 0


@pytest.fixture
def explain(ramatch, model):
    pytest.importorskip("matplotlib")
    return lambda *arguments: ramatch("explain", *arguments, "--model", model, "--device", "cpu")


def test_explain_draws_png_and_svg(explain, photos, tmp_path, monkeypatch):
    result = explain(photos / "img1.png", "--labels", LABELS, "--out", tmp_path / "why.svg", "--top", 2)
    assert (result.code, result.out, result.err) == (0, f"{tmp_path / 'why.svg'}\n", "")
    drawing = (tmp_path / "why.svg").read_text(encoding="utf-8")
    assert "<svg" in drawing
    monkeypatch.chdir(tmp_path)
    result = explain(photos / "img2.jpg", "--labels", LABELS, "--matchers", "", "--truth", "cat, umbrella")
    assert (result.code, result.out) == (0, "img2-explained.png\n")
    with Image.open(tmp_path / "img2-explained.png") as page:
        assert page.format == "PNG"
        assert min(page.size) > 500
        assert np.asarray(page.convert("L")).std() > 10  # something is drawn


def test_explain_refuses(explain, photos, tmp_path):
    image = photos / "img1.png"
    explain(image).refused("no labels")
    explain(tmp_path / "none.png", "--labels", "cat").refused("none.png", "no such file")
    explain(image, "--labels", "cat", "--matchers", "kcot,magic").refused("unknown matcher 'magic'")
    explain(image, "--labels", "cat", "--top", "0").refused("--top")
    explain(image, "--labels", "cat,dog", "--out", tmp_path / "why.bmp").refused("why.bmp", ".png, .svg or .pdf")


# ---------------------------------------------------------------------------------------------------------- serve


def test_serve_passes_its_arguments_on(ramatch, monkeypatch):
    calls: list[tuple] = []
    monkeypatch.setattr("ramatch.serve.serve", lambda *a, **k: calls.append((a, k)))
    monkeypatch.delenv("RAMATCH_API_KEY", raising=False)
    assert ramatch("serve").code == 0
    plain = {"device": None, "label_features": None, "backbone": None, "kinds": True, "runtime": "auto"}
    assert calls.pop() == (
        ("ramatch-mini",),
        {"host": "127.0.0.1", "port": 8000, "settings": ServeSettings(), **plain},
    )
    monkeypatch.setenv("RAMATCH_API_KEY", "a long secret")
    ramatch(
        "serve",
        "--model",
        "m",
        "--backbone",
        "b",
        "--label-features",
        "f",
        "--device",
        "cpu",
        "--host",
        "::1",
        "--port",
        9,
        "--queue",
        7,
        "--window-ms",
        2.5,
        "--batch-size",
        3,
        "--cors",
        "http://a",
        "--cors",
        "http://b",
        "--no-kinds",
    )
    (name,), options = calls.pop()
    settings = options.pop("settings")
    assert name == "m"
    assert options.pop("kinds") is False
    given = {"host": "::1", "port": 9, "device": "cpu", "label_features": "f", "backbone": "b", "runtime": "auto"}
    assert options == given
    assert (settings.queue_size, settings.window_s, settings.max_batch) == (7, 0.0025, 3)
    assert (settings.cors_origins, settings.api_key) == (("http://a", "http://b"), "a long secret")
    monkeypatch.setenv("RAMATCH_API_KEY", "short")
    ramatch("serve").refused("API key")
    monkeypatch.setenv("RAMATCH_API_KEY", "")  # meant to be a key: an open server is not what was asked for
    ramatch("serve").refused("API key")
    monkeypatch.delenv("RAMATCH_API_KEY")
    for port in ("http", "99999", "-1"):
        ramatch("serve", "--port", port).refused("--port")
    assert calls == []


# ----------------------------------------------------------------------------------------------------------- data


def test_data_check(ramatch, photos, tmp_path):
    good = {"classes": ["cat", "dog"], "images": [["img1.png", ["cat"]], ["more/img3.webp", ["dog", "cat"]]]}
    (photos / "train.json").write_text(json.dumps(good))
    result = ramatch("data", "check", photos, "--decode", "--json", tmp_path / "r.json")
    assert (result.code, result.err) == (0, "")
    assert "2 images, 2 classes, 3 labels" in result.out
    assert "no problems found" in result.out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ok"]
    assert report["splits"]["all"]["class_counts"] == {"cat": 2, "dog": 1}
    bad = {**good, "images": [*good["images"], ["gone.png", ["cat"]], ["img2.jpg", ["bird"]]]}
    (photos / "train.json").write_text(json.dumps(bad))
    result = ramatch("data", "check", photos)
    assert result.code == 1
    assert "missing image: 1, left out" in result.out
    assert "unknown label: 1, dropped" in result.out
    assert "problems found: see above" in result.out
    (tmp_path / "classes.txt").write_text("cat\ndog\nbird\n")
    result = ramatch("data", "check", photos / "train.json", "--classes", tmp_path / "classes.txt", "--all-classes")
    assert "unknown label" not in result.out
    ramatch("data", "check", tmp_path / "none").refused("no such file or folder")
    ramatch("data", "check", photos, "--format", "yolo").refused("yolo", "coco")


def test_data_prepare_lists_benchmarks_and_wants_a_root(ramatch, tmp_path):
    result = ramatch("data", "prepare")
    assert result.code == 0
    for name in ("coco", "nus-wide", "rap", "pa100k", "multiscene", "mlrsnet"):
        assert f"\n{name} " in f"\n{result.out}"
    assert "https://" in result.out
    ramatch("data", "prepare", "coco").refused("--root DIR")
    ramatch("data", "prepare", "imagenet", "--root", tmp_path).refused("imagenet", "coco")


# ------------------------------------------------------------------------------------------------- import-authors


def test_import_authors(ramatch, photos, tmp_path):
    pytest.importorskip("open_clip", reason="CLIP's vocabulary comes from the open_clip package")
    import authors_program

    checkpoint = authors_program.make_checkpoint(width=64, layers=2, text_layers=2, adapted=1, prompted=1, vocab=49408)
    torch.save({"model": checkpoint}, tmp_path / "last.pth")
    result = ramatch("import-authors", tmp_path / "last.pth", tmp_path / "ours")
    assert (result.code, result.out) == (0, f"{tmp_path / 'ours'}\n")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["ram"]["combine"] == "sum"  # the reference preset
    result = ramatch(
        "tag",
        photos / "img1.png",
        "--labels",
        LABELS,
        "--model",
        tmp_path / "ours",
        "--device",
        "cpu",
        "--format",
        "json",
        "--top",
        7,
    )
    assert result.code == 0
    (entry,) = json.loads(result.out)
    assert sum(e["relative"] for e in entry["labels"]) == pytest.approx(1, abs=1e-3)
    ramatch("import-authors", tmp_path / "last.pth", tmp_path / "ours").refused("not an empty folder")
    ramatch("import-authors", tmp_path / "none.pth", tmp_path / "new").refused("no such checkpoint")
    (tmp_path / "text.pth").write_text("no checkpoint")
    ramatch("import-authors", tmp_path / "text.pth", tmp_path / "new").refused("text.pth", "state dict")
