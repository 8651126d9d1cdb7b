from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from train_tiny import tiny_world


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `backbone/` and `data/`; runs go elsewhere."""
    return tiny_world(tmp_path_factory.mktemp("tiny"))
