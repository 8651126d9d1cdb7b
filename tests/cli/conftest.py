"""A tiny model folder, a few pictures, and a way to call the command line in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
sys.path.insert(0, str(Path(__file__).parent))

from cli_helpers import Result, put_photos
from tiny_models import tiny_ram

from ramatch.cli import main
from ramatch.recognizer import Recognizer


@pytest.fixture
def ramatch(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*arguments: object) -> Result:
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as stop:  # argparse leaves this way
            code = stop.code if isinstance(stop.code, int) else 1
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that stands alone, not calibrated."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    Recognizer(tiny_ram()).save_pretrained(folder, with_backbone=True)
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """img1, img2, img10 (in this order by number) and one in a folder of its own."""
    put_photos(tmp_path / "photos", "img1.png", "img2.jpg", "img10.png", "more/img3.webp")
    return tmp_path / "photos"
