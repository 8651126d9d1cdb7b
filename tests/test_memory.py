"""What the command line asks of torch's allocator, and that users have the last word."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ramatch import memory

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def test_segments_grow_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "linux")
    for own in NAMES:
        environment = {own: "max_split_size_mb:64"}
        monkeypatch.setattr(memory.os, "environ", environment)
        memory.use_growing_segments()
        assert environment == {own: "max_split_size_mb:64"}
    environment = {}
    monkeypatch.setattr(memory.os, "environ", environment)
    memory.use_growing_segments()
    assert environment == {NAMES[1]: "expandable_segments:True"}
    monkeypatch.setattr(memory.sys, "platform", "win32")
    environment.clear()
    memory.use_growing_segments()
    assert environment == {}


def test_it_speaks_before_torch() -> None:
    code = "import sys, ramatch.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_garbage_is_looked_for_rarely() -> None:
    code = "import gc; from ramatch.cli import main; main(['tag']); print(gc.get_threshold()[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert int(done.stdout) >= 50_000
