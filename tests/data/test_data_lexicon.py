"""Words, their synonyms and what stands above them: from captions' tags to concepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ramatch.data.lexicon import Entry, Lexicon, all_words, concepts, phrasings, plural, unsettled
from ramatch.data.tags import Tags, mine_tags
from ramatch.errors import RamatchError

TABLE = """name\tkind\tsynonyms\tparents
couch\tthing\tsofa, settee\tfurniture
bed\tthing\t\tfurniture
furniture\tthing\t\tobject
dog\tanimal\t\tanimal
animal\tanimal\tcreature\t
"""


@pytest.fixture
def lexicon(tmp_path: Path) -> Lexicon:
    (tmp_path / "words.tsv").write_text(TABLE)
    return Lexicon.read(tmp_path / "words.tsv")


def test_entries_are_found_by_any_of_their_words(lexicon: Lexicon) -> None:
    assert lexicon.find("sofa").name == lexicon.find("couch").name == "couch"
    assert lexicon.find("sofa").words == ("couch", "sofa", "settee")
    assert lexicon.find("kite").words == ("kite",)
    assert lexicon.above(lexicon.find("settee")) == ["furniture", "object"]


def test_words_of_one_meaning_are_one_concept_and_parents_are_there_with_it(lexicon: Lexicon) -> None:
    said = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).bool()
    found = concepts(Tags(("couch", "sofa", "dog", "kite"), said), lexicon)
    assert found.names == ("couch", "dog", "kite", "furniture", "object", "animal")
    assert found.texts[0] == ("couch", "sofa", "settee")
    assert found.texts[5] == ("animal", "creature")
    assert found.targets.int().tolist() == [
        [1, 0, 0, 1, 1, 0],
        [1, 0, 0, 1, 1, 0],
        [0, 1, 0, 0, 0, 1],
        [0, 0, 1, 0, 0, 0],
    ]
    pairs = {(found.names[i], found.names[j]) for i, j in found.below.nonzero().tolist()}
    assert pairs == {("furniture", "couch"), ("object", "couch"), ("object", "furniture"), ("animal", "dog")}


def test_what_is_above_something_there_opens_no_other_kinds(lexicon: Lexicon) -> None:
    """A picture of a dog has an animal in it, and yet no cat: only an animal that nobody names may be anything."""
    table = Lexicon({e.name: e for e in [*lexicon.entries.values(), Entry("cat", (), ("animal",))]})
    said = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [0, 0, 0]]).bool()
    found = concepts(Tags(("dog", "cat", "animal"), said), table)
    assert found.names == ("dog", "cat", "animal")
    assert torch.equal(found.said, said)
    none = torch.zeros(3, 3, dtype=torch.bool)
    assert unsettled(found.said, found.targets, none, found.below).int().tolist() == [
        *([0, 0, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0])
    ]
    close = torch.zeros(3, 3, dtype=torch.bool)
    close[2, 1] = True  # of what is said itself, neighbors in meaning stay open; of what only stands above it, none
    assert unsettled(found.said, found.targets, close, found.below)[:, 1].tolist() == [False, False, True, True, False]


def test_without_a_lexicon_tags_stay_as_they_are() -> None:
    tags = mine_tags([["a red dog"], ["a dog and a cat"]], min_images=1)
    found = concepts(tags, None)
    assert found.names == tags.names
    assert torch.equal(found.targets, tags.targets)
    assert not found.below.any()
    assert Lexicon.named(None) is None


def test_wordings() -> None:
    assert [plural(w) for w in ("dog", "bus", "baby", "toy", "wine glass", "knife", "grass", "young man")] == [
        *("dogs", "buses", "babies", "toys", "wine glasses", "knives", "grass", "young men")
    ]
    found = phrasings(("couch", "sofa"))
    assert found[0] == "couch"
    assert {"sofa", "couches", "sofas", "a couch", "the sofa", "a photo of a sofa"} <= set(found)
    assert len(found) == len(set(found))


def test_all_words_have_each_meaning_once(lexicon: Lexicon) -> None:
    found = all_words(lexicon, [("couch", "sofa", "settee"), ("kite",)])
    assert sorted(words[0] for words in found) == ["animal", "bed", "couch", "dog", "furniture", "kite"]


def test_the_built_in_lexicon() -> None:
    built_in = Lexicon.named("built-in")
    assert built_in is not None
    assert built_in.find("automobile").name == "car"
    assert "animal" in built_in.above(built_in.find("dog"))
    assert "furniture" in built_in.above(built_in.find("sofa"))


def test_a_file_that_is_no_lexicon(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("a\tb\n1\t2\n")
    with pytest.raises(RamatchError, match="columns name, synonyms and parents"):
        Lexicon.read(tmp_path / "x.tsv")
