"""COCO, VOC, tables, sidecars, WebDataset, and how a format and a split are recognised."""

from __future__ import annotations

import csv
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from data_helpers import encode, put, put_json, put_tar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramatch.data import list_splits, read_annotations
from ramatch.errors import RamatchError


def labels_of(path: Path, **options: object) -> dict[str, tuple[str, ...]]:
    return {r.key: r.labels for r in read_annotations(path, **options)}


# ------------------------------------------------------------------------------------------------------ COCO


def coco(**changes: object) -> dict:
    content = {
        "categories": [{"id": 3, "name": "cat"}, {"id": 9, "name": "traffic light"}],
        "images": [
            {"id": 1, "file_name": "a.png", "width": 8, "height": 6},
            {"id": 2, "file_name": "b.png", "width": 8, "height": 6},
        ],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 9, "bbox": [1, 2, 3, 4], "iscrowd": 0},
            {"id": 2, "image_id": 1, "category_id": 9, "bbox": [0, 0, 1, 1], "iscrowd": 1},
            {"id": 3, "image_id": 1, "category_id": 3, "bbox": [0, 0, 2, 2]},
        ],
    }
    return {**content, **changes}


def test_coco(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    a = read_annotations(put_json(tmp_path / "x.json", coco()))
    assert a.format == "COCO instances JSON"
    assert a.classes == ("cat", "traffic light")
    assert [(r.key, r.labels) for r in a] == [("a.png", ("traffic light", "cat")), ("b.png", ())]
    box = a.records[0].boxes[0]
    assert (box.label, box.corners, box.crowd) == ("traffic light", (1, 2, 4, 6), False)
    assert [b.crowd for b in a.records[0].boxes] == [False, True, False]
    assert a.records[0].size == (8, 6)
    assert a.summary.count("image without labels") == 1
    assert a.summary.count("duplicate label") == 0  # several instances of a category are no mistake
    assert "1 crowd" in a.summary.to_text()


def test_coco_dangling_annotations(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    bad = [{"id": 1, "image_id": 77, "category_id": 3}, {"id": 2, "image_id": 1, "category_id": 77}]
    a = read_annotations(put_json(tmp_path / "x.json", coco(annotations=bad)))
    assert a.summary.count("dangling annotation") == 2


def test_coco_layout_of_the_download(tmp_path: Path) -> None:
    put(tmp_path, "train2017/a.png", "train2017/b.png")
    put_json(tmp_path / "annotations" / "instances_train2017.json", coco())
    put_json(tmp_path / "annotations" / "instances_val2017.json", coco(annotations=[]))
    put_json(tmp_path / "annotations" / "captions_train2017.json", {})
    assert list_splits(tmp_path) == ["instances_train2017", "instances_val2017"]
    assert labels_of(tmp_path, split="train")["a.png"] == ("traffic light", "cat")
    assert labels_of(tmp_path, split="train2017")["a.png"] == ("traffic light", "cat")
    with pytest.raises(RamatchError, match="several annotation files"):
        read_annotations(tmp_path)
    with pytest.raises(RamatchError, match="no split 'test'"):
        read_annotations(tmp_path, split="test")


def test_coco_boxes_follow_the_classes(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    a = read_annotations(put_json(tmp_path / "x.json", coco()), classes=["cat"])
    assert [b.label for b in a.records[0].boxes] == ["cat"]


# ------------------------------------------------------------------------------------------------------- VOC

VOC = """<annotation><filename>{name}</filename><size><width>8</width><height>6</height><depth>3</depth></size>
{objects}</annotation>"""
OBJECT = """<object><name>{}</name><difficult>{}</difficult>
<bndbox><xmin>1</xmin><ymin>2</ymin><xmax>5</xmax><ymax>6</ymax></bndbox></object>"""


def voc_folder(root: Path) -> Path:
    put(root, "JPEGImages/1.png", "JPEGImages/2.png")
    (root / "Annotations").mkdir()
    two = OBJECT.format("dog", 0) + OBJECT.format("dog", 1) + OBJECT.format("person", 0)
    (root / "Annotations" / "1.xml").write_text(VOC.format(name="1.png", objects=two))
    (root / "Annotations" / "2.xml").write_text(VOC.format(name="2.png", objects=OBJECT.format("cat", 1)))
    lists = root / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("1\n3\n")
    (lists / "cat_train.txt").write_text("1 -1\n")
    return root


def test_voc(tmp_path: Path) -> None:
    a = read_annotations(voc_folder(tmp_path))
    assert [(r.key, r.labels) for r in a] == [("1.png", ("dog", "person")), ("2.png", ("cat",))]
    assert len(a.classes) == 20
    assert [b.difficult for b in a.records[0].boxes] == [False, True, False]
    assert a.records[0].boxes[0].corners == (1, 2, 5, 6)
    assert a.records[0].size == (8, 6)
    assert "2 objects marked difficult" in a.summary.to_text()


def test_voc_split_and_other_classes(tmp_path: Path) -> None:
    voc_folder(tmp_path)
    a = read_annotations(tmp_path, split="train")
    assert [r.key for r in a] == ["1.png"]
    assert a.summary.count("missing annotation") == 1
    assert list_splits(tmp_path) == ["train"]
    with pytest.raises(RamatchError, match="splits here: train"):
        read_annotations(tmp_path, split="val")
    (tmp_path / "Annotations" / "2.xml").write_text(VOC.format(name="2.png", objects=OBJECT.format("yak", 0)))
    assert read_annotations(tmp_path).classes == ("dog", "person", "yak")


def test_voc_devkit_and_flat(tmp_path: Path) -> None:
    (tmp_path / "kit" / "VOC2007").mkdir(parents=True)
    voc_folder(tmp_path / "kit" / "VOC2007")
    assert len(read_annotations(tmp_path / "kit")) == 2
    flat = put(tmp_path / "flat", "x.png")
    (flat / "x.xml").write_text(VOC.format(name="x.png", objects=OBJECT.format("dog", 0)))
    assert labels_of(flat) == {"x.png": ("dog",)}


def test_voc_hostile_and_broken_xml(tmp_path: Path) -> None:
    voc_folder(tmp_path)
    (tmp_path / "Annotations" / "2.xml").write_text('<!DOCTYPE x [<!ENTITY a "b">]><annotation>&a;</annotation>')
    with pytest.raises(RamatchError, match="document type"):
        read_annotations(tmp_path)
    (tmp_path / "Annotations" / "2.xml").write_text("<annotation>")
    with pytest.raises(RamatchError, match=r"2\.xml"):
        read_annotations(tmp_path)


# ---------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    "text",
    [
        "image,labels\na.png,cat;traffic light\nb.png,dog\n",
        "path,tags\na.png,cat|traffic light\nb.png,dog\n",
        'file_name,label\na.png,"cat, traffic light"\nb.png,dog\n',
        'Filename,Classes\na.png,"[""cat"", ""traffic light""]"\nb.png,"[""dog""]"\n',
        "Filename,Classes\na.png,\"['cat', 'traffic light']\"\nb.png,['dog']\n",
        "image;labels\na.png;cat, traffic light\nb.png;dog\n",
        "img,label\na.png,cat\na.png,traffic light\nb.png,dog\n",
        "image,cat,traffic light,dog\na.png,1,1,0\nb.png,0,0,1\n",
        "image,width,cat,traffic light,dog\na.png,640,1,True,0\nb.png,480,-1,False,1\n",
        "\ufeffImage Path,Labels\r\na.png,cat;traffic light\r\nb.png,dog\r\n",
        "a.png,cat,traffic light\nb.png,dog\n",
        "a.png,cat;traffic light\nb.png,dog\n",
    ],
)
def test_csv_spellings(tmp_path: Path, text: str) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "t.csv").write_text(text, encoding="utf-8")
    found = labels_of(tmp_path / "t.csv")
    assert {k: set(v) for k, v in found.items()} == {"a.png": {"cat", "traffic light"}, "b.png": {"dog"}}


def test_tsv_jsonl_and_json(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "t.tsv").write_text("image\tlabels\na.png\tcat,dog\n")
    assert labels_of(tmp_path / "t.tsv") == {"a.png": ("cat", "dog")}
    lines = [
        {"file_name": "a.png", "tags": ["cat", {"name": "dog"}]},
        {"file_name": "b.png", "tags": {"cat": 1, "x": 0}},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert labels_of(tmp_path / "t.jsonl") == {"a.png": ("cat", "dog"), "b.png": ("cat",)}
    put_json(tmp_path / "r.json", lines)
    assert labels_of(tmp_path / "r.json") == {"a.png": ("cat", "dog"), "b.png": ("cat",)}
    put_json(tmp_path / "m.json", {"a.png": ["cat"], "b.png": "dog;cat"})
    assert labels_of(tmp_path / "m.json") == {"a.png": ("cat",), "b.png": ("dog", "cat")}


def test_table_understood_message_and_issues(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "t.csv").write_text("image,labels\na.png,cat;cat;\n,dog\ngone.png,cat\nb.png,\n\n")
    summary = read_annotations(tmp_path / "t.csv").summary
    assert "labels from column 'labels' (one row per image, labels separated by ';')" in summary.to_text()
    expected = {"duplicate label": 1, "empty label": 1, "missing image": 1, "image without labels": 1}
    assert {k: summary.count(k) for k in expected} == expected
    assert summary.count("empty row") >= 1


def test_one_label_per_row_is_no_duplicate(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "t.csv").write_text("image,label\na.png,cat\na.png,dog\n")
    summary = read_annotations(tmp_path / "t.csv").summary
    assert "one label per row" in summary.to_text()
    assert summary.count("duplicate image") == 0


def test_separator_is_chosen_for_the_whole_column(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "t.csv").write_text('image,labels\na.png,"salt, pepper;oil"\nb.png,"salt, pepper"\n')
    assert labels_of(tmp_path / "t.csv") == {"a.png": ("salt, pepper", "oil"), "b.png": ("salt, pepper",)}


def test_spaces_separate_only_known_classes(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "t.csv").write_text("image,tags\na.png,haze primary\n")
    assert labels_of(tmp_path / "t.csv") == {"a.png": ("haze primary",)}
    assert labels_of(tmp_path / "t.csv", classes=["haze", "primary"]) == {"a.png": ("haze", "primary")}


def test_split_column_and_names_without_extension(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    (tmp_path / "t.csv").write_text("image_id,labels,split\na,cat,train\nb,dog,test\n")
    assert labels_of(tmp_path / "t.csv", split="test") == {"b": ("dog",)}
    assert list_splits(tmp_path / "t.csv") == ["test", "train"]
    with pytest.raises(RamatchError, match="no rows with split"):
        read_annotations(tmp_path / "t.csv", split="val")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("colour,labels\nred,cat\n", "no column names the image"),
        ("image,width\na.png,640\n", "no labels found"),
        ("image,image,labels\na.png,a.png,x\n", "twice"),
    ],
)
def test_unusable_tables(tmp_path: Path, text: str, message: str) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(RamatchError, match=message):
        read_annotations(tmp_path / "t.csv")


def test_bad_jsonl_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"image": "a.png", "labels": []}\n{oops\n')
    with pytest.raises(RamatchError, match="line 2"):
        read_annotations(tmp_path / "t.jsonl")


WORDS = st.text(st.sampled_from("abcé xyz'-"), min_size=1, max_size=8).map(lambda t: " ".join(t.split())).filter(bool)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.lists(WORDS, max_size=4, unique=True), min_size=2, max_size=4), separator=st.sampled_from(";|,")
)
def test_csv_round_trip(tmp_path: Path, rows: list[list[str]], separator: str) -> None:
    """What a spreadsheet writes, we read: any label text, any of the separators."""
    if not any(rows):
        rows[0] = ["something"]
    names = put(tmp_path, *(f"{i}.png" for i in range(len(rows))))
    with open(tmp_path / "t.csv", "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "labels"])
        writer.writerows([f"{i}.png", separator.join(row)] for i, row in enumerate(rows))
    classes = sorted({label for row in rows for label in row})
    found = read_annotations(names / "t.csv", classes=classes)
    assert [list(r.labels) for r in found] == rows


# -------------------------------------------------------------------------------------------------- sidecars


def test_sidecars(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png", "sub/c.png", "d.png", "e.png")
    (tmp_path / "a.txt").write_text("cat\ntraffic light\n\n")
    (tmp_path / "b.txt").write_text("cat, dog")
    (tmp_path / "sub" / "c.txt").write_text("dog")
    (tmp_path / "d.txt").write_text("")
    (tmp_path / "gone.txt").write_text("dog")
    (tmp_path / "README.txt").write_text("read me")
    a = read_annotations(tmp_path)
    assert {r.key: r.labels for r in a} == {
        "a.png": ("cat", "traffic light"),
        "b.png": ("cat", "dog"),
        "d.png": (),
        "sub/c.png": ("dog",),
    }
    assert a.summary.count("image without sidecar") == 1
    assert a.summary.count("missing image") == 1
    assert a.summary.count("image without labels") == 1


def test_sidecars_in_split_folders_and_class_file(tmp_path: Path) -> None:
    put(tmp_path, "train/a.png", "val/b.png")
    (tmp_path / "train" / "a.txt").write_text("dog")
    (tmp_path / "val" / "b.txt").write_text("cat")
    (tmp_path / "train" / "classes.txt").write_text("cat\ndog\n")
    a = read_annotations(tmp_path, split="train")
    assert a.classes == ("cat", "dog")
    assert [r.key for r in a] == ["a.png"]


def test_yolo_sidecars_use_class_numbers(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "a.txt").write_text("1 0.5 0.5 0.2 0.2\n1 0.1 0.1 0.1 0.1\n0 0.5 0.5 1 1\n")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert labels_of(tmp_path) == {"a.png": ("dog", "cat")}


def test_unrelated_json_does_not_hide_the_sidecars(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    (tmp_path / "a.txt").write_text("dog")
    put_json(tmp_path / "info.json", {"author": "me"})
    assert labels_of(tmp_path) == {"a.png": ("dog",)}


def test_folder_without_any_annotation(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    with pytest.raises(RamatchError, match="not recognised as any annotation format"):
        read_annotations(tmp_path)


# ------------------------------------------------------------------------------------------------------ tars


def test_json_beside_tars(tmp_path: Path) -> None:
    """The shared form: annotation file, and shards whose member names are its paths."""
    put_tar(tmp_path / "train-00.tar", {"train/1.png": encode((1, 0, 0))})
    put_tar(tmp_path / "train-01.tar", {"./train/2.png": encode((2, 0, 0))})
    put_tar(tmp_path / "test-00.tar", {"test/3.png": encode((3, 0, 0))})
    rows = [[f"train/{i}.png", ["x"]] for i in (1, 2)]
    put_json(tmp_path / "train.json", {"classes": ["x"], "images": rows})
    put_json(tmp_path / "test_zsl.json", {"classes": ["x"], "images": [["test/3.png", ["x"]], ["train/2.png", []]]})
    a = read_annotations(tmp_path, split="train")
    assert [r.load().getpixel((0, 0))[0] for r in a] == [1, 2]
    assert [r.load().getpixel((0, 0))[0] for r in read_annotations(tmp_path, split="test_zsl")] == [3, 2]
    assert list_splits(tmp_path) == ["test_zsl", "train"]
    assert not (tmp_path / "train").exists()  # nothing was unpacked


def test_images_in_another_folders_shards(tmp_path: Path) -> None:
    put_tar(tmp_path / "one" / "a.tar", {"p/1.png": encode((1, 0, 0))})
    put_tar(tmp_path / "two" / "b.tar", {"q/2.png": encode((2, 0, 0))})
    path = put_json(tmp_path / "one" / "x.json", {"classes": ["x"], "images": [["p/1.png", ["x"]], ["q/2.png", ["x"]]]})
    assert read_annotations(path).summary.count("missing image") == 1
    for root in (tmp_path / "two", [tmp_path / "two" / "b.tar"]):
        a = read_annotations(path, images_root=root)
        assert [r.load().getpixel((0, 0))[0] for r in a] == [1, 2]


def test_sources_survive_pickling_and_threads(tmp_path: Path) -> None:
    put_tar(tmp_path / "a.tar", {f"{i}.png": encode((i, 0, 0)) for i in range(40)})
    path = put_json(tmp_path / "x.json", {"classes": ["x"], "images": [[f"{i}.png", ["x"]] for i in range(40)]})
    records = pickle.loads(pickle.dumps(read_annotations(path))).records
    with ThreadPoolExecutor(8) as pool:
        reds = list(pool.map(lambda r: r.load().getpixel((0, 0))[0], records * 3))
    assert reds == list(range(40)) * 3


def test_shard_cut_short_after_indexing(tmp_path: Path) -> None:
    shard = put_tar(tmp_path / "a.tar", {"1.png": encode()})
    path = put_json(tmp_path / "x.json", {"classes": ["x"], "images": [["1.png", ["x"]]]})
    record = read_annotations(path).records[0]
    shard.write_bytes(shard.read_bytes()[:520])
    with pytest.raises(RamatchError, match="ends early"):
        record.load()


def test_compressed_or_broken_tar(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"not a tar" * 100)
    path = put_json(tmp_path / "x.json", {"classes": ["x"], "images": [["1.png", ["x"]]]})
    with pytest.raises(RamatchError, match="not a plain tar file"):
        read_annotations(path)


def test_webdataset(tmp_path: Path) -> None:
    shard = {
        "k1.png": encode((1, 0, 0)),
        "k1.json": b'{"labels": ["cat", "dog"], "width": 8}',
        "k2.jpg": encode((2, 0, 0), kind="JPEG"),
        "k2.txt": b"dog",
        "dir/k3.png": encode((3, 0, 0)),
        "dir/k3.cls": b"1",
        "k4.png": encode((4, 0, 0)),
        "k5.json": b'{"labels": ["cat"]}',
    }
    put_tar(tmp_path / "train-000.tar", shard)
    put_tar(tmp_path / "train-001.tar", {"k6.png": encode(), "k6.json": b'"cat;dog"'})
    put_tar(tmp_path / "val-000.tar", {"k7.png": encode(), "k7.json": b'{"tags": "cat"}'})
    a = read_annotations(tmp_path, split="train", classes=["cat", "dog"])
    assert a.format == "WebDataset tar shards"
    assert {r.key: r.labels for r in a} == {
        "k1.png": ("cat", "dog"),
        "k2.jpg": ("dog",),
        "dir/k3.png": ("dog",),
        "k6.png": ("cat", "dog"),
    }
    assert a.records[2].load().getpixel((0, 0))[0] == 3
    assert a.summary.count("image without labels file") == 1
    assert a.summary.count("missing image") == 1
    assert len(read_annotations(tmp_path)) == 5
    assert len(read_annotations(tmp_path / "train-000.tar")) == 3
    assert len(read_annotations(str(tmp_path / "train-*.tar"))) == 4
    assert list_splits(str(tmp_path / "train-*.tar")) == []


def test_webdataset_bad_json_names_the_member(tmp_path: Path) -> None:
    put_tar(tmp_path / "a.tar", {"k.png": encode(), "k.json": b"{"})
    with pytest.raises(RamatchError, match=r"a\.tar:k\.json"):
        read_annotations(tmp_path / "a.tar")


# ------------------------------------------------------------------------------------------------------ boxes by split


def test_boxes_as_shares_of_the_picture(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    content = {
        "train": {"a.png": [["cat", [0.5, 0.5, 0.2, 0.4]], ["cat", [0.1, 0.1, 0.2, 0.2]]]},
        "test": {"b.png": []},
    }
    file = put_json(tmp_path / "boxes.json", content)
    found = read_annotations(file)
    assert found.classes == ("cat",)
    assert [(r.key, r.labels) for r in found] == [("a.png", ("cat",)), ("b.png", ())]
    width, height = found.records[0].size or (0, 0)
    shares = [
        [x / width if i % 2 == 0 else x / height for i, x in enumerate(b.corners)] for b in found.records[0].boxes
    ]
    assert shares[0] == pytest.approx([0.4, 0.3, 0.6, 0.7])
    assert shares[1] == pytest.approx([0, 0, 0.2, 0.2])
    assert [r.key for r in read_annotations(file, split="train")] == ["a.png"]
    with pytest.raises(RamatchError, match="no split 'val'; it has train, test"):
        read_annotations(file, split="val")
    put_json(file, {"train": {"a.png": [["cat", [0.5, 0.5, 0.2, 0.4]], ["dog", [1]]]}})
    with pytest.raises(RamatchError, match=r"train: a\.png.*is no box"):
        read_annotations(file)
