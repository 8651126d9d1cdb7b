"""ramatch tag: where images come from, and what is said of those left out."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import LABELS


@pytest.fixture
def tag(ramatch, model):
    options = ("--labels", LABELS, "--model", model, "--device", "cpu", "--format", "jsonl")
    return lambda *arguments: ramatch("tag", *arguments, *options)


@pytest.fixture
def piped(monkeypatch):
    def put(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return put


def names(out: str) -> list[str]:
    return [Path(json.loads(line)["image"]).name for line in out.splitlines()]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\0"])
def test_a_list_of_files(tag, photos, tmp_path, end):
    (photos / "odd *[1].png").write_bytes((photos / "img1.png").read_bytes())
    listed = [photos / "img10.png", photos / "odd *[1].png", photos / "more", photos / "img10.png", ""]
    (tmp_path / "list").write_bytes(end.join(map(str, listed)).encode())
    result = tag("--from", tmp_path / "list")
    assert (result.code, names(result.out)) == (0, ["img10.png", "odd *[1].png", "img3.webp"])
    both = tag(photos / "img1.png", "--from", tmp_path / "list")
    assert names(both.out) == ["img1.png", "img10.png", "odd *[1].png", "img3.webp"]


def test_a_list_on_standard_input(tag, photos, piped):
    piped(f"{photos / 'img2.jpg'}\0{photos / 'line'}\nbreak.png\0{photos / 'gone.png'}\0".encode())
    (photos / "line\nbreak.png").write_bytes((photos / "img1.png").read_bytes())
    result = tag("--from", "-")
    assert (result.code, names(result.out)) == (1, ["img2.jpg", "line\nbreak.png"])
    assert "gone.png: no such file or folder" in result.err
    assert "1 of 3 images could not be read" in result.err


def test_an_image_on_standard_input(tag, photos, piped):
    piped((photos / "img1.png").read_bytes())
    result = tag("-", photos / "img1.png")
    assert names(result.out) == ["img1.png", "-"]
    labels = [json.loads(line)["labels"] for line in result.out.splitlines()]
    assert labels[0] == labels[1]
    piped(b"photos/img1.png\n")
    broken = tag("-")
    assert broken.code == 1
    assert "could not read -: not a picture" in broken.err
    tag("-", "--from", "-").refused("either an image (-) or a list (--from -)")


def test_nothing_to_read(tag, photos, tmp_path, piped):
    tag().refused("no images: name files, folders or globs, or give --from LIST")
    piped(b"\n\n")
    tag("--from", "-").refused("no images found in -")
    tag("--from", tmp_path / "none").refused("No such file")
    tag(photos / "gone.jpg").refused("no such file or folder")


def test_what_is_left_out_is_counted_and_named(tag, photos):
    (photos / ".thumbs").mkdir()
    (photos / ".thumbs" / "t.png").write_bytes(b"")
    for name in ["clip.mov", *(f"note{i}.txt" for i in range(8))]:
        (photos / name).touch()
    result = tag(photos)
    assert (result.code, len(names(result.out))) == (0, 4)
    assert f"left out 1 hidden folder: {photos / '.thumbs'}\n" in result.err
    assert f"left out 1 video (--every 2s takes frames): {photos / 'clip.mov'}\n" in result.err
    assert "left out 8 other files: " in result.err
    assert " and 3 more\n" in result.err
    assert result.err.count("note") == 3 + 5


def test_frames_of_a_video(tag, photos, tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(photos / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(15):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 16 * i, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    result = tag(photos, "--every", "1500ms", "--report", tmp_path / "page.html")
    assert result.code == 0, result.err
    assert names(result.out)[:3] == ["clip.mp4#t=0", "clip.mp4#t=1.5", "img1.png"]
    assert (tmp_path / "page.html").read_text().count("data:image/jpeg") == 6
    one = tag(photos / "clip.mp4#t=1.5")
    assert one.out == result.out.splitlines(keepends=True)[1]
    out = tmp_path / "frames.jsonl"
    assert tag(photos, "--every", "1500ms", "--out", out).code == 0
    assert "6 of 6 images are answered already" in tag(photos, "--every", "1.5", "--out", out, "--resume").err
    for wrong in ("0s", "soon", "-1"):
        assert tag(photos, f"--every={wrong}").code == 2
