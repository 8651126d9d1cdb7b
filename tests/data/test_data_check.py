"""`check`: what it reports, for one file, for several splits, and for broken images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_helpers import put, put_json

from ramatch.data.check import check
from ramatch.errors import RamatchError


def test_report_of_one_file(lists) -> None:
    path = lists(["cat", "dog", "yak"], [["a.png", ["cat", "dog"]], ["b.png", ["cat", "emu"]], ["no.png", ["dog"]]])
    report = check(path, decode=True)
    facts = report.to_dict()["splits"]["all"]
    assert facts["class_counts"] == {"cat": 2, "dog": 1, "yak": 0}
    assert facts["classes_without_images"] == ["yak"]
    assert facts["labels_per_image"] == {"min": 1, "median": 1.5, "mean": 1.5, "max": 2}
    assert facts["sizes"] == {"8x6": 2}
    assert facts["samples"] == [["a.png", ["cat", "dog"]], ["b.png", ["cat"]]]
    assert facts["issues"]["unknown label"]["count"] == 1
    assert not report.ok
    text = report.to_text()
    for part in ("JSON lists", "2 images, 3 classes", "missing image: 1", "no image has: yak", "a.png: cat, dog"):
        assert part in text
    json.dumps(report.to_dict())  # plain types throughout


def test_clean_data_is_ok(lists) -> None:
    report = check(lists(["cat"], [["a.png", ["cat"]]]))
    assert report.ok
    assert "no problems found" in report.to_text()
    assert report.to_dict()["splits"]["all"]["decoded"] == 0


def test_unreadable_images_are_listed(lists, tmp_path: Path) -> None:
    path = lists(["cat"], [["a.png", ["cat"]], ["b.png", ["cat"]]])
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:40])
    assert check(path).ok
    report = check(path, decode=True)
    assert list(report.parts["all"].unreadable) == ["b.png"]
    assert not report.ok
    assert "1 unreadable" in report.to_text()
    usable = report.parts["all"].annotations.without(report.parts["all"].unreadable)
    assert [r.key for r in usable] == ["a.png"]


def test_all_splits_and_one_that_fails(tmp_path: Path) -> None:
    put(tmp_path, "a.png")
    put_json(tmp_path / "train.json", {"classes": ["x"], "images": [["a.png", ["x"]]]})
    put_json(tmp_path / "test.json", {"classes": ["x"], "images": [["gone.png", ["x"]]]})
    report = check(tmp_path)
    assert list(report.parts) == ["train"]
    assert "none of its 1 images" in report.failures["test"]
    assert not report.ok
    assert "split test could not be read" in report.to_text()
    assert list(check(tmp_path, split="train").parts) == ["train"]
    with pytest.raises(RamatchError):
        check(tmp_path, split="test")


def test_many_classes_are_shortened(lists) -> None:
    names = [f"class{i}" for i in range(100)]
    path = lists(names, [["a.png", names], ["b.png", names[:40]]])
    text = check(path).to_text(top=12)
    assert "88 more" in text
    assert text.count("class9") < 20
    assert check(path).to_text(top=None).count("class") > 200


@pytest.mark.parametrize(
    ("classes", "kind", "example"),
    [
        (["PERSON", "Car", "car", "dog"], "classes that differ only in case", "Car, car"),
        (["car", " car ", "dog"], "duplicate class", "car"),
    ],
)
def test_class_names_that_differ_only_by_case_or_space(lists, classes: list[str], kind: str, example: str) -> None:
    report = check(lists(classes, [["a.png", ["dog"]], ["b.png", ["dog"]]]))
    issue = report.to_dict()["splits"]["all"]["issues"][kind]
    assert (issue["count"], issue["examples"]) == (1, [example])
    assert not report.ok
    assert "problems found" in report.to_text()


def test_class_names_that_occur_are_compared_too(lists) -> None:
    report = check(lists(None, [["a.png", ["Person", "car"]], ["b.png", ["PERSON", "person", " car "]]]))
    assert report.parts["all"].annotations.classes == ("car", "PERSON", "Person", "person")
    assert report.parts["all"].annotations.summary.count("classes that differ only in case") == 2
    assert not report.ok
    assert check(lists(None, [["a.png", ["person", "car"]]])).ok
