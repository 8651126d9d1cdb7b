"""What a library holds, in a form that two of them can be compared by."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ramatch.library import Library
from ramatch.recognizer import Recognizer


def content(library: Library) -> dict[str, tuple]:
    """For each file: hash, size, time and length of its thumbnail. Every vector is read back and must be whole."""
    with Library.open(library.path) as fresh:
        assert fresh.verify() == []
        rows = fresh.database.execute(
            "SELECT path, digest, size, mtime, LENGTH(webp) FROM files JOIN photos ON photos.id = files.photo "
            "LEFT JOIN thumbnails ON thumbnails.photo = photos.id"
        ).fetchall()
    return {row[0].decode(): row[1:] for row in rows}


def answers(library: Library, recognizer: Recognizer) -> dict[str, np.ndarray]:
    """Scores of some labels for each file. The last bits depend on which images went through the model together."""
    return {Path(p.source or "").name: p.scores for p in library.tag(["cat", "dog", "kite", "red"], recognizer)}


def agree(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """The first has nothing that the second has not, and the same of it."""
    for name, scores in a.items():
        np.testing.assert_allclose(scores, b[name], atol=2e-3)
