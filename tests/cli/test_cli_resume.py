"""ramatch tag --out: formats by ending, nothing overwritten silently, and --resume."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import LABELS, put_photos

import ramatch.recognizer
from ramatch.cli.tagfile import TagFile

FORMS = ("jsonl", "csv")


@pytest.fixture
def tag(ramatch, model) -> Callable:
    options = ("--labels", LABELS, "--model", model, "--device", "cpu", "--batch-size", 1)
    return lambda images, out, *more: ramatch("tag", images, *options, "--out", out, *more)


@pytest.fixture
def read_images(monkeypatch) -> list[str]:
    """Names of the images that the model is shown."""
    names: list[str] = []
    inner = ramatch.recognizer.Recognizer.predict_loaded

    def noted(self, loaded, **options):
        names.extend(Path(source).name for _, source, _ in loaded)
        return inner(self, loaded, **options)

    monkeypatch.setattr(ramatch.recognizer.Recognizer, "predict_loaded", noted)
    return names


def rows(path: Path) -> list[str]:
    """Sorted lines of a file, every one of them whole."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            assert {len(row) for row in csv.reader(file)} == {7}
    else:
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert path.read_bytes().endswith(b"\n")
    return sorted(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(("name", "begin"), [("a.json", "["), ("a.JSONL", "{"), ("a.csv", "image,"), ("a.txt", "/")])
def test_the_format_follows_from_the_ending(tag, photos, tmp_path, name, begin):
    assert tag(photos, tmp_path / name).code == 0
    assert (tmp_path / name).read_text().startswith(begin)
    assert tag(photos, tmp_path / name, "--format", "csv", "--overwrite").code == 0
    assert (tmp_path / name).read_text().startswith("image,label,")


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_overwritten_silently(tag, photos, tmp_path, form):
    out = tmp_path / f"tags.{form}"
    out.write_text("mine\n")
    tag(photos, out).refused(f"{out} exists; --resume to go on, or --overwrite to begin anew")
    tag(photos, out, "--resume").refused(".resume, beside it, is missing")
    assert out.read_text() == "mine\n"
    assert tag(photos, out, "--overwrite").code == 0
    assert len(rows(out)) == {"jsonl": 4, "csv": 21}[form]


@pytest.mark.parametrize("form", FORMS)
def test_cut_anywhere_it_goes_on_to_the_same_rows(tag, photos, tmp_path, read_images, form):
    """The bytes of a killed run are a beginning of the file and one of the journal: every place where either ends."""
    whole, out = tmp_path / "whole" / f"t.{form}", tmp_path / f"t.{form}"
    assert tag(photos, whole).code == 0
    content, notes = whole.read_bytes(), whole.with_name(f".t.{form}.resume")
    lines = notes.read_bytes().splitlines(keepends=True)
    ends = [sum(map(len, lines[: i + 1])) for i in range(5)]
    settings = json.loads(lines[0])["settings"]
    head = content[: content.index(b"\n") + 1].decode() if form == "csv" else ""
    for length in range(0, len(content) + 1, 7):
        complete = [sum(json.loads(line)[1] for line in lines[1:i]) + len(head) <= length for i in range(1, 6)]
        for told in {max(0, sum(complete) - 1), 0}:  # the journal lags behind, and its last line may be a half one
            out.write_bytes(content[:length])
            out.with_name(notes.name).write_bytes(notes.read_bytes()[: ends[told] + length % 3])
            file = TagFile(out, head, settings, resume=True)
            assert len(file.done) == (told if complete[0] else 0)
            assert out.read_bytes() == content[: max(len(head), out.stat().st_size)]
            assert out.read_bytes().endswith(b"\n") or not out.read_bytes()
            file.close()
    read_images.clear()
    result = tag(photos, out, "--resume")
    assert (result.code, rows(out)) == (0, rows(whole))
    assert f"{4 - len(read_images)} of 4 images are answered already" in result.err


@pytest.mark.parametrize("form", FORMS)
def test_what_failed_is_tried_again_and_what_is_new_is_added(tag, photos, tmp_path, read_images, form):
    out, picture = tmp_path / f"t.{form}", photos / "img2.jpg"
    good = picture.read_bytes()
    picture.write_bytes(b"broken")
    assert tag(photos, out).code == 1
    assert tag(photos, out, "--resume").code == 1
    picture.write_bytes(good)
    put_photos(photos, *(f"img{i}.png" for i in (1, 20)))
    read_images.clear()
    assert tag(photos, out, "--resume").code == 0
    assert sorted(read_images) == ["img2.jpg", "img20.png"]
    assert tag(photos, tmp_path / f"fresh.{form}").code == 0
    assert rows(out) == rows(tmp_path / f"fresh.{form}")
    read_images.clear()
    assert tag(photos, out, "--resume").code == 0
    assert read_images == []


def test_images_without_a_row_are_not_asked_again(tag, photos, tmp_path, read_images):
    out = tmp_path / "t.csv"
    for more in ((), ("--resume",)):
        assert tag(photos, out, "--threshold", 1, *more).code == 0
    assert (len(read_images), len(rows(out))) == (4, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="names as bytes")
def test_names_that_look_alike_in_the_file_are_told_apart(tag, photos, tmp_path, read_images):
    for name in (b"caf\xe9.png", b"caf\xe8.png"):
        Path(os.fsdecode(bytes(photos / "x")[:-1] + name)).write_bytes((photos / "img1.png").read_bytes())
    out = tmp_path / "t.jsonl"
    assert tag(os.fsdecode(bytes(photos / "x")[:-1] + b"caf\xe9.png"), out).code == 0
    assert tag(photos, out, "--resume").code == 0
    assert (len(read_images), len(rows(out))) == (6, 6)


def test_other_settings_are_refused_and_named(tag, ramatch, photos, model, tmp_path):
    out = tmp_path / "t.jsonl"
    assert tag(photos, out).code == 0
    before = out.read_bytes()
    tag(photos, out, "--resume", "--labels", "cat,dog").refused(
        "made with other settings", "labels: ['kite', 'red',", "are gone"
    )
    tag(photos, out, "--resume", "--labels", LABELS + ",=x").refused("labels: ['=x'] are new")
    tag(photos, out, "--resume", "--labels", ",".join(LABELS.split(",")[::-1])).refused("labels: in another order")
    result = tag(photos, out, "--resume", "--threshold", 0.2)
    assert result.code == 2
    assert "threshold was None, is now 0.2. Use the same ones, or --overwrite" in result.err
    tag(photos, out, "--resume", "--top", 2).refused("top was None, is now 2")
    tag(photos, out, "--resume", "--model", "ramatch-mini").refused("model was 'tiny")
    tag(photos, out, "--resume", "--format", "csv").refused("format was 'jsonl', is now 'csv'")
    assert out.read_bytes() == before
    assert tag(photos, out, "--resume", "--batch-size", 2).code == 0
    (tmp_path / "labels.txt").write_text(LABELS.replace(",", "\n"))
    same = ("--labels-file", tmp_path / "labels.txt", "--model", model, "--device", "cpu", "--out", out, "--resume")
    assert ramatch("tag", photos, *same).code == 0
    assert out.read_bytes() == before


def test_files_that_somebody_changed_are_not_gone_on_with(tag, photos, tmp_path):
    out = tmp_path / "t.csv"
    assert tag(photos, out).code == 0
    good, journal = out.read_bytes(), tmp_path / ".t.csv.resume"
    for changed in (good.replace(b"image,", b"IMAGE,", 1), good.replace(b"cat", b"cow", 1)):
        out.write_bytes(changed)
        tag(photos, out, "--resume").refused("was changed since", "--overwrite")
        assert out.read_bytes() == changed
    out.write_bytes(good)
    first, rest = journal.read_bytes().split(b"\n", 1)
    for damaged in (
        b"",
        b"\xff{",
        b"[]\n",
        b'{"settings": 3}\n',
        first + b"\n[1, 2, 3]\n",
        first + b'\n["a", 2.5, 3]\n',
        first + b"\n{}\n" + rest,
    ):
        journal.write_bytes(damaged)
        result = tag(photos, out, "--resume")
        assert (result.code, result.out) == (2, "")
        assert str(journal) in result.err
        assert "Traceback" not in result.err
        assert out.read_bytes() == good
    assert tag(photos, out, "--overwrite").code == 0
    assert out.read_bytes() == good


def test_what_cannot_be_resumed(tag, ramatch, photos, tmp_path):
    ramatch("tag", photos, "--resume").refused("--resume needs --out")
    for name in ("t.json", "t.txt", "t"):
        tag(photos, tmp_path / name, "--resume").refused("--format jsonl or csv")
    tag(photos, tmp_path / "t.csv", "--resume", "--overwrite").refused("not allowed with")
    tag(photos, tmp_path / "t.csv", "--resume", "--report", tmp_path / "r.html").refused("--report")
    (tmp_path / "d.csv").mkdir()
    tag(photos, tmp_path / "d.csv", "--resume").refused("d.csv")
    tag(photos, tmp_path / "d.csv").refused("d.csv", "directory")
    assert tag(photos, tmp_path / "new" / "t.csv", "--resume").code == 0, "nothing is there yet: all is left to do"
    assert len(rows(tmp_path / "new" / "t.csv")) == 21
    assert ramatch("tag", photos, "--labels", "cat", "--model", tmp_path, "--out", tmp_path / "x.csv").code == 2
    assert not (tmp_path / "x.csv").exists()


def test_a_pipe_is_written_to_as_it_is(tag, photos):
    assert tag(photos / "img1.png", "/dev/null", "--format", "jsonl").code == 0
    assert not Path("/dev/.null.resume").exists()


def test_a_full_disk_keeps_whole_rows(tag, photos, tmp_path, monkeypatch):
    out, inner, calls = tmp_path / "t.csv", TagFile.write, []

    def full(self, text, image):
        calls.append(image)
        if len(calls) == 4:  # the head is the first
            with out.open("ab") as file:
                file.write(text.encode()[:70])  # as much as there was room for
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))
        inner(self, text, image)

    monkeypatch.setattr(TagFile, "write", full)
    tag(photos, out).refused("No space left")
    assert not out.read_bytes().endswith(b"\n")
    monkeypatch.setattr(TagFile, "write", inner)
    assert tag(photos, out, "--resume").code == 0
    assert tag(photos, tmp_path / "whole.csv").code == 0
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()


HANGS = """
import signal, sys, time, ramatch.recognizer as r
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
inner, calls = r.Recognizer.predict_loaded, []
def slow(self, *a, **k):
    calls.append(1)
    if len(calls) == 3:
        print("hangs", flush=True)
        time.sleep(60)
    return inner(self, *a, **k)
r.Recognizer.predict_loaded = slow
from ramatch.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_has_kept_what_it_answered(tag, photos, model, tmp_path, number):
    out = tmp_path / "t.jsonl"
    options = ["tag", photos, "--labels", LABELS, "--model", model, "--device", "cpu", "--batch-size", 1, "--out", out]
    paths = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", HANGS, *map(str, options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **paths}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"hangs\n"
        process.send_signal(number)
    assert len(rows(out)) == 2
    result = tag(photos, out, "--resume")
    assert (result.code, "2 of 4 images are answered already" in result.err) == (0, True)
    assert tag(photos, tmp_path / "whole.jsonl").code == 0
    assert rows(out) == rows(tmp_path / "whole.jsonl")
