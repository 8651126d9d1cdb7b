"""A tiny recognizer and folders of small pictures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import put_photos
from tiny_models import tiny_ram

from ramatch.recognizer import Recognizer


@pytest.fixture(scope="session")
def recognizer() -> Recognizer:
    torch.manual_seed(0)  # tiny_ram draws some weights from it
    return Recognizer(tiny_ram(), cache=0)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    put_photos(tmp_path / "photos", *(f"img{i}.png" for i in range(6)), "more/a.png", "more/b.png")
    return tmp_path / "photos"
