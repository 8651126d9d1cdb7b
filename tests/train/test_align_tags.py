"""Tags mined from captions."""

from __future__ import annotations

from collections import Counter

from ramatch.data.tags import STOP, mine_tags, singular

CAPTIONS = [
    ["Two dogs on the grass.", "A dog, a dog and a red frisbee", "dogs!"],
    ["a dog chases a red frisbee in front of the buses"],
    ["the red bus of the city"],
    ["berries and a berry pie", "a woman with sunglasses"],
    ["some women near a bus"],
]


def tags_of(row: int, **options: int) -> set[str]:
    found = mine_tags(CAPTIONS, **options)
    return {name for name, there in zip(found.names, found.targets[row].tolist(), strict=True) if there}


def test_counts_are_over_images_and_order_is_by_count_then_name():
    found = mine_tags(CAPTIONS, min_images=1)
    counts = dict(zip(found.names, found.targets.sum(0).tolist(), strict=True))
    assert counts["dog"] == 2  # four times in the first image, once in the second
    assert counts["bus"] == 3  # "buses" counts as "bus"
    assert counts["red"] == 3
    assert counts["woman"] == 2
    order = [(-counts[name], name) for name in found.names]
    assert order == sorted(order)
    assert found.names[:2] == ("bus", "red")
    assert found.targets.shape == (5, len(found.names))
    assert found.targets.dtype.is_floating_point is False


def test_phrases_of_two_words_that_stand_together():
    first = tags_of(0, min_images=1)
    assert "red frisbee" in first
    assert "dog frisbee" not in first  # "and a" stands between
    assert "dog dog" not in first
    assert {"berry pie", "berry"} <= tags_of(3, min_images=1)


def test_stop_words_and_single_letters_are_no_tags():
    found = mine_tags([["a view of the x ray on its side", "it's there's 3 d"]], min_images=1)
    words = {word for name in found.names for word in name.split()}
    assert words == {"ray"}
    assert not words & STOP


def test_a_plural_becomes_singular_only_if_the_captions_use_the_singular():
    known = Counter(["dog", "berry", "bus", "glass", "box"])
    assert singular("dogs", known) == "dog"
    assert singular("berries", known) == "berry"
    assert singular("boxes", known) == "box"
    assert singular("cats", known) == "cats"
    assert singular("glass", known) == "glass"
    assert singular("glasses", known) == "glasses"  # to wear, not several of one
    assert singular("children", Counter()) == "child"
    assert singular("gas", Counter(["ga"])) == "gas"
    assert "sunglasses" in tags_of(3, min_images=1)


def test_fewest_images_and_most_tags():
    everything = mine_tags(CAPTIONS, min_images=1)
    two = mine_tags(CAPTIONS, min_images=2)
    assert set(two.names) == {n for n, c in zip(everything.names, everything.targets.sum(0), strict=True) if c >= 2}
    assert mine_tags(CAPTIONS, min_images=2, max_tags=2).names == two.names[:2]
    assert (mine_tags(CAPTIONS, min_images=2, max_tags=2).targets == two.targets[:, :2]).all()
    none = mine_tags(CAPTIONS, min_images=99)
    assert none.names == ()
    assert none.targets.shape == (5, 0)
