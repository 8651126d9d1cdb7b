"""Parts of an output: the rows of the local run, each once, however often a run is cut short; no cluster here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import LABELS, Result
from scale_helpers import put_parquet, put_tar, rows_of, same

from ramatch.scale import tag as tag_module
from ramatch.scale.parts import MANIFEST, Parts, from_row, part_name

Call = Callable[..., Result]


def options(model: Path, *more: object) -> list[object]:
    return ["--model", model, "--labels", LABELS, "--device", "cpu", "--top", 3, *more]


@pytest.fixture
def local(ramatch: Call, model: Path, photos: Path, tmp_path: Path) -> list[dict]:
    """The answers of `ramatch tag` as it always was."""
    done = ramatch("tag", photos, *options(model), "--out", tmp_path / "local.jsonl")
    assert done.code == 1  # one is broken
    return rows_of(tmp_path / "local.jsonl")


@pytest.mark.parametrize("out", ["out.jsonl", "out.parquet", "out"])
def test_the_rows_of_the_local_run(
    ramatch: Call, model: Path, photos: Path, tmp_path: Path, out: str, local: list
) -> None:
    done = ramatch("tag", photos, *options(model, "--part-size", 4, "--engine", "local"), "--out", tmp_path / out)
    assert done.code == 1
    assert "1 of 11 images could not be read" in done.err
    rows = rows_of(tmp_path / out)
    same(rows, local)
    [broken] = [row for row in rows if "error" in row]
    assert broken.keys() == {"image", "error"}
    assert Path(broken["image"]).name == "broken.jpg"
    assert not (tmp_path / f"{out}.parts").exists()
    refused = ramatch("tag", photos, *options(model, "--part-size", 4, "--engine", "local"), "--out", tmp_path / out)
    refused.refused("--overwrite")
    again = ramatch("tag", photos, *options(model, "--engine", "local", "--overwrite"), "--out", tmp_path / out)
    assert again.code == 1
    same(rows_of(tmp_path / out), local)


def test_one_file_is_in_the_order_of_the_input(ramatch: Call, model: Path, photos: Path, tmp_path: Path) -> None:
    ramatch("tag", photos, *options(model, "--part-size", 4, "--engine", "local"), "--out", tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    found = [Path(json.loads(line)["image"]).name for line in lines]
    assert found == ["broken.jpg", *(f"img{i}.png" for i in range(9)), "img3.webp"]


@pytest.mark.parametrize("kind", ["tar", "parquet", "store"])
def test_shards_and_stores_give_the_same_answers(
    ramatch: Call, model: Path, photos: Path, tmp_path: Path, kind: str, local: list
) -> None:
    files = sorted(photos.glob("img*.png"))
    if kind == "tar":
        put_tar(tmp_path / "a.tar", files)
    elif kind == "parquet":
        put_parquet(tmp_path / "a.parquet", files)
    given = photos.as_uri() if kind == "store" else tmp_path / f"a.{kind}"
    done = ramatch("tag", given, *options(model, "--part-size", 2, "--engine", "local"), "--out", tmp_path / "out")
    assert done.code == (1 if kind == "store" else 0), done.err
    rows = [row for row in rows_of(tmp_path / "out") if "error" not in row]
    wanted = local if kind == "store" else [row for row in local if row["image"].endswith(".png")]
    same([{**row, "image": before["image"]} for row, before in zip(rows, wanted, strict=True)], wanted)


def test_what_is_there_is_not_done_again(
    ramatch: Call, model: Path, photos: Path, tmp_path: Path, local: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.parquet"
    call = ["tag", photos, *options(model, "--part-size", 3, "--engine", "local"), "--out", out]
    run, pieces = tag_module.Tagger.__call__, []

    def stopped(self, piece):  # the power goes in the third part
        pieces.append(piece.unit)
        if len(pieces) == 3:
            raise KeyboardInterrupt
        return run(self, piece)

    monkeypatch.setattr(tag_module.Tagger, "__call__", stopped)
    assert ramatch(*call).code == 130
    parts = Path(f"{out}.parts")
    done = sorted(parts.glob("part-*"))
    assert len(done) == 2
    assert not out.exists()
    whole = done[1].read_bytes()
    done[1].write_bytes(whole[: len(whole) // 2])  # a disk that lost what it had said it wrote
    (parts / f".{part_name('0' * 20, 0)}.123.tmp").write_bytes(b"half")
    ramatch(*call).refused("--resume")
    ramatch(
        "tag",
        photos,
        *options(model, "--part-size", 3, "--engine", "local", "--threshold", 0.5),
        "--out",
        out,
        "--resume",
    ).refused("threshold was None, is now 0.5")
    pieces[:] = ["before"] * 3
    assert ramatch(*call, "--resume").code == 1
    assert len(pieces) == 6, "the broken one and two that were not begun"
    same(rows_of(out), local)
    assert not parts.exists()


def test_other_images_are_refused(ramatch: Call, model: Path, photos: Path, tmp_path: Path) -> None:
    call = ["tag", photos, *options(model, "--engine", "local"), "--out", tmp_path / "out"]
    ramatch(*call)
    (photos / "img0.png").unlink()
    ramatch(*call, "--resume").refused("made of other images")


def test_a_folder_of_something_else_is_left_alone(ramatch: Call, model: Path, photos: Path) -> None:
    call = ["tag", photos, *options(model, "--engine", "local"), "--out", photos]
    for how in ([], ["--resume"], ["--overwrite"]):
        ramatch(*call, *how).refused("holds other files")
    assert len(list(photos.iterdir())) == 11


def test_a_part_that_is_missing_is_never_passed_over(ramatch: Call, model: Path, photos: Path, tmp_path: Path) -> None:
    from ramatch.errors import RamatchError
    from ramatch.scale.inputs import list_units

    ramatch("tag", photos, *options(model, "--part-size", 4, "--engine", "local"), "--out", tmp_path / "out")
    units = list_units([photos], part=4).units
    parts = Parts(str(tmp_path / "out"))
    assert parts.total(units) == (11, 1, 3)
    (tmp_path / "out" / part_name(units[1].key, 0)).unlink()
    with pytest.raises(RamatchError, match="1 of 3 units of work are not done"):
        parts.total(units)
    with pytest.raises(RamatchError, match="go on with --resume"):
        parts.merge(units, tmp_path / "merged.jsonl")
    assert not (tmp_path / "merged.jsonl").exists()


def test_other_programs_read_the_folder(ramatch: Call, model: Path, photos: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    ramatch("tag", photos, *options(model, "--part-size", 4, "--engine", "local"), "--out", tmp_path / "out")
    assert (tmp_path / "out" / MANIFEST).is_file()
    assert len(pandas.read_parquet(tmp_path / "out")) == 11


def test_rows_of_the_general_vocabulary_survive(photos: Path, tmp_path: Path) -> None:
    """Labels with parents, labels without familiarity, and relative scores: what JSON has, parquet gives back."""
    label = {"label": "dog", "score": 0.1, "calibrated": False, "familiarity": None}
    rows = [
        {
            "image": "a",
            "labels": [{**label, "probability": 0.1234, "parents": []}],
            "calibrated": True,
            "width": 3,
            "height": 2,
        },
        {"image": "b", "labels": [{**label, "relative": 0.5}], "calibrated": False, "width": 3, "height": 2},
        {"image": "c", "error": "broken"},
    ]
    parts = Parts(str(tmp_path / "out"))
    parts.write("0" * 20, 0, True, rows)
    assert rows_of(tmp_path / "out") == rows
    assert (
        from_row({**dict.fromkeys(("labels", "calibrated", "width", "height")), "image": "c", "error": "x"})["error"]
        == "x"
    )


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--out", "x.csv"], ".parquet, .jsonl or a folder"),
        (["--out", "x", "--report", "r.html"], "--report"),
        (["--out", "x", "--maps"], "--maps"),
        ([], "needs --out"),
    ],
)
def test_what_does_not_go_together_is_refused(
    ramatch: Call, model: Path, photos: Path, arguments: list, word: str
) -> None:
    ramatch("tag", photos, *options(model, "--engine", "local"), *arguments).refused(word)


def test_nothing_to_do_is_an_error(ramatch: Call, model: Path, tmp_path: Path) -> None:
    call = ["tag", tmp_path, *options(model, "--engine", "local"), "--out", tmp_path / "out"]
    ramatch(*call).refused("no images, tar shards or parquet files found")
    ramatch("tag", tmp_path, "--actors", 2).refused("--engine")
