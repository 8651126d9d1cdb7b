"""index and search through the command line."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from cli_helpers import put_photos
from tiny_models import tiny_ram

from ramatch.cli import main
from ramatch.recognizer import Recognizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    Recognizer(tiny_ram()).save_pretrained(folder, with_backbone=True)
    return folder


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("indexed")
    put_photos(folder, "img1.png", "img2.png", "img10.png", "more/<b>img3.png")
    assert main(["index", str(folder), "--model", str(model)]) == 0
    return folder


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], model: Path):
    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([*map(str, arguments), "--model", str(model)])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capfd.readouterr()

    return run


def test_index_says_what_it_did(call, tmp_path: Path) -> None:
    put_photos(tmp_path, "a.png", "b.png")
    (tmp_path / "bad.jpg").write_bytes(b"junk")
    code, out, err = call("index", tmp_path)
    assert code == 1
    assert out.startswith("2 new, 0 changed")
    assert "bad.jpg" in err
    (tmp_path / "bad.jpg").unlink()
    (tmp_path / "a.png").unlink()
    code, out, _ = call("index", tmp_path, "--remove-missing")
    assert code == 0
    assert "2 deleted" in out
    assert "1 removed" in out
    status = json.loads(call("index", tmp_path, "--status")[1])
    assert (status["files"], status["photos"], status["unreadable"]) == (1, 1, 0)
    assert "all in order" in call("index", tmp_path, "--verify")[1]


def test_formats_agree(call, indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = ("search", "dog -cat", "--in", indexed)
    rows = json.loads(call(*search, "--format", "json")[1])
    assert len(rows) == 4
    # the model is not calibrated: no number is called a probability
    assert set(rows[0]) == {"image", "relative", "labels", "date", "size", "width", "height"}
    assert set(rows[0]["labels"][0]) == {"label", "relative"}
    assert "is not calibrated: the numbers are relative" in call(*search)[2]
    paths = [row["image"] for row in rows]
    assert [json.loads(line) for line in call(*search, "--format", "jsonl")[1].splitlines()] == rows
    assert [row["image"] for row in csv.DictReader(io.StringIO(call(*search, "--format", "csv")[1]))] == paths
    assert call(*search, "--format", "paths")[1].splitlines() == paths
    assert call(*search, "-0")[1].split("\0") == [*paths, ""]
    assert all(path in line for path, line in zip(paths, call(*search)[1].splitlines(), strict=True))
    assert call("search", "dog", "--not", "cat", "--in", indexed, "--format", "paths")[1].splitlines() == paths
    monkeypatch.chdir(indexed)
    assert {Path(p) for p in call("search", "dog", "--format", "paths")[1].splitlines()} == {
        Path(path).relative_to(indexed) for path in paths
    }
    names = call("search", "dog", "--sort", "name", "--format", "paths")[1].splitlines()
    assert names == ["img1.png", "img2.png", "img10.png", "more/<b>img3.png"]
    assert len(call("search", "dog", "--top", "2", "--format", "paths")[1].splitlines()) == 2
    assert call("search", "dog", "--threshold", "1", "--format", "paths")[1] == ""


def test_report_holds_thumbnails_and_escapes_names(call, indexed: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert call("search", "dog", "--in", indexed, "--report", page)[0] == 0
    text = page.read_text()
    assert text.count("data:image/jpeg;base64,") == 4
    assert "&lt;b&gt;img3.png" in text
    assert "<b>img3" not in text
    code, out, _ = call("search", "--like", indexed / "img1.png", "--in", indexed, "--report", page, "--format", "json")
    assert code == 0
    assert json.loads(out)[0]["image"].endswith("img1.png")
    assert json.loads(out)[0]["similarity"] > 0.99


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("search", "dog", "--in", "/nowhere"), "/nowhere is not a folder"),
        (("search", "dog", "--in", "/usr"), "is not a photo library"),
        (("search",), "nothing to search for"),
        (("search", "dog -dog"), "its absence"),
        (("index", "/nowhere"), "is not a folder"),
    ],
)
def test_errors_are_one_line(call, indexed: Path, monkeypatch: pytest.MonkeyPatch, arguments, message: str) -> None:
    monkeypatch.chdir(indexed)
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_folder_without_images(call, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    code, _, err = call("index", tmp_path / "notes")
    assert code == 2
    assert "no images in" in err
