"""The HTML report as a file: complete, escaped, bounded, atomic. How it behaves in a browser: tests/serve."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ramatch.assets import photo_paths
from ramatch.config import GUESS
from ramatch.errors import RamatchError
from ramatch.prediction import Prediction, Unreadable
from ramatch.viz.report import write_report

LABELS = ("cat", "dog", "tree", "<script>alert(1)</script>", "\"'&quot; onload=x", "日本語 🐈")


def predict(source: str | None = "photo.jpg", maps: bool = True, grid: tuple[int, int] = (3, 4)) -> Prediction:
    rng = np.random.default_rng(0)
    m, n = grid[0] * grid[1], len(LABELS)
    plan = rng.random((m, n)) if maps else None
    probabilities = np.linspace(0.9, 0.1, n)
    return Prediction(LABELS, probabilities, probabilities, True, grid, plan, plan, None, source, (8, 6))


def image(width: int = 80, height: int = 60) -> Image.Image:
    return Image.new("RGB", (width, height), (10, 200, 90))


class Reader(HTMLParser):
    """Collects what a browser would make of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def test_shows_every_image_with_its_labels_and_maps(tmp_path: Path) -> None:
    out = write_report(
        [predict("a/b/one.jpg"), predict("two.jpg")], [image(), image()], tmp_path / "r.html", top=3, threshold=0.7
    )
    page = Reader(out.read_text(encoding="utf-8"))
    assert len(page.all("article")) == 2
    labels = [a for a in page.all("button") if "data-label" in a]
    assert [a["data-label"] for a in labels] == [*LABELS[:3]] * 2
    assert [a["class"] for a in labels[:3]] == ["label", "label", "label below"]
    grid = np.frombuffer(base64.b64decode(labels[0]["data-map"] or ""), np.uint8)
    assert grid.size == 12
    np.testing.assert_allclose(grid.reshape(3, 4) / 255, predict().heatmap("cat"), atol=1 / 255)
    assert page.all("article")[0]["data-grid"] == "3 4"
    assert "one.jpg" in page.texts
    assert not any("a/b" in text for text in page.texts)  # the folder stays private


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script>.jpg'
    out = write_report([predict(evil)], [image()], tmp_path / "r.html", title="</title><script>bad()</script>")
    page = Reader(out.read_text(encoding="utf-8"))
    assert len(page.all("script")) == 1
    assert page.all("b") == []
    allowed = {
        "class",
        "id",
        "type",
        "for",
        "hidden",
        "lang",
        "charset",
        "content",
        "name",
        "http-equiv",
        "title",
        "alt",
        "src",
        "width",
        "height",
        "placeholder",
        "autocomplete",
        "role",
    }
    names = {key for _, attributes in page.tags for key in attributes if not key.startswith(("data-", "aria-"))}
    assert names <= allowed
    assert set(LABELS) == {a["data-label"] for a in page.all("button") if "data-label" in a}
    assert page.all("h2")[0]["title"] == Path(evil).name


def test_nothing_outside_is_needed_or_allowed(tmp_path: Path) -> None:
    text = write_report([predict()], [image()], tmp_path / "r.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=[\"'](?!data:)", text)
    assert not re.search(r"https?://|@import|url\(", text)
    policy = next(a for a in Reader(text).all("meta") if a.get("http-equiv"))["content"] or ""
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy


def test_pictures_are_bounded_and_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image(3000, 1500).save(buffer, "JPEG", exif=exif)
    out = write_report([predict()], [buffer.getvalue()], tmp_path / "r.html", max_side=200)
    [source] = [a["src"] or "" for a in Reader(out.read_text(encoding="utf-8")).all("img")]
    inner = Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/jpeg;base64,"))))
    assert inner.size == (100, 200)
    assert out.stat().st_size < 60_000


def test_without_maps_and_without_names(tmp_path: Path) -> None:
    for prediction, maps in ((predict(None), False), (predict(None, maps=False), True)):
        page = Reader(write_report([prediction], [image()], tmp_path / "r.html", maps=maps).read_text(encoding="utf-8"))
        assert not any("data-map" in attributes for _, attributes in page.tags)


def test_generators_and_paths_work(tmp_path: Path) -> None:
    paths = photo_paths()[:2]

    def predictions() -> Iterator[Prediction]:
        for path in paths:
            yield predict(str(path))

    text = write_report(predictions(), iter(paths), tmp_path / "deep" / "er" / "r.html").read_text(encoding="utf-8")
    assert paths[1].name in text
    own = write_report(predictions(), None, tmp_path / "own.html").read_text(encoding="utf-8")
    assert own == text  # without images: the files that the predictions were made from


def test_images_that_could_not_be_read_are_left_out(tmp_path: Path) -> None:
    found = [predict("one.jpg"), Unreadable("two.jpg", "no such file"), predict("three.jpg")]
    page = Reader(write_report(found, [image()] * 3, tmp_path / "r.html").read_text(encoding="utf-8"))
    assert [a["title"] for a in page.all("h2")] == ["one.jpg", "three.jpg"]


def test_a_picture_that_is_gone_is_said_so(tmp_path: Path) -> None:
    page = Reader(write_report([predict()], [tmp_path / "gone.jpg"], tmp_path / "r.html").read_text(encoding="utf-8"))
    assert any("can no longer be read" in text for text in page.texts)


def test_the_old_report_survives_a_failure(tmp_path: Path) -> None:
    out = write_report([predict()], [image()], tmp_path / "r.html")
    before = out.read_bytes()

    def breaks() -> Iterator[Prediction]:
        yield predict()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_report(breaks(), [image(), image()], out)
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(RamatchError, match="one prediction for each image"):
        write_report([predict()], [image(), image()], tmp_path / "r.html")
    with pytest.raises(RamatchError, match="one prediction for each image"):
        write_report([predict(), predict()], [image()], tmp_path / "r.html")
    with pytest.raises(RamatchError, match="top=0"):
        write_report([predict()], [image()], tmp_path / "r.html", top=0)
    with pytest.raises(RamatchError, match="threshold"):
        write_report([predict()], [image()], tmp_path / "r.html", threshold=50)
    (tmp_path / "folder").mkdir()
    with pytest.raises(RamatchError, match="cannot write"):
        write_report([predict()], [image()], tmp_path / "folder")


def test_a_word_that_was_not_learned_is_marked_and_explained(tmp_path: Path) -> None:
    found = replace(predict(maps=False), trust=np.array([0.9, 0.1, 0.8, 0.7, 0.6, 0.5]))
    text = write_report([found], [image()], tmp_path / "r.html").read_text(encoding="utf-8")
    page = Reader(text)
    titles = [a["title"] for a in page.all("span") if a.get("class") == "name"]
    assert titles[:2] == ["cat", f"dog: {GUESS}"]
    assert [t for t in page.texts if t.endswith(" ?")] == ["74 % ?"]
    assert "not calibrated" not in text


def test_relative_scores_are_not_shown_as_percentages(tmp_path: Path) -> None:
    found = replace(predict(maps=False), calibrated=False)
    text = write_report([found], [image()], tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Relative scores, which compare these labels: the model is not calibrated." in text
    assert re.findall('class="value">([^<]*)<', text)[:2] == ["0.90", "0.74"]
    assert not any("%" in value for value in re.findall('class="value">([^<]*)<', text))
