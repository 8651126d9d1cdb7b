"""What a call of the command line gave, and a few pictures to call it with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

LABELS = "cat,dog,kite,red,blue,person,bicycle"


class Result(NamedTuple):
    """Exit code and what was printed."""

    code: int
    out: str
    err: str

    def refused(self, *words: str) -> None:
        """Exit code 2 and one line that has these words, without a traceback."""
        assert self.code == 2, self
        assert self.out == ""
        assert self.err.count("\n") == 1, self.err
        assert "error: " in self.err
        for word in words:
            assert word in self.err, self.err


def put_photos(folder: Path, *names: str) -> None:
    """Pictures of 48 × 40 that differ."""
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((48, 40)).save(folder / name)
