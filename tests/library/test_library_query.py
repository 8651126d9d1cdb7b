"""The language of searches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramatch.errors import RamatchError
from ramatch.library.search import Query, parse_query


@pytest.mark.parametrize(
    ("texts", "wanted", "unwanted"),
    [
        ("dog beach", ("beach", "dog"), ()),
        ('"hot dog" table', ("hot dog", "table"), ()),
        ('dog -person -"old man"', ("dog",), ("old man", "person")),
        ("hot dog, beach", ("beach", "hot dog"), ()),
        ("hot dog, -old man,", ("hot dog",), ("old man",)),
        (["hot dog", "beach"], ("beach", "hot dog"), ()),
        (["hot dog", "beach, -sea"], ("beach", "hot dog"), ("sea",)),
        (["dog beach"], ("beach", "dog"), ()),
        ("-person", (), ("person",)),
        ("t-shirt", ("t-shirt",), ()),
        ('"a, b" c', ("a, b", "c"), ()),
        ("dog Dog DOG", ("DOG",), ()),
        ("", (), ()),
    ],
)
def test_examples(texts: str | list[str], wanted: tuple[str, ...], unwanted: tuple[str, ...]) -> None:
    assert parse_query(texts) == Query(wanted, unwanted)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ('"hot dog', "does not close"),
        ("dog -", "is empty"),
        ('dog ""', "is empty"),
        ("dog -DOG", "its absence"),
    ],
)
def test_slips_are_named(texts: str, message: str) -> None:
    with pytest.raises(RamatchError, match=message):
        parse_query(texts)


word = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=6)
phrase = st.lists(word, min_size=1, max_size=3).map(" ".join)


@given(st.lists(phrase, min_size=1, max_size=5, unique_by=str.casefold), st.integers(0, 5), st.randoms())
def test_order_spacing_and_way_of_writing_do_not_matter(labels: list[str], split: int, random) -> None:
    query = parse_query([*labels[:split], *(f"-{label}" for label in labels[split:])] * 2)
    assert sorted(query.labels) == sorted(labels)
    assert sorted(query.unwanted) == sorted(labels[split:])
    signed = [("", label) for label in labels[:split]] + [("-", label) for label in labels[split:]]
    random.shuffle(signed)
    assert parse_query("  ".join(f'{minus}"{label}"' for minus, label in signed)) == query
    assert parse_query(" , ".join(minus + label for minus, label in signed) + ",") == query
    assert parse_query([f'"{label}",' for label in labels[:split]] or "", labels[split:]) == query
