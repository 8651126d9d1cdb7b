from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from align_helpers import tiny_towers
from train_tiny import tiny_world


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `backbone/` and `data/`; runs go elsewhere."""
    return tiny_world(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def towers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a random DINOv2 and a random BERT with a tokenizer."""
    return tiny_towers(tmp_path_factory.mktemp("towers"))
