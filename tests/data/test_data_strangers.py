"""Strangers' files: whatever is wrong with an annotation file, reading it succeeds or ends in a RamatchError."""

from __future__ import annotations

import copy
import io
import json
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from data_helpers import encode, put

from ramatch.data.captions import read_captions
from ramatch.data.check import check
from ramatch.data.records import list_splits, read_annotations
from ramatch.errors import RamatchError

ODD = [None, True, 0, -1, 1e300, float("nan"), float("inf"), 10**400, "", "\ud800", "x" * 5000, [], {}, [[]], {"a": {}}]
ODD_BYTES = [b"", b"\x00", b"\xff\xfe", b'"', b"\n\n", b"{", b"]", b",", b"<", b"9" * 6000, b"[" * 3000, b"-", b"e9999"]

COCO = {
    "categories": [{"id": 1, "name": "dog"}, {"id": 2, "name": "kite"}],
    "images": [{"id": 7, "file_name": "a.png", "width": 8, "height": 6}, {"id": 8, "coco_url": "http://x/y/b.png"}],
    "annotations": [{"id": 1, "image_id": 7, "category_id": 1, "bbox": [1, 2, 3, 4], "iscrowd": 1}],
}
LISTS = {"classes": ["dog", "kite"], "images": [["a.png", ["dog", 1]], ["b.png", ["kite"]]], "root": "."}
RECORDS = [
    {"image": "a.png", "labels": ["dog", {"name": "kite"}], "split": "train"},
    {"image": "b.png", "labels": "dog"},
]
MAPPING = {"a.png": {"dog": 1, "kite": 0}, "b.png": ["kite"]}
VOC = (
    "<annotation><filename>a.png</filename><size><width>8</width><height>6</height></size><object><name>dog</name>"
    "<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax><ymax>4</ymax></bndbox></object></annotation>"
)
CSV = "image,labels,split\na.png,dog;kite,train\nb.png,\"['dog']\",test\n"


def shard() -> bytes:
    members = {"k.png": encode(), "k.json": b'{"labels": ["dog", "kite"]}', "l.png": encode(), "l.cls": b"1,0"}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _arrow_bytes(kind: str) -> bytes:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    cells = [{"bytes": encode((i, 0, 0)), "path": f"{i}.png"} for i in range(3)]
    table = arrow.table({"image": cells, "labels": [["dog"], ["dog", "kite"], []]})
    sink = io.BytesIO()
    if kind == "parquet":
        parquet.write_table(table, sink, row_group_size=2)
    else:
        with arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue()


FILES: dict[str, tuple[str, Callable[[], bytes]]] = {  # format → (name of the file, a good one)
    "lists": ("x.json", lambda: json.dumps(LISTS).encode()),
    "coco": ("x.json", lambda: json.dumps(COCO).encode()),
    "records": ("x.json", lambda: json.dumps(RECORDS).encode()),
    "mapping": ("x.json", lambda: json.dumps(MAPPING).encode()),
    "jsonl": ("x.jsonl", lambda: "\n".join(map(json.dumps, RECORDS)).encode()),
    "csv": ("x.csv", CSV.encode),
    "one-hot": ("x.csv", lambda: b"image,dog,kite\na.png,1,0\nb.png,0,1\n"),
    "voc": ("voc/a.xml", VOC.encode),
    "sidecar": ("side/c.txt", lambda: b"dog\nkite\n"),
    "yolo": ("side/c.txt", lambda: b"0 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.1 0.1\n"),
    "webdataset": ("x.tar", shard),
    "parquet": ("x.parquet", lambda: _arrow_bytes("parquet")),
    "arrow": ("x.arrow", lambda: _arrow_bytes("arrow")),
    "saved": ("saved/state.json", lambda: b'{"_data_files": [{"filename": "x.arrow"}]}'),
}


def damage(content: bytes, draw: random.Random) -> bytes:
    """One to three bytes changed, cut out, doubled, or replaced by something odd."""
    for _ in range(draw.randint(1, 3)):
        at, length = draw.randrange(len(content) + 1), draw.choice([0, 1, 1, 1, 8, 200])
        new = draw.choice([bytes([draw.randrange(256)]), b"", content[at : at + length] * 2, draw.choice(ODD_BYTES)])
        content = content[:at] + new + content[at + length :]
    return content


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) in a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def mutations(good: Any, draw: random.Random) -> Any:
    """A JSON value in which something was replaced by an odd value, removed, or put inside another."""
    changed = copy.deepcopy(good)
    container, key = draw.choice(list(places(changed)))
    what = draw.randrange(3)
    if what == 0:
        container[key] = draw.choice(ODD)
    elif what == 1:
        del container[key]
    else:
        container[key] = draw.choice([[container[key]], {"name": container[key]}, str(container[key])])
    return changed


def survives(path: Path, file: Path, **options: Any) -> bool:
    """Whether it can be read; the only error allowed is ours, and it names the file or its folder."""
    try:
        if not options:
            list_splits(path)
            report = check(path, decode=True)
            (report.to_text() + json.dumps(report.to_dict(), ensure_ascii=False)).encode()
        for record in read_annotations(path, missing="keep", unknown="add", **options):
            "".join(record.labels).encode()
    except RamatchError as error:
        message = str(error)
    else:
        return True
    assert file.name in message or path.name in message
    return False


def layout(tmp_path: Path, kind: str) -> tuple[Path, Path]:
    """(what is read, the file to damage), with the pictures that the good file names."""
    put(tmp_path, "a.png", "b.png", "voc/a.png", "side/c.png")
    (tmp_path / "side" / "classes.txt").write_text("dog\nkite\n")
    (tmp_path / "saved").mkdir()
    if kind == "saved":
        (tmp_path / "saved" / "x.arrow").write_bytes(_arrow_bytes("arrow"))
    file = tmp_path / FILES[kind][0]
    return (file if file.parent == tmp_path else file.parent), file


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FILES)
def test_damaged_bytes_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    path, file = layout(tmp_path, kind)
    good = FILES[kind][1]()
    file.write_bytes(good)
    assert survives(path, file), "the good file must be read"
    draw = random.Random(f"bytes {kind}")
    read = 0
    for _ in range(200):
        file.write_bytes(damage(good, draw))
        read += survives(path, file)
    assert read < 200  # some damage was noticed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "good"), [("lists", LISTS), ("coco", COCO), ("records", RECORDS), ("mapping", MAPPING)]
)
def test_odd_values_are_read_or_refused(tmp_path: Path, kind: str, good: Any) -> None:
    path, file = layout(tmp_path, kind)
    draw = random.Random(f"values {kind}")
    outcomes = set()
    for _ in range(300):
        file.write_text(json.dumps(mutations(good, draw)), encoding="utf-8")
        outcomes.add(survives(path, file))
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    "good",
    [
        {"images": [["a.png", ["one", "two"]], ["b.png", "three"]]},
        {
            "images": [{"id": 5, "file_name": "a.png"}, {"id": 6, "file_name": "b.png"}],
            "annotations": [{"image_id": 5, "caption": "one"}, {"image_id": 6, "caption": "two"}],
        },
        {"images": [{"filename": "a.png", "split": "val", "sentences": [{"raw": "one"}]}]},
    ],
    ids=["lists", "coco", "karpathy"],
)
def test_odd_captions_are_read_or_refused(tmp_path: Path, good: Any) -> None:
    put(tmp_path, "a.png", "b.png")
    file = tmp_path / "captions.json"
    draw = random.Random("captions")
    outcomes = set()
    for _ in range(300):
        file.write_text(json.dumps(mutations(good, draw)), encoding="utf-8")
        try:
            read_captions(file)
            message = ""
        except RamatchError as error:
            message = str(error)
        assert not message or file.name in message
        outcomes.add(not message)
    assert outcomes == {True, False}


@pytest.mark.parametrize("format", ["lists", "coco", "table", "voc", "hub", "webdataset", "sidecars"])
@pytest.mark.parametrize("kind", FILES)
def test_forcing_the_wrong_format(tmp_path: Path, kind: str, format: str) -> None:
    path, file = layout(tmp_path, kind)
    file.write_bytes(FILES[kind][1]())
    survives(path, file, format=format)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"images": ' + "9" * 10_000 + "}"])
def test_nesting_and_numbers_beyond_reason(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RamatchError, match=r"x\.json: not usable JSON"):
        read_annotations(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": [7]}, r"images\[0\] is 7; expected an object"),
        ({"images": [{"file_name": "a.png"}]}, r"images\[0\] lacks the field 'id'"),
        ({"categories": {"id": 1}}, '"categories" is .*; expected a list'),
        ({"annotations": [{"image_id": 7, "category_id": 1, "bbox": [1, 2, "x", 4]}]}, r"annotations\[0\]: bbox is"),
        ({"images": [{"id": 7, "width": "wide", "height": 6}]}, r"images\[0\]: width and height"),
    ],
)
def test_coco_errors_say_where(tmp_path: Path, change: dict, message: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps({**COCO, **change}))
    with pytest.raises(RamatchError, match=r"x\.json: " + message):
        read_annotations(tmp_path / "x.json", format="coco")


def test_label_that_is_no_name(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "x.json").write_text(json.dumps({"images": [["a.png", ["dog", ["kite"]]]]}))
    with pytest.raises(RamatchError, match=r"x\.json: images\[0\]: a\.png has the label \['kite'\]; expected a name"):
        read_annotations(tmp_path / "x.json")


def test_a_shard_whose_member_is_longer_than_the_file(tmp_path: Path) -> None:
    whole = shard()
    (tmp_path / "x.tar").write_bytes(whole[:600])
    with pytest.raises(RamatchError, match=r"x\.tar"):
        read_annotations(tmp_path / "x.tar")
