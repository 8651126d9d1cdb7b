"""Fixtures of the data tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from data_helpers import put, put_json


@pytest.fixture
def lists(tmp_path: Path) -> Callable[..., Path]:
    """Write an annotation file in the authors' form, with pictures for the names in `pictures`."""

    def write(classes: list | None, images: list, pictures: tuple[str, ...] = ("a.png", "b.png")) -> Path:
        put(tmp_path, *pictures)
        content = {"images": images} if classes is None else {"classes": classes, "images": images}
        return put_json(tmp_path / "train.json", content)

    return write
