"""A tiny model folder, small pictures in every kind of place, and a way to call the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
sys.path.insert(0, str(Path(__file__).parents[1] / "library"))
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import Result, put_photos
from tiny_models import tiny_ram

from ramatch.cli import main
from ramatch.recognizer import Recognizer

pytest.importorskip("pyarrow")


@pytest.fixture
def ramatch(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*arguments: object) -> Result:
        return Result(main([str(a) for a in arguments]), *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    Recognizer(tiny_ram()).save_pretrained(folder, with_backbone=True)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    put_photos(tmp_path / "photos", *(f"img{i}.png" for i in range(9)), "more/img3.webp")
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no picture")
    return tmp_path / "photos"
