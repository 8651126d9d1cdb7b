"""The authors' JSON, and each awkward case: its outcome and its line in the summary."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_helpers import put, put_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ramatch.data import read_annotations
from ramatch.data.formats.lists import write
from ramatch.errors import RamatchError


def test_plain(lists) -> None:
    a = read_annotations(lists(["cat", "dog"], [["a.png", ["cat"]], ["b.png", ["dog", "cat"]]]))
    assert a.classes == ("cat", "dog")
    assert [(r.key, r.labels) for r in a] == [("a.png", ("cat",)), ("b.png", ("dog", "cat"))]
    assert a.targets().tolist() == [[True, False], [True, True]]
    assert a.class_counts() == {"cat": 2, "dog": 1}
    assert not a.summary.issues
    assert "2 images, 2 classes, 3 labels" in a.summary.headline()
    assert a.records[1].load().getpixel((0, 0)) == (1, 100, 50)


def test_unknown_label(lists) -> None:
    path = lists(["cat"], [["a.png", ["cat", "unicorn"]], ["b.png", ["unicorn"]]])
    a = read_annotations(path)
    assert [r.labels for r in a] == [("cat",), ()]
    assert a.summary.count("unknown label") == 2
    assert "unicorn" in a.summary.to_text()
    assert read_annotations(path, unknown="add").classes == ("cat", "unicorn")
    with pytest.raises(RamatchError, match=r"images\[0\].*unicorn"):
        read_annotations(path, unknown="error")


def test_missing_image(lists) -> None:
    path = lists(["cat"], [["a.png", ["cat"]], ["gone.png", ["cat"]]])
    a = read_annotations(path)
    assert len(a) == 1
    assert a.summary.count("missing image") == 1
    assert "gone.png" in a.summary.issues["missing image"].examples[0]
    with pytest.raises(RamatchError, match=r"gone\.png"):
        read_annotations(path, missing="error")
    kept = read_annotations(path, missing="keep")
    assert len(kept) == 2
    with pytest.raises(RamatchError, match="missing"):
        kept.records[1].load()


def test_all_images_missing_is_an_error_that_says_where_it_looked(lists, tmp_path: Path) -> None:
    with pytest.raises(RamatchError, match=r"none of its 1 images.*images_root"):
        read_annotations(lists(["cat"], [["gone.png", ["cat"]]], pictures=()))


def test_duplicate_label(lists) -> None:
    a = read_annotations(lists(["cat"], [["a.png", ["cat", "cat", " cat "]]]))
    assert a.records[0].labels == ("cat",)
    assert a.summary.count("duplicate label") == 2


def test_duplicate_image_is_merged(lists) -> None:
    a = read_annotations(lists(["cat", "dog"], [["a.png", ["cat"]], ["a.png", ["dog", "cat"]]]))
    assert [(r.key, r.labels) for r in a] == [("a.png", ("cat", "dog"))]
    assert a.summary.count("duplicate image") == 1


@pytest.mark.parametrize("root", ["/data/someone/coco/", "C:\\pics\\", "./x/../y/", "foreign/"])
def test_foreign_root_path(lists, root: str) -> None:
    separator = "\\" if "\\" in root else "/"
    path = lists(["cat"], [[f"{root}sub{separator}a.png", ["cat"]]], pictures=("sub/a.png", "other/a.png"))
    a = read_annotations(path)
    assert a.records[0].key == "sub/a.png"
    assert a.records[0].load().getpixel((0, 0))[0] == 0
    assert a.summary.count("foreign root path") == 1


def test_bare_name_is_found_only_when_it_is_unique(lists) -> None:
    path = lists(
        ["cat"],
        [["elsewhere/one.png", ["cat"]], ["elsewhere/two.png", ["cat"]]],
        pictures=("deep/down/one.png", "x/two.png", "y/two.png"),
    )
    a = read_annotations(path)
    assert [r.key for r in a] == ["deep/down/one.png"]
    assert a.summary.count("missing image") == 1


def test_empty_row_and_empty_label(lists) -> None:
    a = read_annotations(lists(["cat"], [[], ["", ["cat"]], ["a.png", ["", "cat", None]], ["b.png", []]]))
    assert a.summary.count("empty row") == 2
    assert a.summary.count("empty label") == 2
    assert [r.labels for r in a] == [("cat",), ()]


def test_image_without_labels(lists) -> None:
    path = lists(["cat"], [["a.png", ["cat"]], ["b.png", []]])
    assert read_annotations(path).summary.unlabelled == 1
    assert len(read_annotations(path, empty="drop")) == 1
    with pytest.raises(RamatchError, match="no label"):
        read_annotations(path, empty="error")


def test_respelled_label(lists) -> None:
    a = read_annotations(lists(["Traffic Light", "dog"], [["a.png", ["traffic_light", "DOG"]]]))
    assert a.records[0].labels == ("Traffic Light", "dog")
    assert a.summary.count("respelled label") == 2


def test_ambiguous_spelling_is_not_guessed(lists) -> None:
    a = read_annotations(lists(["T-shirt", "TShirt"], [["a.png", ["t shirt", "TShirt"]]]))
    assert a.records[0].labels == ("TShirt",)
    assert a.summary.count("unknown label") == 1


def test_class_numbers_and_duplicate_class(lists) -> None:
    a = read_annotations(lists(["cat", "cat", "dog"], [["a.png", [2, 0]], ["b.png", [7]]]))
    assert a.classes == ("cat", "dog")
    assert a.records[0].labels == ("dog", "cat")
    assert a.summary.count("duplicate class") == 1
    assert a.summary.count("unknown label") == 1


def test_callers_classes_rule(lists, tmp_path: Path) -> None:
    path = lists(["cat", "dog"], [["a.png", ["cat", "dog"]]])
    assert read_annotations(path, classes=["dog", "bird"]).records[0].labels == ("dog",)
    (tmp_path / "names.txt").write_text("# pets\ncat\n\nbird\n")
    assert read_annotations(path, classes=tmp_path / "names.txt").classes == ("cat", "bird")


def test_without_declared_classes_they_are_those_that_occur(lists) -> None:
    assert read_annotations(lists(None, [["a.png", ["c10", "c2"]]])).classes == ("c2", "c10")


def test_images_root_and_remembered_root(tmp_path: Path) -> None:
    put(tmp_path / "far", "p/a.png")
    content = {"classes": ["x"], "images": [["p/a.png", ["x"]]]}
    path = put_json(tmp_path / "near" / "train.json", content)
    assert len(read_annotations(path, images_root=tmp_path / "far")) == 1
    with pytest.raises(RamatchError, match="no such folder"):
        read_annotations(path, images_root=tmp_path / "nowhere")
    for outside in (str(tmp_path / "far"), "../far"):
        put_json(path, {**content, "root": outside})
        with pytest.raises(RamatchError, match=r"its root .* lies outside its folder: name it as images root"):
            read_annotations(path)
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far")
    for inside in ("link", str(tmp_path / "near" / "link")):
        put_json(path, {**content, "root": inside})
        assert len(read_annotations(path)) == 1


def test_names_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    put(tmp_path / "far", "p/a.png")
    put(tmp_path / "near", "b.png")
    for name in (str(tmp_path / "far" / "p" / "a.png"), "../far/p/a.png", "x/../../far/p/a.png"):
        path = put_json(tmp_path / "near" / "train.json", {"classes": ["x"], "images": [[name, ["x"]], ["b.png", []]]})
        found = read_annotations(path)
        assert [record.key for record in found] == ["b.png"]
        assert found.summary.count("missing image") == 1
        assert len(read_annotations(path, images_root=tmp_path / "far")) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"classes": ["a"], "images": [["a.png"]]}', r"images\[0\]"),
        ('{"classes": "a", "images": [["a.png", []]]}', "list of names"),
        ('{"classes": ["a"], "images": []}', "no images"),
        ('{"something": 1}', "not recognised"),
        ("[]", "not recognised"),
    ],
)
def test_malformed_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RamatchError, match=message):
        read_annotations(tmp_path / "x.json")


def test_bad_choices_are_refused(lists) -> None:
    path = lists(["a"], [["a.png", ["a"]]])
    for wrong in ({"unknown": "ignore"}, {"missing": "x"}, {"empty": "x"}, {"format": "xml"}):
        with pytest.raises(RamatchError):
            read_annotations(path, **wrong)
    with pytest.raises(RamatchError, match="no such"):
        read_annotations(path.parent / "nope.json")


NAMES = st.text(st.characters(categories=["Ll", "Nd"]), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    classes=st.lists(NAMES, min_size=1, max_size=5, unique=True),
    data=st.data(),
)
def test_saving_and_reading_again_changes_nothing(tmp_path: Path, classes: list[str], data: st.DataObject) -> None:
    put(tmp_path, "0.png", "1.png", "2.png")
    rows = [[f"{i}.png", data.draw(st.lists(st.sampled_from(classes), unique=True))] for i in range(3)]
    first = read_annotations(put_json(tmp_path / "one.json", {"classes": classes, "images": rows}))
    write(tmp_path / "two.json", first.classes, [(r.key, r.labels) for r in first])
    second = read_annotations(tmp_path / "two.json")
    assert (second.classes, second.records) == (first.classes, first.records)
    assert [[r.key, list(r.labels)] for r in second] == rows


def test_restrict_subset_without(lists) -> None:
    a = read_annotations(lists(["cat", "dog"], [["a.png", ["cat", "dog"]], ["b.png", ["dog"]]]))
    only = a.restrict(["cat"])
    assert [r.labels for r in only] == [("cat",), ()]
    assert only.summary.labels == 1
    assert len(a.restrict(["cat"], drop_unlabelled=True)) == 1
    assert [r.key for r in a.subset([1])] == ["b.png"]
    assert [r.key for r in a.without(["b.png"])] == ["a.png"]
    assert a.summary.images == 2
