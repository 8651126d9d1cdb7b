"""Shared fixtures. The real data and weights are optional: tests that want them skip when they are absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["RAMATCH_RUNTIME"] = "torch"  # but where a test asks for another
for other in ("JAX", "TENSORFLOW", "CUPY"):  # POT opens each it finds, and JAX takes most of a GPU's memory at once
    os.environ.setdefault(f"POT_BACKEND_DISABLE_{other}", "1")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with the real data (`data/`, `weights/`), from RAMATCH_SHARED or beside the repository."""
    root = Path(os.environ.get("RAMATCH_SHARED", Path(__file__).parents[2] / "shared"))
    if not (root / "data").is_dir():
        pytest.skip("real data not present (set RAMATCH_SHARED)")
    return root


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept between runs is kept between tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAMATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
