"""ramatch tag --write, end to end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_helpers import LABELS

from ramatch.assets import photo_paths
from ramatch.library.write import SUBJECT
from ramatch.library.xmp import Packet

needs_exiftool = pytest.mark.skipif(shutil.which("exiftool") is None, reason="needs exiftool")


@pytest.fixture
def tag(ramatch, model):
    return lambda *arguments: ramatch("tag", *arguments, "--labels", LABELS, "--model", model, "--device", "cpu")


def subjects(path: Path) -> list[str]:
    return Packet(path.read_bytes()).words(SUBJECT)


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_sidecars_have_what_is_printed(tag, photos):
    result = tag(photos, "--write", "xmp", "--top", 2, "--format", "json")
    assert result.code == 0, result.err
    assert "ramatch: tags of 4 images written, of 0 as they were: 8 added, 0 removed" in result.err
    for entry in json.loads(result.out):
        path = Path(f"{entry['image']}.xmp")
        assert subjects(path) == [e["label"] for e in entry["labels"]] == entry["tags"]["added"]
        assert entry["tags"]["file"] == str(path)
    again = tag(photos, "--write", "xmp", "--top", 2)
    assert "tags of 0 images written, of 4 as they were: 0 added" in again.err
    assert again.out.count(".xmp: as it was") == 4
    fewer = tag(photos, "--write", "xmp", "--top", 1)
    assert fewer.out.count(".xmp: - ") == 4


def test_a_dry_run_and_taking_away(tag, ramatch, photos):
    before = listing(photos)
    dry = tag(photos, "--write", "xmp", "--top", 2, "--dry-run")
    assert "tags of 4 images would be written" in dry.err
    assert dry.out.count(".xmp: + ") == 4
    assert listing(photos) == before
    assert tag(photos, "--write", "txt", "--top", 2).code == 0
    assert len((photos / "img1.txt").read_text().split(", ")) == 2
    sure = ramatch("tag", photos, "--write", "txt", "--remove", "--dry-run")  # no model is needed
    assert "8 removed" in sure.err
    assert (photos / "img1.txt").exists()
    gone = ramatch("tag", photos, "--write", "txt", "--remove")
    assert gone.out.count("img1.txt: - ") == 1
    assert listing(photos) - before == {".ramatch-tags.jsonl", "more/.ramatch-tags.jsonl"}


def test_what_cannot_be_written_is_named_and_the_rest_goes_on(tag, photos):
    (photos / "img2.jpg.xmp").write_text("no packet")
    result = tag(photos, "--write", "xmp", "--top", 2, "--format", "jsonl")
    assert result.code == 1
    assert "img2.jpg were not written: XMP that cannot be read" in result.err
    assert "could not be read" not in result.err
    assert len(result.out.splitlines()) == 3
    assert (photos / "img2.jpg.xmp").read_text() == "no packet"


def test_tags_go_on_when_no_one_reads_the_answers(tag, photos, monkeypatch):
    monkeypatch.setattr("ramatch.cli.tagfile._writer", lambda file: lambda text, image: os.strerror(_broken()))
    assert tag(photos, "--write", "xmp", "--top", 2).code == 0
    assert len([name for name in listing(photos) if name.endswith(".xmp")]) == 4


def _broken() -> int:
    raise BrokenPipeError


def test_a_resumed_run_writes_the_tags_of_what_was_left(tag, photos, tmp_path):
    out = tmp_path / "tags.jsonl"
    (photos / "img2.jpg.xmp").write_text("no packet")
    options = (photos, "--write", "xmp", "--top", 2, "--out", out)
    assert tag(*options).code == 1
    (photos / "img2.jpg.xmp").unlink()
    result = tag(*options, "--resume")
    assert result.code == 0, result.err
    assert "3 of 4 images are answered already" in result.err
    assert "tags of 1 images written" in result.err
    assert len(out.read_text().splitlines()) == 4
    tag(photos, "--write", "txt", "--top", 2, "--out", out, "--resume").refused("other settings: write was 'xmp'")
    tag(*options, "--resume", "--dry-run").refused("other settings: dry_run was None, is now True")


def test_combinations_that_mean_nothing(tag, ramatch, photos):
    tag(photos, "--dry-run").refused("--dry-run needs --write")
    tag(photos, "--remove").refused("--remove needs --write")
    tag(photos, "--write", "xmp", "--every", "2s").refused("no files that could hold tags")
    ramatch("tag", photos, "--write", "xmp", "--remove", "--out", "x.csv").refused("--remove with --out")
    assert "is not calibrated, so no tag is sure: give --top K" in tag(photos, "--write", "xmp").err
    assert listing(photos) == {"img1.png", "img2.jpg", "img10.png", "more/img3.webp"}


def test_without_exiftool_no_model_is_loaded(ramatch, photos, monkeypatch):
    monkeypatch.setenv("PATH", "")
    ramatch("tag", photos, "--write", "exif", "--model", "none/such").refused("libimage-exiftool-perl")


@needs_exiftool
def test_into_images_and_out_again(tag, ramatch, photos):
    before = {name: (photos / name).read_bytes() for name in listing(photos)}
    assert tag(photos, "--write", "exif", "--top", 2, "--under", "auto").code == 0
    read = ["exiftool", "-j", "-XMP:Subject", "-XMP:HierarchicalSubject", "-IPTC:Keywords", photos / "img2.jpg"]
    found = json.loads(subprocess.run(read, capture_output=True, check=True).stdout)[0]
    assert len(found["Subject"]) == 2
    assert found["Keywords"] == found["Subject"]
    assert all(path.startswith("auto|") for path in found["HierarchicalSubject"])
    assert ramatch("tag", photos, "--write", "exif", "--remove").code == 0
    assert {name: (photos / name).read_bytes() for name in listing(photos)} == before


def test_the_bundled_model_writes_what_it_is_sure_of(ramatch, tmp_path):
    [coffee] = [path for path in photo_paths() if path.stem == "coffee"]
    shutil.copy(coffee, photo := tmp_path / coffee.name)
    result = ramatch("tag", photo, "--write", "xmp", "--format", "json", "--device", "cpu")
    assert result.code == 0, result.err
    [entry] = json.loads(result.out)
    one = ramatch("tag", photo, "--write", "xmp", "--format", "json", "--device", "cpu", "--top", 99, "--dry-run")
    assert "of 1 as they were" in one.err  # --top does not make unsure tags sure
    assert all(e["probability"] >= 0.7 for e in entry["labels"])
    assert subjects(tmp_path / f"{photo.name}.xmp") == [e["label"] for e in entry["labels"] if e["calibrated"]]
    assert "coffee" in subjects(tmp_path / f"{photo.name}.xmp")
