"""What is found under names, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramatch.data import find as module
from ramatch.data.find import HIDDEN_FILES, HIDDEN_FOLDERS, OTHER, VIDEOS, find


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = "a.jpg b.HEIC c.nef clip.mp4 notes.txt a.jpg.xmp .hidden.png .thumbs/t.jpg more/.git/x.png more/d.avif"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def below(folder: Path, paths: list[Path]) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def test_what_is_left_out_is_named(folder: Path) -> None:
    found = find([folder])
    assert below(folder, found.paths) == ["a.jpg", "b.HEIC", "c.nef", "more/d.avif"]
    assert {kind: below(folder, paths) for kind, paths in found.skipped.items()} == {
        HIDDEN_FOLDERS: [".thumbs", "more/.git"],
        HIDDEN_FILES: [".hidden.png"],
        VIDEOS: ["clip.mp4"],
        OTHER: ["a.jpg.xmp", "notes.txt"],
    }
    assert below(folder, find([f"{folder}/*"]).skipped[OTHER]) == ["a.jpg.xmp", "notes.txt"]


def test_what_is_named_outright_is_taken_even_if_hidden(folder: Path) -> None:
    names = [folder / ".hidden.png", folder / ".thumbs", folder / "notes.txt"]
    assert below(folder, find(names).paths) == [".hidden.png", ".thumbs/t.jpg", "notes.txt"]


def test_missing_names_do_not_stop_the_others(folder: Path) -> None:
    found = find([folder / "gone.jpg", folder / "a.jpg", folder / "*.bmp"])
    assert below(folder, found.paths) == ["a.jpg"]
    assert found.missing == [
        (str(folder / "gone.jpg"), "no such file or folder"),
        (str(folder / "*.bmp"), "no images found"),
    ]
    assert find([], listed=[folder / "*.jpg"]).missing == [(str(folder / "*.jpg"), "no such file or folder")]


def test_videos_become_frames(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "frame_names", lambda path, every: [f"{path}#t={t}" for t in (0, every)])
    found = find([folder], every=2)
    assert below(folder, found.paths) == ["a.jpg", "b.HEIC", "c.nef", "clip.mp4#t=0", "clip.mp4#t=2", "more/d.avif"]
    assert VIDEOS not in found.skipped


def test_a_video_that_cannot_be_read_is_named(folder: Path) -> None:
    pytest.importorskip("av")
    found = find([folder / "clip.mp4"], every=2)
    assert found.paths == []
    [(name, reason)] = found.missing
    assert name == str(folder / "clip.mp4")
    assert "not a video that can be read" in reason
