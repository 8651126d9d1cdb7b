"""ramatch tag, end to end."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from cli_helpers import LABELS, put_photos

import ramatch.recognizer
from ramatch.assets import GENERAL, vocabulary
from ramatch.cli import main
from ramatch.config import GUESS
from ramatch.errors import RamatchError
from ramatch.prediction import Prediction

NAMES = LABELS.split(",")


@pytest.fixture
def tag(ramatch, model):
    return lambda *arguments: ramatch("tag", *arguments, "--model", model, "--device", "cpu")


def names_of(entries: list[dict]) -> list[str]:
    return [Path(entry["image"]).name for entry in entries]


# ------------------------------------------------------------------------------------------------ what is tagged


def test_files_folders_and_globs(tag, photos):
    one = json.loads(tag(photos / "img1.png", "--labels", LABELS, "--format", "json").out)
    assert names_of(one) == ["img1.png"]
    folder = json.loads(tag(photos, "--labels", LABELS, "--format", "json").out)
    assert names_of(folder) == ["img1.png", "img2.jpg", "img10.png", "img3.webp"]
    assert folder[0] == one[0]
    found = json.loads(tag(photos / "*.png", "--labels", LABELS, "--format", "json").out)
    assert names_of(found) == ["img1.png", "img10.png"]
    twice = json.loads(
        tag(photos / "img2.jpg", photos, photos / "img2.jpg", "--labels", LABELS, "--format", "json").out
    )
    assert names_of(twice) == ["img2.jpg", "img1.png", "img10.png", "img3.webp"]


def test_labels_from_a_file_and_from_the_package(tag, photos, tmp_path):
    (tmp_path / "labels.txt").write_text("# mine\ncat\n\n  traffic   light \ncat\n", encoding="utf-8")
    found = json.loads(tag(photos / "img1.png", "--labels-file", tmp_path / "labels.txt", "--format", "json").out)
    assert sorted(e["label"] for e in found[0]["labels"]) == ["cat", "traffic light"]
    found = json.loads(tag(photos / "img1.png", "--vocabulary", "voc20", "--top", 20, "--format", "json").out)
    assert len(found[0]["labels"]) == 20


# ------------------------------------------------------------------------------------------------------ formats


def test_json_is_one_array_with_one_object_per_image(tag, photos):
    result = tag(photos, "--labels", LABELS, "--format", "json", "--top", 3)
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert [type(found), len(found)] == [list, 4]
    for entry in found:
        assert list(entry) == ["image", "labels", "calibrated", "width", "height"]
        assert [entry["width"], entry["height"], entry["calibrated"]] == [48, 40, False]
        assert len(entry["labels"]) == 3
        scores = [e["score"] for e in entry["labels"]]
        assert scores == sorted(scores, reverse=True)
        for e in entry["labels"]:
            assert list(e) == ["label", "relative", "score", "calibrated", "familiarity"]  # the model is not calibrated
            assert e["label"] in NAMES
            assert 0 <= e["relative"] <= 1
    assert len({json.dumps(e["labels"]) for e in found}) == 4  # the images differ, so do the answers


def test_all_formats_say_the_same(tag, photos):
    options = (photos, "--labels", LABELS, "--top", 2)
    objects = json.loads(tag(*options, "--format", "json").out)
    lines = tag(*options, "--format", "jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == objects
    rows = list(csv.DictReader(io.StringIO(tag(*options, "--format", "csv").out)))
    columns = ["image", "label", "probability", "score", "relative", "calibrated", "familiarity"]
    assert list(rows[0]) == columns
    assert {(r["probability"], r["calibrated"], r["familiarity"]) for r in rows} == {("", "False", "")}
    expected = [(o["image"], e["label"], e["relative"], e["score"]) for o in objects for e in o["labels"]]
    assert [(r["image"], r["label"], float(r["relative"]), float(r["score"])) for r in rows] == expected
    table = tag(*options).out.splitlines()
    assert table.pop() == "relative scores, which compare the labels: the model is not calibrated"
    assert len(table) == 4 * 3
    for i, entry in enumerate(objects):
        assert table[3 * i] == entry["image"]
        for line, e in zip(table[3 * i + 1 :], entry["labels"], strict=False):
            label, _, rest = line.strip().partition("  ")
            assert label == e["label"]
            assert float(rest.split()[0]) == pytest.approx(e["relative"], abs=0.0051)
            assert line.count("█") == round(20 * e["relative"])


def test_top_and_threshold(tag, photos):
    everything = json.loads(tag(photos, "--labels", LABELS, "--top", 99, "--format", "json").out)
    assert [len(e["labels"]) for e in everything] == [7] * 4
    assert [len(e["labels"]) for e in json.loads(tag(photos, "--labels", LABELS, "--format", "json").out)] == [5] * 4
    result = tag(photos, "--labels", LABELS, "--threshold", 0.15, "--format", "json")
    assert "not calibrated" in result.err  # and so a threshold means little
    for entry, full in zip(json.loads(result.out), everything, strict=True):
        assert entry["labels"] == [e for e in full["labels"] if e["relative"] >= 0.15]
    assert any(0 < len(e["labels"]) < 7 for e in json.loads(result.out))
    both = json.loads(tag(photos, "--labels", LABELS, "--threshold", 0.1, "--top", 1, "--format", "json").out)
    assert [e["labels"] for e in both] == [e["labels"][:1] for e in everything]
    none = tag(photos / "img1.png", "--labels", LABELS, "--threshold", 1)
    assert none.code == 0
    assert none.out.splitlines()[1] == "  (no label reaches the threshold)"


def test_maps(tag, photos):
    options = (photos / "img1.png", "--labels", LABELS, "--maps", "--top", 2)
    for form in ("json", "jsonl"):
        text = tag(*options, "--format", form).out
        entry = json.loads(text)[0] if form == "json" else json.loads(text)
        assert entry["grid"] == [4, 4]
        heat = np.array(entry["labels"][0]["map"])
        assert heat.shape == (4, 4)
        assert heat.max() == 1
    tag(*options).refused("--maps needs --format json or jsonl")


def test_another_matcher(tag, photos):
    scores = [
        tag(photos / "img1.png", "--labels", LABELS, "--format", "jsonl", "--matcher", name).out
        for name in ("kcot", "average")
    ]
    assert scores[0] != scores[1]
    assert scores[0] == tag(photos / "img1.png", "--labels", LABELS, "--format", "jsonl").out


# ------------------------------------------------------------------------------------------------ files and pages


def test_out_is_written_whole_or_not_at_all(tag, photos, tmp_path, monkeypatch):
    out = tmp_path / "deep" / "tags.json"
    result = tag(photos, "--labels", LABELS, "--format", "json", "--out", out)
    assert (result.code, result.out) == (0, "")
    assert json.loads(out.read_text()) == json.loads(tag(photos, "--labels", LABELS, "--format", "json").out)
    before, calls = out.read_text(), []
    inner = ramatch.recognizer.Recognizer.predict_loaded

    def second_fails(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise RamatchError("the model broke")
        return inner(self, *arguments, **options)

    monkeypatch.setattr(ramatch.recognizer.Recognizer, "predict_loaded", second_fails)
    again = ("--labels", "cat,dog", "--out", out, "--batch-size", 1)
    tag(photos, *again).refused("tags.json exists; --overwrite to begin anew")
    assert calls == []
    tag(photos, *again, "--overwrite").refused("the model broke")
    assert len(calls) == 2
    assert out.read_text() == before
    assert [p.name for p in out.parent.iterdir()] == ["tags.json"]
    tag(photos, "--labels", "cat", "--out", tmp_path).refused(str(tmp_path), "directory")


@pytest.mark.parametrize("option", ["--out", "--report"])
def test_pictures_are_not_written_over(tag, photos, tmp_path, option):
    picture = photos / "more" / "img3.webp"
    before = picture.read_bytes()
    plain = photos / "scan"  # an image by its content alone
    plain.write_bytes(before)
    tag(picture, "--labels", LABELS, option, picture).refused(option, "img3.webp", "overwritten")
    tag(photos / "img1.png", "--labels", LABELS, option, picture).refused("overwritten")
    tag(plain, "--labels", LABELS, option, photos / "more" / ".." / "scan").refused("overwritten")
    assert picture.read_bytes() == plain.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_leaves_no_temporary_file(photos, model, tmp_path, number):
    """Killed while it writes: the process hangs in its second batch until the signal comes."""
    folder = tmp_path / "out"
    code = (
        "import signal, sys, time, ramatch.recognizer as r\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "inner, calls = r.Recognizer.predict_loaded, []\n"
        "def slow(self, *a, **k):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2:\n"
        "        print('hangs', flush=True)\n"
        "        time.sleep(60)\n"
        "    return inner(self, *a, **k)\n"
        "r.Recognizer.predict_loaded = slow\n"
        "from ramatch.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    options = ["--model", model, "--batch-size", 1, "--out", folder / "tags.txt", "--report", folder / "page.html"]
    process = program("tag", photos, "--labels", LABELS, *options, command=["-c", code])
    assert process.stdout is not None
    assert process.stdout.readline() == b"hangs\n"
    assert len(list(folder.iterdir())) == 2  # both are being written
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("options", [(), ("--threshold", 0.1), ("--top", 2)], ids=["plain", "threshold", "top"])
def test_report(tag, photos, tmp_path, options):
    result = tag(photos, "--labels", LABELS, "--report", tmp_path / "out.html", *options)
    assert result.code == 0
    assert result.err.endswith(f"ramatch: wrote {tmp_path / 'out.html'}\n")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    cards = page.count('<article class="card"')
    assert cards == 4
    for name in ("img1.png", "img2.jpg", "img10.png", "img3.webp"):
        assert f'title="{name}"' in page
    assert page.count("data-map=") == 4 * {(): 5, ("--top", 2): 2}.get(options, 7)
    answered = [line for line in result.out.splitlines() if not line.startswith(" ")]
    assert answered.pop().startswith("relative scores")
    assert answered == [
        str(p) for p in (photos / "img1.png", photos / "img2.jpg", photos / "img10.png", photos / "more" / "img3.webp")
    ]


def test_words_that_were_not_learned_are_marked(tag, photos, monkeypatch):
    values, known = np.array([0.2, 0.8, 0.6]), np.array([0.97, 0.99, 0.031])

    def one(recognizer, paths, **options) -> Iterator[Prediction]:
        labels, options = ("cat", "dog", "xqzt"), {"source": "a.jpg", "familiarity": known, "trust": known}
        yield Prediction(labels, values, values, True, (4, 4), **options)
        yield Prediction(labels[:2], values[:2], values[:2], True, (4, 4), source="b.jpg", familiarity=known[:2])

    monkeypatch.setattr(ramatch.recognizer, "predict_files", one)
    lines = tag(photos, "--labels", "cat,dog,xqzt").out.splitlines()
    assert [line[:13].rstrip() for line in lines[:4]] == ["a.jpg", "  dog    0.80", "  xqzt   0.60", "  cat    0.20"]
    assert [line[13] for line in lines[1:4]] == [" ", "?", " "]
    assert lines[-1] == f"?: {GUESS}"
    assert sum("?" in line for line in lines) == 2, "said once"
    rows = list(csv.DictReader(io.StringIO(tag(photos, "--labels", "cat,dog,xqzt", "--format", "csv").out)))
    marked = {r["label"]: (r["probability"], r["calibrated"], r["familiarity"], r["relative"]) for r in rows[:3]}
    assert marked["xqzt"] == ("0.6", "False", "0.031", "")
    assert marked["dog"] == ("0.8", "True", "0.99", "")


@pytest.mark.parametrize("form", ["json", "table"])
def test_many_images_are_not_held_in_memory(tag, photos, tmp_path, monkeypatch, form):
    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0

    def many(recognizer, paths, **options) -> Iterator[Prediction]:
        nonlocal most
        for i in range(40):
            plan = np.full((16, 2), 1 / 16, np.float32)
            found = Prediction(
                ("cat", "dog"),
                np.array([0.2, 0.8]),
                np.array([0.2, 0.8 + i]),
                False,
                (4, 4),
                plan=plan,
                source=str(paths[0]),
            )
            alive.add(found)
            most = max(most, len(alive))
            yield found

    monkeypatch.setattr(ramatch.recognizer, "predict_files", many)
    result = tag(photos, "--labels", "cat,dog", "--format", form, "--report", tmp_path / "out.html")
    assert result.code == 0
    assert (tmp_path / "out.html").read_text().count('<article class="card"') == 40
    assert most <= 4
    if form == "json":
        assert len(json.loads(result.out)) == 40


# ------------------------------------------------------------------------------------------------------- trouble


def test_unreadable_images_are_reported_and_counted_and_the_others_answered(tag, photos, tmp_path):
    (photos / "img2.jpg").write_bytes(b"this is no picture")
    (photos / "img10.png").write_bytes((photos / "img1.png").read_bytes()[:90])
    result = tag(photos, photos / "gone.jpg", "--labels", LABELS, "--format", "json", "--report", tmp_path / "r.html")
    assert result.code == 1
    assert names_of(json.loads(result.out)) == ["img1.png", "img3.webp"]
    lines = [line for line in result.err.splitlines() if "could not" in line]
    assert len(lines) == 4
    assert lines[0] == f"ramatch: could not read {photos / 'gone.jpg'}: no such file or folder"
    assert lines[1].startswith(f"ramatch: could not read {photos / 'img2.jpg'}: not a picture")
    assert lines[2].startswith(f"ramatch: could not read {photos / 'img10.png'}: ")
    assert lines[3] == "ramatch: 3 of 5 images could not be read"
    assert (tmp_path / "r.html").read_text().count('<article class="card"') == 2


def test_nothing_readable(tag, photos, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"")
    for form, expected in (("json", []), ("jsonl", None), ("csv", None), ("table", None)):
        result = tag(
            tmp_path / "bad.png", "--labels", LABELS, "--format", form, "--report", tmp_path / "r.html", "--quiet"
        )
        assert result.code == 1
        assert "1 of 1 images could not be read" in result.err
        if expected is not None:
            assert json.loads(result.out) == expected
    assert not (tmp_path / "r.html").exists()
    tag(tmp_path / "none.png", "--labels", LABELS).refused("no such file or folder", "none.png")
    (tmp_path / "empty").mkdir()
    tag(tmp_path / "empty", "--labels", LABELS).refused("no images found")


def test_bad_input_is_one_line_and_exit_code_2(tag, ramatch, photos, tmp_path, model):
    image = photos / "img1.png"
    ramatch("explain", image).refused("no labels", "--labels-file")
    tag(image, "--labels", " , ").refused("--labels has no label in it")
    assert "'cat' is given twice; it counts once" in tag(image, "--labels", "cat, dog,cat").err
    (tmp_path / "labels.txt").write_text("# only a comment\n\n")
    tag(image, "--labels-file", tmp_path / "labels.txt").refused("labels.txt has no label in it")
    tag(image, "--labels-file", tmp_path / "none.txt").refused("none.txt", "No such file")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00c")
    tag(image, "--labels-file", tmp_path / "binary.txt").refused("UTF-8")
    tag(image, "--labels", "cat", "--vocabulary", "voc20").refused("not allowed with")
    tag(image, "--vocabulary", "klingon").refused("no bundled vocabulary 'klingon'", "coco80")
    for value in ("1.5", "-0.1", "nan", "high"):
        tag(image, "--labels", "cat", f"--threshold={value}").refused("--threshold", value)
    for value in ("0", "many"):
        tag(image, "--labels", "cat", "--top", value).refused("--top", value)
    tag(image, "--labels", "cat", "--format", "xml").refused("xml", "jsonl")
    ramatch("tag", image, "--labels", "cat", "--device", "abacus").refused("abacus", "cuda")
    tag(image, "--labels", "cat", "--colour", "on").refused("'tag' does not know '--colour'")


def test_without_labels_a_general_vocabulary_is_used(tag, photos):
    (answer,) = json.loads(tag(photos / "img1.png", "--format", "json", "--top", 20).out)
    names = [entry["label"] for entry in answer["labels"]]
    assert len(names) == 20
    assert set(names) <= set(vocabulary(GENERAL))
    for entry in answer["labels"]:
        assert not set(entry["parents"]) & set(names), "each thing is said once"
    (again,) = json.loads(tag(photos / "img1.png", "--vocabulary", "general", "--format", "json", "--top", 20).out)
    # the tiny tokenizer knows few words: many labels are alike, and the last bits order them
    scores, others = ([entry["score"] for entry in found["labels"]] for found in (answer, again))
    assert scores == pytest.approx(others, abs=1e-4)
    (asked,) = json.loads(tag(photos / "img1.png", "--labels", "cat,animal", "--format", "json").out)
    assert not any("parents" in entry for entry in asked["labels"])


def test_models_that_are_not_there(ramatch, photos, tmp_path):
    image = photos / "img1.png"
    ramatch("tag", image, "--labels", "cat", "--model", "nobody/no-such-clip").refused(
        "'nobody/no-such-clip' is neither a file or folder here nor a model", "HF_HUB_OFFLINE"
    )
    ramatch("tag", image, "--labels", "cat", "--model", tmp_path / "no" / "model").refused("no such file or folder")
    (tmp_path / "other").mkdir()
    ramatch("tag", image, "--labels", "cat", "--model", tmp_path / "other").refused("no config.json")
    (tmp_path / "other" / "config.json").write_text('{"model_type": "resnet"}')
    ramatch("tag", image, "--labels", "cat", "--model", tmp_path / "other").refused("'resnet' model", "CLIP")


def test_debug_shows_the_traceback(photos):
    with pytest.raises(RamatchError, match="no label in it"):
        main(["--debug", "tag", str(photos), "--labels", " , "])


# ------------------------------------------------------------------------------------------------ as a program


def program(*arguments: object, command: Sequence[str] = ("-m", "ramatch"), **environment: str) -> subprocess.Popen:
    paths = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        [sys.executable, *command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
    )


def test_a_reader_that_goes_away_is_no_error(photos, model):
    process = program("tag", photos, "--labels", LABELS, "--model", model, "--format", "jsonl", "--batch-size", 1)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before the first answer, as `| true` would
    err = process.stderr.read().decode()
    assert process.wait(timeout=120) == 0, err
    assert err == ""


def test_a_report_is_finished_even_if_no_one_reads_the_answers(photos, model, tmp_path, monkeypatch):
    class Closed(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            if self.writes > 2:
                raise BrokenPipeError
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", closed := Closed())
    options = ["--labels", LABELS, "--model", str(model), "--device", "cpu", "--report", str(tmp_path / "r.html")]
    assert main(["tag", str(photos), *options]) == 0
    assert closed.writes == 3  # and no more after that
    assert (tmp_path / "r.html").read_text().count('<article class="card"') == 4


def test_a_terminal_that_cannot_show_everything(model, tmp_path):
    put_photos(tmp_path, "größe.png")
    process = program(
        "tag", tmp_path / "größe.png", "--labels", "cat", "--model", model, PYTHONIOENCODING="ascii", PYTHONUTF8="0"
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, b"")
    assert out.decode("ascii").splitlines()[1] == "  cat   1.00  " + 20 * "?"  # one label alone: relative, so 1


# ------------------------------------------------------------------------------------------------ hostile names


def test_cells_that_begin_like_formulas_are_quoted(tag, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(photos)
    photo = Path("img1.png").rename("=cmd|' C calc'!A0.png")
    labels = tmp_path / "labels.txt"
    labels.write_text("=HYPERLINK(x)\n+1\n@SUM(1)\n-2\nplain = word\n")
    rows = list(csv.reader(io.StringIO(tag(photo, "--labels-file", labels, "--format", "csv", "--top", 9).out)))[1:]
    assert len(rows) == 5
    assert sorted(row[1] for row in rows) == ["'+1", "'-2", "'=HYPERLINK(x)", "'@SUM(1)", "plain = word"]
    assert {row[0] for row in rows} == {"'=cmd|' C calc'!A0.png"}
    assert not [cell for row in rows for cell in row if cell[:1] in ("=", "+", "@", "\t", "\r")]


@pytest.mark.skipif(sys.platform != "linux", reason="names as bytes")
def test_names_that_are_not_text_reach_neither_terminal_nor_traceback(tag, photos, tmp_path):
    content = (photos / "img1.png").read_bytes()
    folder = tmp_path / "odd"
    folder.mkdir()
    for name in (b"caf\xe9.png", b"\x1b[31mred.png", b"\xc2\x9b2J.png"):
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write(content)
    with open(os.path.join(os.fsencode(folder), b"\x1b]0;broken\x07.png"), "wb") as file:
        file.write(b"broken")
    for style in ("table", "csv", "json", "jsonl"):
        for out in ((), ("--out", tmp_path / "out.txt", "--overwrite")):
            result = tag(folder, "--labels", "red,blue", "--format", style, *out)
            assert result.code == 1
            assert "could not read" in result.err
            shown = result.err + (result.out if style in ("table", "csv") else "")
            assert not [c for c in shown if not c.isprintable() and c != "\n"]
    assert (tmp_path / "out.txt").read_text(encoding="utf-8").count('"image"') == 3
