"""Runs `exported_cases.py` in a process of its own (see there)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_other_runtimes() -> None:
    cases = Path(__file__).with_name("exported_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=cases.parents[2])
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
