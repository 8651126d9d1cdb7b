"""What else a label is looked for as, and which tags say something new."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ramatch.assets import GENERAL, vocabulary
from ramatch.data.kinds import CAUTION, SHARE, each_once, sought
from ramatch.data.lexicon import Lexicon
from ramatch.errors import RamatchError

TABLE = """name	kind	synonyms	parents	common
animal	animal	creature		3
pet	animal		animal	3
dog	animal	pooch	pet	4
terrier	animal		dog	3
bat	animal		animal	1
cat	animal		pet	4
couch	thing	sofa		3
"""


@pytest.fixture
def lexicon(tmp_path: Path) -> Lexicon:
    (tmp_path / "words.tsv").write_text(TABLE)
    return Lexicon.read(tmp_path / "words.tsv")


def test_labels_are_found_as_people_write_them(lexicon: Lexicon) -> None:
    for label in ("animal", "Animal", "an animal", "the animals", "creatures", "A photo of an animal", "an ani-mal"):
        entry = lexicon.meant(label)
        assert entry is not None
        assert entry.name == "animal"
    assert lexicon.meant("kite") is None
    assert [entry.name for entry in lexicon.below(lexicon.entries["animal"])] == ["pet", "dog", "terrier", "bat", "cat"]


def test_a_label_is_looked_for_as_its_kinds_and_by_its_usual_name(lexicon: Lexicon) -> None:
    found = sought(["animal", "kite", "sofa", "dog"], lexicon)
    # the most common kinds first; "bat" is not common as an animal; what was asked for is not looked for twice
    assert found.words == ("animal", "kite", "sofa", "dog", "cat", "pet", "terrier", "couch")
    assert found.same == ((), (), (7,), ())
    assert found.kinds == ((3, 4, 5, 6), (), (), (6,))
    alone = sought(["animal", "sofa"])
    assert alone.plain
    assert alone.words == ("animal", "sofa")
    assert sought([], lexicon).words == ()


def test_a_synonym_is_as_probable_as_its_name_a_parent_needs_to_agree(lexicon: Lexicon) -> None:
    found = sought(["animal", "sofa"], lexicon)
    p = np.zeros((1, len(found.words)), np.float32) + 0.01
    p[0, 0], p[0, found.words.index("dog")], p[0, found.words.index("couch")] = 0.2, 0.95, 0.7
    combined = found.combine(p)
    odds = SHARE * math.log(0.95 / 0.05) + (1 - SHARE) * math.log(0.2 / 0.8) - CAUTION * math.log(1 + 4)
    assert combined.shape == (1, 2)
    assert combined.dtype == np.float32
    assert combined[0] == pytest.approx([1 / (1 + math.exp(-odds)), 0.7], abs=1e-6)
    assert [found.words[i] for i in found.winners(p[0])] == ["dog", "couch"]
    assert found.highest(p)[0] == pytest.approx([0.95, 0.7])
    p[0, 0] = 0.99  # surer of the label itself than of any kind
    assert found.combine(p)[0, 0] == pytest.approx(99 / (99 + 5**CAUTION), abs=1e-6)
    assert found.words[found.winners(p[0])[0]] == "animal"
    some = found.among(np.array([word != "dog" for word in found.words]))
    assert (some.labels, some.words) == (found.labels, found.words)
    dog = found.words.index("dog")
    assert some.kinds == tuple(tuple(c for c in group if c != dog) for group in found.kinds)
    assert dog in found.kinds[0]
    p = np.random.default_rng(0).random((2, 5, len(found.words)))
    assert found.winners(p).tolist() == [[found.winners(row).tolist() for row in block] for block in p]
    certain = found.combine(np.ones_like(p))
    assert np.isfinite(certain).all()
    assert certain.max() <= 1


def test_labels_that_were_taught_are_looked_for_alone(lexicon: Lexicon) -> None:
    found = sought(["animal", "sofa"], lexicon)
    taught = found.alone(np.array([True, False]))
    assert taught.words == found.words
    assert (taught.same[0], taught.kinds[0], taught.general[0]) == ((), (), False)
    assert (taught.same[1], taught.kinds[1], taught.general[1]) == (found.same[1], found.kinds[1], found.general[1])


def test_only_general_labels_pay_for_their_many_kinds(lexicon: Lexicon) -> None:
    found = sought(["dog", "animal"], lexicon)  # captions say "dog" more often than any of its kinds
    assert found.general == (False, True)
    p = np.full((1, len(found.words)), 0.6, np.float32)
    assert found.combine(p)[0, 0] == pytest.approx(0.6)
    assert found.combine(p)[0, 1] < 0.5
    built_in = Lexicon.built_in()
    assert sought(["person", "car", "bird", "bus"], built_in).general == (False,) * 4
    assert sought(["animal", "furniture", "vehicle", "electronic device"], built_in).general == (True,) * 4


@pytest.mark.parametrize(
    ("label", "name"),
    [("hair-drier", "hair drier"), ("Motor Cars", "car"), ("a pair of skis", "skis"), ("tele vision", "tv")],
)
def test_words_are_read_in_any_spelling(label: str, name: str) -> None:
    entry = Lexicon.built_in().meant(label)
    assert entry is not None
    assert entry.name == name


def test_each_thing_is_said_once(lexicon: Lexicon) -> None:
    names = ["animal", "dog", "terrier", "cat", "kite"]

    def said(*p: float) -> list[str]:
        values = np.array(p)
        return [names[i] for i in each_once(names, values, np.argsort(-values, kind="stable").tolist(), lexicon)]

    assert said(0.99, 0.97, 0.6, 0.1, 0.4) == ["dog", "kite", "cat"]  # the terrier is much less certain than the dog
    assert said(0.99, 0.97, 0.95, 0.9, 0.1) == ["terrier", "cat", "kite"]  # a cat is there as well
    assert said(0.8, 0.3, 0.2, 0.1, 0.7) == ["animal", "kite"]  # some animal
    assert said(0.1, 0.3, 0.2, 0.05, 0.0) == ["dog", "cat", "kite"]  # nothing is sure: the likelier of two


def test_a_common_column_holds_numbers(tmp_path: Path) -> None:
    (tmp_path / "bad.tsv").write_text("name\tsynonyms\tparents\tcommon\ndog\t\t\tvery\n")
    with pytest.raises(RamatchError, match="whole numbers, not 'very'"):
        Lexicon.read(tmp_path / "bad.tsv")


def test_the_general_vocabulary_is_in_order() -> None:
    lexicon = Lexicon.built_in()
    names = vocabulary(GENERAL)
    assert names == list(lexicon.entries) == sorted(names)
    assert 3_500 <= len(names) <= 4_500
    words = [word for entry in lexicon.entries.values() for word in entry.words]
    assert len(set(words)) == len(words), "a word means one thing"
    assert all(word == " ".join(word.split()) == word.casefold() for word in words)
    for entry in lexicon.entries.values():
        assert set(entry.parents) <= set(names), entry
        assert entry.name not in lexicon.above(entry), "a thing is no kind of itself"
        for parent in entry.parents:
            assert entry.name not in lexicon.above(lexicon.entries[parent]), entry


@pytest.mark.parametrize(
    ("word", "name", "above"),
    [
        ("human", "person", None),
        ("automobile", "car", "vehicle"),
        ("sofa", "couch", "furniture"),
        ("doughnut", "donut", "dessert"),
        ("television", "tv", "electronics"),
        ("fork", "fork", "cutlery"),
        ("zebra", "zebra", "animal"),
        ("helicopter", "helicopter", "aircraft"),
        ("rose", "rose", "flower"),
        ("toilet", "toilet", "plumbing fixture"),
    ],
)
def test_what_everybody_knows(word: str, name: str, above: str | None) -> None:
    entry = Lexicon.built_in().find(word)
    assert entry.name == name
    assert above is None or above in Lexicon.built_in().above(entry)


@pytest.mark.parametrize(
    ("word", "wrong"),
    [
        ("cat tree", "plant"),
        ("blue", "clothing"),
        ("kitchen hood", "person"),
        ("toy car", "vehicle"),
        ("lamp", "furniture"),
    ],
)
def test_words_of_another_sense_are_no_kinds(word: str, wrong: str) -> None:
    assert wrong not in Lexicon.built_in().above(Lexicon.built_in().find(word))


def test_captions_name_every_word_of_the_everyday_vocabulary() -> None:
    lexicon = Lexicon.built_in()
    entries = {word: lexicon.meant(word) for word in vocabulary("everyday")}
    unknown = [word for word, entry in entries.items() if entry is None or not entry.common]
    assert not unknown
