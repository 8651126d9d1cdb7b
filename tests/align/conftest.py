"""Two tiny towers as `transformers` writes them, and coloured squares to align them on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from align_helpers import tiny_towers


@pytest.fixture(scope="session")
def towers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a random DINOv2 and a random BERT with a tokenizer."""
    return tiny_towers(tmp_path_factory.mktemp("towers"))
