"""Tiny models and the fake recognizer of other tests serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("modeling", "serve", "train"):
    sys.path.insert(0, str(Path(__file__).parents[1] / room))
