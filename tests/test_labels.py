"""Labels as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramatch.errors import RamatchError
from ramatch.labels import SEPARATORS, merge_labels, parse_labels, split_labels

WORDS = st.text(st.characters(codec="utf-8", categories=("L", "Nd")), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("dog, cat", ("dog", "cat")),
        ("dog; cat|bird\nfish\tant", ("dog", "cat", "bird", "fish", "ant")),
        (' "salt, pepper" , cat ', ("salt, pepper", "cat")),
        ("men's shoe, 'hot dog', “fire truck”", ("men's shoe", "hot dog", "fire truck")),
        ("dog,,  ,hot   dog,", ("dog", "hot dog")),
        ("rock'n'roll", ("rock'n'roll",)),
        ("dog.txt", ("dog.txt",)),
        (["dog", " cat ", "a, b"], ("dog", "cat", "a, b")),
    ],
)
def test_typed(typed, names) -> None:
    assert parse_labels(typed).names == names
    assert parse_labels(typed).notes == ()


def test_case_and_repeats_are_merged_with_a_note() -> None:
    found = parse_labels("Car, PERSON, car, person, kite, kite")
    assert found.names == ("Car", "PERSON", "kite")
    assert found.notes == (
        "'car' and 'Car' are one label; it counts once, as 'Car'",
        "'person' and 'PERSON' are one label; it counts once, as 'PERSON'",
        "'kite' is given twice; it counts once, as 'kite'",
    )


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("a.txt", "\ufeffdog\n# a comment\n\nsalt, pepper\nDog\n", ("dog", "salt, pepper")),
        ("a.txt", "dog; cat, bird", ("dog", "cat", "bird")),
        ("a.csv", 'label\ndog\n"salt, pepper"\n', ("dog", "salt, pepper")),
        ("a.csv", "dog,cat\nbird,fish\n", ("dog", "cat", "bird", "fish")),
        ("a.tsv", "name\tdog\tcat\n", ("dog", "cat")),
        ("a.txt", "", ()),
    ],
)
def test_files(tmp_path, name, text, names) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert parse_labels(tmp_path / name).names == names
    assert parse_labels(str(tmp_path / name)).names == names


def test_what_is_wrong_is_said(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00d")
    with pytest.raises(RamatchError, match=r"a\.txt: not UTF-8 text"):
        parse_labels(tmp_path / "a.txt")
    with pytest.raises(RamatchError, match="No such file"):
        parse_labels(tmp_path / "b.txt")
    with pytest.raises(RamatchError, match="quote is not closed"):
        parse_labels('"dog, cat')
    with pytest.raises(RamatchError, match="must be text, got 3"):
        parse_labels(["dog", 3])


@given(st.lists(WORDS, min_size=1, max_size=6), st.sampled_from(SEPARATORS))
def test_any_separator_gives_the_same(words, separator) -> None:
    assert merge_labels(split_labels(separator.join(words))) == merge_labels(words)


@given(st.lists(WORDS, max_size=8))
def test_merging_is_idempotent_and_leaves_no_two_alike(words) -> None:
    names = merge_labels(words).names
    assert merge_labels(names).names == names
    assert len({name.casefold() for name in names}) == len(names)
