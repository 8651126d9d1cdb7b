"""The bench of words: its lists, what its figures mean, and a run of all of it with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_models import tiny_ram

from benchmarks.words import PARTS, Word, part_of, read_words
from benchmarks.words.__main__ import main
from benchmarks.words.free_tags import Judge, by_confidence
from benchmarks.words.lists import apart, nonsense, phrased, rounds
from benchmarks.words.measure import hypernyms, names_and_synonyms, values
from ramatch import Recognizer
from ramatch.assets import vocabulary
from ramatch.data.annotations import Annotations, Record, Summary
from ramatch.data.lexicon import Lexicon
from ramatch.evaluation.calibration import Calibrator

NAMES = ("dog", "car", "cat")
WORDS = [
    *(Word("name", name, (name,)) for name in NAMES),
    Word("synonym", "pooch", ("dog",)),
    Word("synonym", "automobile", ("car",)),
    Word("synonym", "auto", ("car",)),
    Word("hypernym", "pet", ("dog", "cat")),
    Word("hypernym", "canine", ("dog",), ("cat",)),
    Word("hypernym", "vehicle", ("car",)),
]


def test_the_list_of_words_is_in_order() -> None:
    words = read_words()
    names = [word.word for word in words if word.kind == "name"]
    assert names == vocabulary("coco80") or sorted(names) == sorted(vocabulary("coco80"))
    assert len({word.word for word in words}) == len(words)
    for word in words:
        assert word.kind in ("name", "synonym", "hypernym")
        assert {*word.names, *word.unclear} <= set(names)
        assert not {*word.names} & {*word.unclear}
        assert word.kind == "hypernym" or len(word.names) == 1
    assert {"crane", "bike", "chick"} & {word.word for word in words} == set(), "words of several things"
    parts = {part: {word.word for word in read_words(part=part) if word.kind != "name"} for part in PARTS}
    assert not parts["test"] & parts["validation"]
    assert all(part_of(word) == part for part, found in parts.items() for word in found)
    for part in PARTS:
        kinds = [word for word in read_words(part=part) if word.kind == "hypernym"]
        assert len(kinds) >= 12


def test_vocabularies_keep_company() -> None:
    assert rounds(NAMES, WORDS) == [["pooch", "automobile", "cat"], ["dog", "auto", "cat"]]
    assert phrased(["dog", "person"])["a"] == ["a dog", "a person"]
    assert phrased(["dog", "person"])["plural"] == ["dogs", "people"]
    groups = apart([word for word in WORDS if word.kind == "hypernym"])
    assert [[word.word for word in group] for group in groups] == [["pet", "vehicle"], ["canine"]]
    assert nonsense("test") == nonsense("test") != nonsense("validation")
    assert len(nonsense("test")) == 50


class FakeRunner:
    """Gives each word its probabilities on three images: a dog, a car, a cat."""

    def __init__(self, **columns: tuple[float, float, float]) -> None:
        self.columns = columns

    def probabilities(self, records, vocabularies, what=""):
        assert len(records) == 3
        silent = (0.0, 0.0, 0.0)
        return [np.array([self.columns.get(w, silent) for w in words]).T for words in vocabularies]


@pytest.fixture
def data() -> Annotations:
    records = [Record(f"{name}.png", (name,)) for name in NAMES]
    return Annotations(NAMES, records, Summary("x", "test"))


def found(rows) -> dict[str, float]:
    return {entry.what: entry.value for entry in rows}


def test_synonyms_are_measured_beside_their_own_names(data: Annotations) -> None:
    names = {"dog": (0.9, 0.1, 0.1), "car": (0.1, 0.9, 0.1), "cat": (0.1, 0.1, 0.4)}
    others = {"pooch": (0.4, 0.0, 0.0), "automobile": (0.0, 0.8, 0.0), "auto": (0.5, 0.2, 0.0)}
    runner = FakeRunner(**names, **others)
    rows = found(names_and_synonyms(runner, data, WORDS))
    assert rows["names: mAP"] == pytest.approx(100)
    assert rows["names: recall at 0.5"] == pytest.approx(100 * 2 / 3)
    # of dog and car, whose names are perfect: pooch 1, the mean of automobile 1 and auto 1/2
    assert rows["synonyms: mAP, share of the names'"] == pytest.approx((1 + 0.75) / 2)
    assert rows["synonyms: recall at 0.5, share of the names'"] == pytest.approx((0 + 0.5) / 2)
    assert rows["phrasings: recall at 0.5, share of the names'"] == 0


def test_kinds_are_missed_or_false_only_where_that_is_clear(data: Annotations) -> None:
    runner = FakeRunner(pet=(0.9, 0.6, 0.2), canine=(0.9, 0.1, 0.9), vehicle=(0.1, 0.2, 0.1))
    rows = list(hypernyms(runner, data, WORDS, "kinds"))
    notes = {entry.what: entry.note for entry in rows}
    assert "recall 50.0 %, false alarms 100.00 %" in notes["kinds, 'pet': recall at 0.5"]
    assert "recall 100.0 %, false alarms 0.00 %" in notes["kinds, 'canine': recall at 0.5"]  # a cat is unclear
    assert found(rows)["kinds: recall at 0.5"] == pytest.approx(50)
    assert found(rows)["kinds: false alarms"] == pytest.approx(100 / 3)


def test_values_of_a_column() -> None:
    p, t = np.array([[0.9, 0.1], [0.2, 0.6], [0.6, 0.3]]), np.array([[1, 0], [1, 1], [0, 0]], bool)
    assert values(p, t) == [(pytest.approx((1 + 2 / 3) / 2), 0.5), (1.0, 1.0)]


def test_the_judge_maps_tags_to_names_and_captions() -> None:
    judge = Judge(["person", "couch", "dog"], [Word("synonym", "settee", ("couch",))], Lexicon.built_in())
    judge.column |= {"person": 0, "couch": 1, "dog": 2}
    scores = judge.scores([[("woman", 0.9), ("human", 0.95), ("settee", 0.4)], [("beagle", 0.7), ("furniture", 0.9)]])
    assert scores.tolist() == [[0.95, 0.4, 0], [0, 0, 0.7]]
    assert judge.said("couch", ["A man on two sofas."])
    assert not judge.said("cat", ["A category of its own."])
    assert by_confidence([[("a", 0.1), ("b", 0.3)]]) == [[("b", 0.3), ("a", 0.1)]]


def test_all_of_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coco = tmp_path / "coco-ov"
    (coco / "test").mkdir(parents=True)
    for i, name in enumerate(NAMES):
        Image.new("RGB", (40, 30), (80 * i, 100, 50)).save(coco / "test" / f"{name}.png")
    images = [[f"test/{name}.png", [name]] for name in NAMES]
    (coco / "test_gzsl.json").write_text(json.dumps({"classes": NAMES, "images": images}))
    features = np.random.default_rng(0).random((50, 3, 3))
    names = ("image", "region", "best")
    calibrator = Calibrator.fit(features, features.mean(-1) > 0.5, names=names)
    Recognizer(tiny_ram(), calibrator=calibrator).save_pretrained(tmp_path / "model", with_backbone=True)
    command = ["--model", str(tmp_path / "model"), "--data", str(tmp_path), "--device", "cpu"]
    assert main([*command, "--limit", "3", "--json", str(tmp_path / "rows.json")]) == 0
    out, err = capsys.readouterr()
    assert "names: mAP" in out
    assert "ucm-ov" in err, "what is not there is said"
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["part"] == "test"
    assert all(row["model"].endswith("model") for row in content["rows"])
    assert {"images", "words"} <= set(content["rows"][0]["more"])
