"""Features of long lists are kept between runs, and nothing depends on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny_ram

from ramatch.modeling.known import LEAST, Known
from ramatch.modeling.learned import Learned
from ramatch.modeling.remembered import KEPT, cache_folder, remembered

NAMES = ["dog", "cat", "kite"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAMATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def test_what_is_read_back_is_what_was_encoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ram = tiny_ram().eval()
    plain = ram.encode_labels(NAMES)
    first = remembered(ram, NAMES)
    assert len(files(folder)) == 1
    monkeypatch.setattr(type(ram), "encode_labels", lambda *_: pytest.fail("encoded again"))
    again = remembered(ram, NAMES)
    assert again.names == first.names == plain.names
    assert again.familiarity is None
    for name in ("unit", "tss"):
        torch.testing.assert_close(getattr(again, name), getattr(plain, name))


def test_how_familiar_labels_are_is_kept_too(folder: Path) -> None:
    ram = tiny_ram().eval()
    remembered(ram, NAMES)
    ram.known = Known(torch.randn(LEAST, ram.backbone.dim), torch.ones(4))
    plain = ram.encode_labels(NAMES)
    for _ in range(2):
        np.testing.assert_allclose(remembered(ram, NAMES).familiarity, plain.familiarity, atol=1e-6)
    assert len(files(folder)) == 2
    ram.known = Known(ram.known.unit, torch.zeros(4))
    assert remembered(ram, NAMES).familiarity.tolist() == [0.5] * 3


def test_another_model_list_or_template_is_another_file(folder: Path) -> None:
    ram = tiny_ram().eval()
    remembered(ram, NAMES)
    remembered(ram, NAMES[::-1])
    remembered(ram, NAMES, ["a {}"])
    ram.background = ("boat",)
    found = remembered(ram, NAMES)
    assert len(found.unit) == 4
    torch.testing.assert_close(found.tss, ram.encode_labels(["boat"]).tss)
    with torch.no_grad():
        next(iter(ram.backbone.text.parameters())).add_(1)
    remembered(ram, NAMES)
    assert len(files(folder)) == 5


def test_a_broken_file_is_made_again(folder: Path) -> None:
    ram = tiny_ram().eval()
    plain = remembered(ram, NAMES)
    (file,) = files(folder)
    file.write_bytes(file.read_bytes()[:40])
    torch.testing.assert_close(remembered(ram, NAMES).unit, plain.unit)
    assert len(files(folder)[0].read_bytes()) > 40


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("RAMATCH_CACHE", str(tmp_path / "file" / "cache"))
    assert len(remembered(tiny_ram().eval(), NAMES)) == 3
    assert (tmp_path / "file").read_text() == "not a folder"


def test_old_files_go(folder: Path) -> None:
    ram = tiny_ram().eval()
    for i in range(KEPT + 3):
        remembered(ram, [f"w{i}"])
    assert len(files(folder)) == KEPT


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAMATCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "ramatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "ramatch"


def test_labels_that_were_taught_are_kept_as_such(folder: Path) -> None:
    ram = tiny_ram().eval()
    before = remembered(ram, NAMES)
    ram.learned = Learned(("cat",), F.normalize(torch.randn(1, ram.backbone.dim), dim=-1))
    for _ in range(2):
        found = remembered(ram, NAMES)
        assert found.learned.tolist() == [False, True, False]
        torch.testing.assert_close(found.unit[1], ram.learned.unit[0])
        torch.testing.assert_close(found.unit[0], before.unit[0])
    assert len(files(folder)) == 2
    ram.learned = Learned(("dog",), ram.learned.unit)
    assert remembered(ram, NAMES).learned.tolist() == [True, False, False]
