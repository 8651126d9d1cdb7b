"""Captions: each form, and the awkward cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_helpers import encode, put, put_json, put_tar

from ramatch.data import Captions, read_captions
from ramatch.errors import RamatchError

EXPECTED = [("a.png", ["one", "two words"]), ("b.png", ["three"])]


def pairs(captions: Captions) -> list[tuple[str, list[str]]]:
    return [(record.key, list(record.captions)) for record in captions.records]


def test_lists(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    path = put_json(tmp_path / "captions.json", {"images": [["a.png", ["one", "two words"]], ["b.png", "three"]]})
    captions = read_captions(path)
    assert pairs(captions) == EXPECTED
    assert captions.records[1].load().getpixel((0, 0))[0] == 1
    assert pairs(read_captions(tmp_path)) == EXPECTED  # by folder
    assert "3 captions" in captions.summary.to_text()


def test_coco_captions(tmp_path: Path) -> None:
    put(tmp_path, "val2014/a.png", "val2014/b.png")
    content = {
        "images": [{"id": 5, "file_name": "a.png"}, {"id": 6, "file_name": "b.png"}],
        "annotations": [
            {"image_id": 5, "caption": "one"},
            {"image_id": 6, "caption": "three"},
            {"image_id": 5, "caption": " two  words\n"},
        ],
    }
    path = put_json(tmp_path / "annotations" / "captions_val2014.json", content)
    assert pairs(read_captions(path)) == EXPECTED


def test_karpathy(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    entry = {"filename": "a.png", "split": "restval", "sentences": [{"raw": "one"}, {"raw": "two words"}]}
    other = {"filename": "b.png", "split": "test", "sentences": [{"raw": "three"}]}
    path = put_json(tmp_path / "dataset_flickr8k.json", {"images": [entry, other]})
    assert pairs(read_captions(path)) == EXPECTED
    assert pairs(read_captions(path, split="train")) == EXPECTED[:1]
    assert pairs(read_captions(path, split="test")) == EXPECTED[1:]


def test_flickr_tokens(tmp_path: Path) -> None:
    put(tmp_path / "pictures", "a.png", "b.png")
    path = tmp_path / "Flickr8k.token.txt"
    path.write_text("a.png#0\tone\na.png#1\ttwo words\nb.png#0\tthree\n\n")
    assert pairs(read_captions(path, tmp_path / "pictures")) == EXPECTED
    path.write_text("a.png#0\tone\nrubbish\n")
    with pytest.raises(RamatchError, match="line 2"):
        read_captions(path, tmp_path / "pictures")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("captions.csv", "image,caption\na.png,one\na.png,two words\nb.png,three\n"),
        ("captions.txt", "image,caption\na.png,one\na.png,two words\nb.png,three\n"),
        ("captions.tsv", "file\tsentence\na.png\tone\na.png\ttwo words\nb.png\tthree\n"),
        ("captions.jsonl", "\n".join(json.dumps({"path": key, "captions": texts}) for key, texts in EXPECTED)),
    ],
)
def test_tables(tmp_path: Path, name: str, text: str) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / name).write_text(text)
    assert pairs(read_captions(tmp_path / name)) == EXPECTED


def test_awkward_cases_and_several_roots(tmp_path: Path) -> None:
    put_tar(tmp_path / "one" / "x.tar", {"p/a.png": encode((1, 0, 0))})
    put_tar(tmp_path / "two" / "y.tar", {"q/b.png": encode((2, 0, 0))})
    images = [
        ["p/a.png", ["one", ""]],
        ["/foreign/p/a.png", ["two"]],
        ["q/b.png", ["three"]],
        ["gone.png", ["four"]],
        ["", ["five"]],
        [],
    ]
    path = put_json(tmp_path / "one" / "captions.json", {"images": images})
    captions = read_captions(path, [tmp_path / "two"])
    assert pairs(captions) == [("p/a.png", ["one", "two"]), ("q/b.png", ["three"])]
    assert [r.load().getpixel((0, 0))[0] for r in captions.records] == [1, 2]
    expected = ["empty caption", "foreign root path", "duplicate image", "missing image"]
    assert {k: captions.summary.count(k) for k in expected} == dict.fromkeys(expected, 1)
    assert captions.summary.count("empty row") == 2


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(RamatchError, match="expected one captions file"):
        read_captions(tmp_path)
    with pytest.raises(RamatchError, match="no such"):
        read_captions(tmp_path / "x.json")
    path = put_json(tmp_path / "captions.json", {"images": [["gone.png", ["x"]]]})
    with pytest.raises(RamatchError, match="images_roots"):
        read_captions(path)
    put_json(path, {"images": [["gone.png"]]})
    with pytest.raises(RamatchError, match=r"images\[0\]"):
        read_captions(path)
    (tmp_path / "t.csv").write_text("image,colour\na.png,red\n")
    with pytest.raises(RamatchError, match="one of captions"):
        read_captions(tmp_path / "t.csv")
