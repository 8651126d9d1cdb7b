"""Benchmarks: class lists, split rules, protocols, and preparing tiny copies of each distribution."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from data_helpers import put, put_json

from ramatch.cli import main
from ramatch.data import BENCHMARKS, class_list, prepare, read_annotations, read_protocol
from ramatch.data.benchmarks import apply_protocol, split_classes
from ramatch.data.benchmarks.common import Owned
from ramatch.errors import RamatchError

io = pytest.importorskip("scipy.io")

SIX = ("nus-wide", "coco", "rap", "pa100k", "multiscene", "mlrsnet")


def content(folder: Path, split: str) -> dict[str, list[str]]:
    return dict(json.loads((folder / f"{split}.json").read_text())["images"])


@pytest.mark.parametrize("name", [n for n, b in BENCHMARKS.items() if b.lists])
def test_class_lists_have_the_papers_sizes(name: str) -> None:
    benchmark = BENCHMARKS[name]
    names = [c for listing in benchmark.lists for c in class_list(listing)]
    assert len(names) == len(set(names)) == benchmark.seen + benchmark.unseen
    if len(benchmark.lists) == 2:
        assert len(class_list(benchmark.lists[0])) == benchmark.seen


def test_every_benchmark_says_where_it_comes_from() -> None:
    assert set(SIX) < set(BENCHMARKS)
    for name in SIX:
        assert BENCHMARKS[name].page.startswith("http")
        assert "Expected under the root" in BENCHMARKS[name].layout
    with pytest.raises(RamatchError, match="unknown benchmark"):
        prepare("imagenet", ".")
    with pytest.raises(RamatchError, match="no class list"):
        class_list("nothing")


def test_random_splits_are_frozen() -> None:
    """Published results depend on these draws: they must never change."""
    seen, unseen = split_classes(BENCHMARKS["multiscene"], [])
    assert (len(seen), len(unseen)) == (20, 16)
    assert unseen[:4] == ("Basketball Field", "Beach", "Cemetery", "Woodland")
    seen, unseen = split_classes(BENCHMARKS["mlrsnet"], [])
    assert (len(seen), len(unseen)) == (40, 20)
    assert unseen[:4] == ("bare soil", "buildings", "cloud", "containers")


def test_frequent_classes_are_seen() -> None:
    classes = class_list("pa100k_classes26")
    train = [("x", list(classes[: i + 1])) for i in range(26)]  # the first class is the most frequent
    seen, unseen = split_classes(BENCHMARKS["pa100k"], train)
    assert seen == classes[:16]
    assert unseen == classes[16:]


def test_protocol_rules() -> None:
    owned = Owned(
        train=[("1", ["a", "u"]), ("2", ["a", "a"]), ("3", ["z"]), ("4", ["b", "z"])],
        test=[("5", ["a"]), ("6", ["u", "b"]), ("7", ["z"])],
    )
    splits = apply_protocol(owned, ["a", "b"], ["u"], "no unseen")
    assert splits["train"] == (["a", "b"], [("2", ["a"]), ("4", ["b"])])
    assert splits["test_gzsl"] == (["a", "b", "u"], [("5", ["a"]), ("6", ["u", "b"])])
    assert splits["test_zsl"] == (["u"], [("6", ["u"])])
    assert apply_protocol(owned, ["a", "b"], ["u"], "any seen")["train"][1][0] == ("1", ["a"])


# ------------------------------------------------------------------------------------------------------ COCO


def coco_root(root: Path, year: str = "2014") -> Path:
    names = [*class_list("coco_seen48"), *class_list("coco_unseen17"), "hot dog"]
    categories = [{"id": i, "name": n} for i, n in enumerate(names)]

    def file(subset: str, rows: list[list[str]]) -> None:
        images = [{"id": i, "file_name": f"COCO_{subset}_{i:012d}.png"} for i in range(len(rows))]
        marks = [{"image_id": i, "category_id": names.index(n)} for i, row in enumerate(rows) for n in row]
        put(root, *(f"{subset}/{i['file_name']}" for i in images))
        put_json(
            root / "annotations" / f"instances_{subset}.json",
            {"images": images, "annotations": marks, "categories": categories},
        )

    file(f"train{year}", [names[:48], ["person", "cat"], ["hot dog"], ["person", "hot dog"]])
    file(f"val{year}", [names[40:65], ["person"], ["hot dog"]])
    return root


def test_prepare_coco(tmp_path: Path) -> None:
    root = coco_root(tmp_path / "coco")
    prepared = prepare("coco", root, tmp_path / "out")
    assert prepared.images == {"train": 2, "test_gzsl": 2, "test_zsl": 1}
    train = content(tmp_path / "out", "train")
    assert [len(v) for v in train.values()] == [48, 1]  # the cat is unseen, the hot dog in neither list
    assert next(iter(train)).startswith("train2014/COCO_train2014_")
    assert len(content(tmp_path / "out", "test_zsl")) == 1
    a = read_annotations(tmp_path / "out", split="train")  # images found through the remembered root
    assert len(a) == 2
    assert a.records[0].load().size == (8, 6)
    assert "48 seen and 17 unseen" in prepared.to_text()
    assert "about 6,392" in prepared.to_text()
    warnings = [note for note in prepared.notes if note.startswith("warning: ")]
    assert len(warnings) == 1
    assert "without --test-list the test is all of val2014, so figures are not those of the paper" in warnings[0]
    assert "6,392 images GZSL, 2,729 ZSL" in prepared.to_text()


def test_data_prepare_warns_that_the_test_is_not_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["data", "prepare", "coco", "--root", str(coco_root(tmp_path))]) == 0
    assert "warning: without --test-list the test is all of val2014" in capsys.readouterr().out


def test_prepare_coco_in_place_and_2017(tmp_path: Path) -> None:
    root = coco_root(tmp_path, "2017")
    prepared = prepare("coco", root)
    assert any("2017" in note for note in prepared.notes)
    assert len(read_annotations(root, split="train")) == 2  # train.json, not instances_train2017.json
    test = read_protocol(root, "zsl")
    assert test.unseen == class_list("coco_unseen17")


def test_prepare_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RamatchError, match=r"instances_train2014\.json; download it from https://cocodataset"):
        prepare("coco", tmp_path)
    with pytest.raises(RamatchError, match="no such folder"):
        prepare("coco", tmp_path / "none")
    root = coco_root(tmp_path / "c")
    (root / "val2014" / "COCO_val2014_000000000001.png").unlink()
    assert prepare("coco", root).missing_images == 1
    assert prepare("coco", root, check_images=False).missing_images == 0
    for path in root.rglob("*.png"):
        path.unlink()
    with pytest.raises(RamatchError, match="none of the images is there"):
        prepare("coco", root)


def test_prepare_with_lists_of_images(tmp_path: Path) -> None:
    root = coco_root(tmp_path)
    (tmp_path / "keep.txt").write_text("COCO_val2014_000000000000.jpg\n")
    prepared = prepare("coco", root, test_list=tmp_path / "keep.txt")
    assert prepared.images["test_gzsl"] == 1
    assert "1 of 3 images" in prepared.to_text()
    assert "warning" not in prepared.to_text()  # the test is the caller's choice


# -------------------------------------------------------------------------------------------------- NUS-WIDE


def nus_root(root: Path, whole: bool) -> Path:
    """Tags per image: train 0 all seen tags, 1 only concepts, 2 the first seen tag; test alike."""
    seen, unseen = class_list("nuswide_seen925"), class_list("nuswide_unseen81")
    tags = [*unseen[:75], *seen]
    images = [f"actor\\000{i}_{i}.png" for i in range(5)]
    put(root / "Flickr", *(name.replace("\\", "/") for name in images))
    hot = np.zeros((5, 1000), int)
    hot[0, 75:] = 1
    hot[1, :75] = 1
    hot[2, [0, 75]] = 1
    hot[3, 76] = 1
    concepts = np.zeros((5, 81), int)
    concepts[3] = 1
    concepts[4, 0] = 0

    def text(name: str, lines: list[str]) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")

    text("ConceptsList/Concepts81.txt", list(unseen))
    text("NUS_WID_Tags/TagList1k.txt", tags)
    text("ImageList/TrainImagelist.txt", images[:3])
    text("ImageList/TestImagelist.txt", images[3:])
    rows = ["\t".join(map(str, row)) + "\t" for row in hot]
    if whole:
        text("ImageList/Imagelist.txt", images)
        text("NUS_WID_Tags/AllTags1k.txt", rows)
    else:
        text("NUS_WID_Tags/Train_Tags1k.dat", rows[:3])
        text("NUS_WID_Tags/Test_Tags1k.dat", rows[3:])
    for i, concept in enumerate(unseen):
        if whole:
            text(f"Groundtruth/AllLabels/Labels_{concept}.txt", list(map(str, concepts[:, i])))
        else:
            text(f"Groundtruth/TrainTestLabels/Labels_{concept}_Test.txt", list(map(str, concepts[3:, i])))
    return root


@pytest.mark.parametrize("whole", [True, False])
def test_prepare_nuswide(tmp_path: Path, whole: bool) -> None:
    prepared = prepare("nus-wide", nus_root(tmp_path, whole))
    assert "warning: without --test-list" in prepared.to_text()
    assert "59,000" in prepared.to_text()
    assert prepared.images == {"train": 2, "test_gzsl": 1, "test_zsl": 1}
    seen = class_list("nuswide_seen925")
    train = content(tmp_path, "train")
    assert set(train["Flickr/actor/0000_0.png"]) == set(seen)
    assert train["Flickr/actor/0002_2.png"] == [seen[0]]  # the tag that is also a concept is left out
    gzsl = content(tmp_path, "test_gzsl")["Flickr/actor/0003_3.png"]
    assert set(gzsl) == {seen[1], *class_list("nuswide_unseen81")}
    assert len(read_annotations(tmp_path, split="test_zsl")) == 1


def test_nuswide_checks_its_files(tmp_path: Path) -> None:
    root = nus_root(tmp_path, False)
    (root / "NUS_WID_Tags" / "Test_Tags1k.dat").write_text("0 1 2\n")
    with pytest.raises(RamatchError, match="line 1 is not 1000 values"):
        prepare("nus-wide", root)
    (root / "NUS_WID_Tags" / "Test_Tags1k.dat").write_text(" ".join("0" * 1000) + "\n")
    with pytest.raises(RamatchError, match="1 rows for 2 images"):
        prepare("nus-wide", root)
    nus_root(tmp_path, False)
    (root / "Groundtruth" / "TrainTestLabels" / "Labels_zebra_Test.txt").unlink()
    with pytest.raises(RamatchError, match="concept 'zebra'"):
        prepare("nus-wide", root)


# --------------------------------------------------------------------------------------------- RAP and PA100K


def cells(values: list) -> np.ndarray:
    array = np.empty((len(values), 1), dtype=object)
    for i, value in enumerate(values):
        array[i, 0] = value
    return array


def rap_root(root: Path, count: int = 12) -> Path:
    classes = class_list("rap_classes51")
    prefixes = [""] * 9 + ["hs-"] * 6 + ["ub-"] * 9 + ["lb-"] * 6 + ["shoes-"] * 5 + ["attach-"] * 8 + ["action-"] * 8
    names = [p + c.replace(" ", "") for p, c in zip(prefixes, classes, strict=True)]
    names[names.index("attach-SSBag")] = "attach-SingleShoulderBag"
    labels = np.zeros((count, 92), int)
    for i in range(count):
        labels[i, : 35 if i < 8 else 51] = 1  # the first 35 are more frequent
    labels[7, 40] = 1
    labels[:, 60] = 1  # beyond the benchmark's attributes
    images = [f"CAM01_{i}.png" for i in range(count)]
    put(root / "RAP_dataset", *images)
    partition = {"train_index": np.arange(1, 10)[None], "test_index": np.arange(10, count + 1)[None]}
    structure = {
        "partition": cells([partition] * 5),
        "label": labels,
        "attribute_chinese": cells(["x"] * 92),
        "attribute_eng": cells(names + [f"extra{i}" for i in range(41)]),
        "position": np.zeros((count, 4)),
        "imagesname": cells(images),
        "attribute_exp": cells(["x"] * 92),
    }
    (root / "RAP_annotation").mkdir(parents=True)
    io.savemat(root / "RAP_annotation" / "RAP_annotation.mat", {"RAP_annotation": structure})
    return root


def test_prepare_rap(tmp_path: Path) -> None:
    prepared = prepare("rap", rap_root(tmp_path))
    classes = class_list("rap_classes51")
    assert (prepared.seen, prepared.unseen) == (classes[:35], classes[35:])
    assert "warning" not in prepared.to_text()
    assert prepared.images == {"train": 7, "test_gzsl": 3, "test_zsl": 3}  # images 7 and 8 show unseen classes
    assert content(tmp_path, "train")["RAP_dataset/CAM01_0.png"] == list(classes[:35])
    assert content(tmp_path, "test_zsl")["RAP_dataset/CAM01_9.png"] == list(classes[35:])


def test_rap_refuses_other_structures(tmp_path: Path) -> None:
    (tmp_path / "RAP_dataset").mkdir()
    for wrong in ({"other": 1}, {"RAP_annotation": {"name": cells(["a"]), "label": np.zeros((2, 152))}}):
        io.savemat(tmp_path / "RAP_annotation.mat", wrong)
        with pytest.raises(RamatchError, match=r"RAP_annotation\.mat"):
            prepare("rap", tmp_path)
    (tmp_path / "RAP_annotation.mat").write_bytes(b"rubbish")
    with pytest.raises(RamatchError, match="MATLAB"):
        prepare("rap", tmp_path)


def pa100k_root(root: Path) -> Path:
    classes = class_list("pa100k_classes26")
    attributes = [c.replace(" and ", "&").replace(" ", "") for c in classes]
    train = np.zeros((6, 26), np.uint8)
    train[:, 10:] = 1  # the last sixteen are the most frequent
    train[5, 0] = 1
    test = np.eye(26, dtype=np.uint8)[[0, 25]]
    put(root / "release_data" / "release_data", *(f"{i:06d}.png" for i in range(8)))
    io.savemat(
        root / "annotation.mat",
        {
            "attributes": cells(attributes),
            "train_images_name": cells([f"{i:06d}.png" for i in range(6)]),
            "val_images_name": cells([]),
            "test_images_name": cells(["000006.png", "000007.png"]),
            "train_label": train,
            "val_label": np.zeros((0, 26)),
            "test_label": test,
        },
    )
    return root


def test_prepare_pa100k(tmp_path: Path) -> None:
    prepared = prepare("pa100k", pa100k_root(tmp_path))
    classes = class_list("pa100k_classes26")
    assert (prepared.seen, prepared.unseen) == (classes[10:], classes[:10])
    assert prepared.images == {"train": 5, "test_gzsl": 2, "test_zsl": 1}
    assert content(tmp_path, "test_zsl") == {"release_data/release_data/000006.png": ["Female"]}
    a = read_protocol(tmp_path, "gzsl")
    assert (len(a.seen), len(a.unseen), len(a.annotations)) == (16, 10, 2)


def test_pa100k_checks_attribute_names(tmp_path: Path) -> None:
    root = pa100k_root(tmp_path)
    saved = {k: v for k, v in io.loadmat(root / "annotation.mat").items() if not k.startswith("__")}
    saved["attributes"] = cells(["Male"] * 26)
    io.savemat(root / "annotation.mat", saved)
    with pytest.raises(RamatchError, match="'Male' for 'Female'"):
        prepare("pa100k", root)
    saved.pop("test_label")
    io.savemat(root / "annotation.mat", saved)
    with pytest.raises(RamatchError, match="no variable test_label"):
        prepare("pa100k", root)


# -------------------------------------------------------------------------------------------------- aerial sets


def table(path: Path, header: list[str], rows: list[list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])


def hot(classes: tuple[str, ...], labels: tuple[str, ...]) -> list[int]:
    return [int(c in labels) for c in classes]


def multiscene_root(root: Path, noisy: bool) -> Path:
    classes = class_list("multiscene_classes36")
    seen, unseen = split_classes(BENCHMARKS["multiscene"], [])
    header = ["name", *(c.replace(" ", "").replace("OilField", "OilFiled") for c in classes)]
    put(root / "MultiScene-Clean" / "images", "0.jpg", "1.jpg", "2.jpg", "3.jpg")
    table(root / "MultiScene-Clean" / "Test.csv", header, [["0", *hot(classes, classes)], ["1", *hot(classes, seen)]])
    clean = [["2", *hot(classes, seen)], ["3", *hot(classes, (seen[0], unseen[0]))]]
    table(root / "MultiScene-Clean" / "Tra.csv", header, clean)
    if noisy:
        put(root / "MultiScene" / "images", *(f"{i}.jpg" for i in range(7)))
        rows = [[str(i), *hot(classes, seen[:2] if i != 6 else unseen)] for i in range(7)]
        table(root / "MultiScene" / "train.csv", header, rows)
    return root


def test_prepare_multiscene(tmp_path: Path) -> None:
    prepared = prepare("multiscene", multiscene_root(tmp_path / "a", noisy=True))
    assert prepared.images == {"train": 4, "test_gzsl": 2, "test_zsl": 1}  # 0 and 1 are tested on, 6 shows unseen
    assert set(content(tmp_path / "a", "train")) == {f"MultiScene/images/{i}.jpg" for i in (2, 3, 4, 5)}
    prepared = prepare("multiscene", multiscene_root(tmp_path / "b", noisy=False))
    assert prepared.images["train"] == 1
    assert "clean training images only" in prepared.to_text()


def test_multiscene_checks_its_tables(tmp_path: Path) -> None:
    root = multiscene_root(tmp_path, noisy=False)
    table(root / "MultiScene-Clean" / "Test.csv", ["name", "a", "b"], [["0", 1, 0]])
    with pytest.raises(RamatchError, match="expected the 36 labels"):
        prepare("multiscene", root)


def mlrsnet_root(root: Path) -> Path:
    classes = class_list("mlrsnet_classes60")
    seen, _ = split_classes(BENCHMARKS["mlrsnet"], [])
    for category, labels in (("airport", seen), ("beach", classes)):
        names = [f"{category}_{i:05d}.jpg" for i in range(10)]
        put(root / "Images" / category, *names)
        table(root / "Labels" / f"{category}.csv", ["image", *classes], [[n, *hot(classes, labels)] for n in names])
    return root


def test_prepare_mlrsnet(tmp_path: Path) -> None:
    prepared = prepare("mlrsnet", mlrsnet_root(tmp_path))
    assert prepared.images == {"train": 8, "test_gzsl": 4, "test_zsl": 2}
    first = set(content(tmp_path, "test_gzsl"))
    prepare("mlrsnet", tmp_path)
    assert set(content(tmp_path, "test_gzsl")) == first
    assert not first & set(content(tmp_path, "train"))


def test_mlrsnet_checks_its_tables(tmp_path: Path) -> None:
    root = mlrsnet_root(tmp_path)
    classes = class_list("mlrsnet_classes60")
    table(root / "Labels" / "beach.csv", ["image", *classes], [["beach_00000.jpg", *["2"] * 60]])
    with pytest.raises(RamatchError, match=r"beach\.csv: line 2"):
        prepare("mlrsnet", root)


# --------------------------------------------------------------------------------------------------- protocols


def test_zsl_without_its_own_file(tmp_path: Path) -> None:
    put(tmp_path, "a.png", "b.png")
    put_json(tmp_path / "train.json", {"classes": ["s"], "images": [["a.png", ["s"]]]})
    put_json(tmp_path / "test_gzsl.json", {"classes": ["s", "u"], "images": [["a.png", ["s"]], ["b.png", ["s", "u"]]]})
    test = read_protocol(tmp_path, "zsl")
    assert (test.seen, test.unseen) == ((), ("u",))
    assert [(r.key, r.labels) for r in test.annotations] == [("b.png", ("u",))]
    both = read_protocol(tmp_path, "gzsl")
    assert (both.seen, both.unseen, len(both.annotations)) == (("s",), ("u",), 2)
    with pytest.raises(RamatchError, match="unknown protocol"):
        read_protocol(tmp_path, "few-shot")
    (tmp_path / "train.json").unlink()
    with pytest.raises(RamatchError, match=r"train\.json missing"):
        read_protocol(tmp_path)
