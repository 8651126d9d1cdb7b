"""Hugging Face folders: save_to_disk and parquet, written by the real libraries."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from data_helpers import encode, put

from ramatch.data import list_splits, read_annotations
from ramatch.errors import RamatchError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = {
    "image": [{"bytes": encode((i, 0, 0)), "path": f"{i}.png"} for i in range(5)],
    "labels": [["cat"], ["cat", "dog"], [], ["dog"], ["dog", "dog"]],
}


def reds(annotations: object) -> list[int]:
    return [r.load().getpixel((0, 0))[0] for r in annotations]


def test_parquet_file_with_row_groups(tmp_path: Path) -> None:
    parquet.write_table(arrow.table(ROWS), tmp_path / "x.parquet", row_group_size=2)
    a = read_annotations(tmp_path / "x.parquet")
    assert a.classes == ("cat", "dog")
    assert [r.labels for r in a] == [("cat",), ("cat", "dog"), (), ("dog",), ("dog",)]
    assert a.summary.count("duplicate label") == 1
    assert reds(pickle.loads(pickle.dumps(a))) == [0, 1, 2, 3, 4]


def test_parquet_folder_with_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = arrow.table(ROWS)
    parquet.write_table(table.slice(0, 2), tmp_path / "data" / "train-00000-of-00002.parquet")
    parquet.write_table(table.slice(2, 2), tmp_path / "data" / "train-00001-of-00002.parquet")
    parquet.write_table(table.slice(4, 1), tmp_path / "data" / "test-00000-of-00001.parquet")
    assert list_splits(tmp_path) == ["test", "train"]
    assert reds(read_annotations(tmp_path, split="train")) == [0, 1, 2, 3]
    with pytest.raises(RamatchError, match="splits here: test, train"):
        read_annotations(tmp_path)
    with pytest.raises(RamatchError, match="no split 'val'"):
        read_annotations(tmp_path, split="val")


def test_same_stored_name_is_not_the_same_picture(tmp_path: Path) -> None:
    cells = [{"bytes": encode((i, 0, 0)), "path": "image.png"} for i in range(3)]
    parquet.write_table(arrow.table({"image": cells, "labels": [["a"], ["b"], ["a"]]}), tmp_path / "x.parquet")
    assert reds(read_annotations(tmp_path / "x.parquet")) == [0, 1, 2]


def test_parquet_of_paths_and_of_plain_bytes(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    parquet.write_table(arrow.table({"path": ["a.png", "b.png"], "tags": ["cat;dog", "dog"]}), tmp_path / "p.parquet")
    a = read_annotations(tmp_path / "p.parquet")
    assert ([r.labels for r in a], reds(a)) == ([("cat", "dog"), ("dog",)], [0, 1])
    parquet.write_table(arrow.table({"jpg": [encode((7, 0, 0))], "label": ["cat"]}), tmp_path / "b.parquet")
    assert reds(read_annotations(tmp_path / "b.parquet")) == [7]


def test_parquet_without_labels(tmp_path: Path) -> None:
    parquet.write_table(arrow.table({"image": ROWS["image"]}), tmp_path / "x.parquet")
    with pytest.raises(RamatchError, match="no column of labels"):
        read_annotations(tmp_path / "x.parquet")


def test_row_without_picture_is_an_empty_row_or_missing(tmp_path: Path) -> None:
    put(tmp_path, "here.png")
    cells = [{"bytes": None, "path": "here.png"}, {"bytes": None, "path": "gone.png"}, {"bytes": None, "path": None}]
    kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
    table = arrow.table({"image": arrow.array(cells, kind), "labels": [["a"]] * 3})
    for name, write in {"x.arrow": _write_arrow, "x.parquet": parquet.write_table}.items():
        write(table, tmp_path / name)
        a = read_annotations(tmp_path / name)
        assert [r.key for r in a] == ["here.png"], name
        assert a.summary.count("missing image") == 1
        assert a.summary.count("empty row") == 1


def _write_arrow(table: object, path: Path) -> None:
    with arrow.OSFile(str(path), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def test_save_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        image=datasets.Image(), labels=datasets.Sequence(datasets.ClassLabel(names=["cat", "dog"]))
    )
    rows = {"image": ROWS["image"], "labels": [[0], [0, 1], [], [1], [1]]}
    both = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=both, test=both.select([3])).save_to_disk(str(tmp_path / "d"))
    assert list_splits(tmp_path / "d") == ["train", "test"]
    a = read_annotations(tmp_path / "d", split="train")
    assert a.classes == ("cat", "dog")
    assert [r.labels for r in a] == [("cat",), ("cat", "dog"), (), ("dog",), ("dog",)]
    assert reds(pickle.loads(pickle.dumps(a))) == [0, 1, 2, 3, 4]
    with pytest.raises(RamatchError, match="splits here: train, test"):
        read_annotations(tmp_path / "d")
    assert len(read_annotations(tmp_path / "d" / "train")) == 5


def test_save_to_disk_as_parquet_keeps_class_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["cat", "dog"]))
    rows = {"image": ROWS["image"], "label": [0, 1, 1, 0, 1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "x.parquet"))
    a = read_annotations(tmp_path / "x.parquet")
    assert a.classes == ("cat", "dog")
    assert [r.labels[0] for r in a] == ["cat", "dog", "dog", "cat", "dog"]


def test_pictures_of_all_batches_are_told_apart(tmp_path: Path) -> None:
    table = arrow.table(ROWS)
    with arrow.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    a = read_annotations(tmp_path / "x.arrow")
    assert reds(a) == [0, 1, 2, 3, 4]
    assert len({str(r.image) for r in a}) == 5


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_paths_of_either_kind_of_text(tmp_path: Path, kind: str) -> None:
    put(tmp_path, "a.png", "b.png")
    paths = arrow.array(["a.png", "b.png"], getattr(arrow, kind)())
    inside = arrow.StructArray.from_arrays([paths], ["path"])  # without bytes
    for column in (paths, inside):
        table = arrow.table({"image": column, "tags": ["cat;dog", "dog"]})
        for name, write in {"x.arrow": _write_arrow, "x.parquet": parquet.write_table}.items():
            write(table, tmp_path / name)
            assert reds(read_annotations(tmp_path / name)) == [0, 1], name
