"""What is bundled: vocabularies that read well, photographs that are small and free."""

from __future__ import annotations

import pytest
from PIL import Image

from ramatch import assets
from ramatch.errors import RamatchError


def test_vocabularies_have_their_size_and_no_repeats() -> None:
    sizes = {name: len(assets.vocabulary(name)) for name in assets.vocabulary_names()}
    assert sizes["coco80"] == 80
    assert sizes["nus81"] == 81
    assert sizes["voc20"] == 20
    assert 300 <= sizes["everyday"] <= 600
    for name in sizes:
        labels = assets.vocabulary(name)
        assert len({label.lower() for label in labels}) == len(labels)
        assert all(label == label.strip() and label.isprintable() for label in labels)
    assert all(label == label.lower() for label in assets.vocabulary("everyday"))


def test_unknown_vocabulary_names_the_known_ones() -> None:
    with pytest.raises(RamatchError, match="coco80"):
        assets.vocabulary("../secrets")


def test_photographs_are_small_and_their_licences_listed() -> None:
    paths = assets.photo_paths()
    assert 6 <= len(paths) <= 10
    sources = (paths[0].parent / "SOURCES.md").read_text(encoding="utf-8")
    total = 0
    for path in paths:
        total += path.stat().st_size
        assert path.stat().st_size <= 200_000
        [row] = [line for line in sources.splitlines() if f"`{path.name}`" in line]
        assert "CC0" in row or "public domain" in row
        with Image.open(path) as image:
            assert image.format == "JPEG"
            assert max(image.size) <= 1024
    assert total < 2_000_000
