"""Child processes with a time limit, their peak memory, and root's override of file modes taken away."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRACEBACK = b"Traceback (most recent call last)"
MIB = 1 << 20
CEILING = 4096 * MIB  # no child may take more data: a bomb must not take the machine along
DROPPED = (1, 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: with them root reads files of mode 000


@dataclass(frozen=True)
class Done:
    """How a process ended; `code` is None where it ran out of time."""

    code: int | None
    out: bytes
    err: bytes
    peak: int
    seconds: float

    def faults(self, codes: Sequence[int] = (0, 1, 2), most: int | None = None) -> list[str]:
        """A hang, a crash, a traceback, or more memory than `most` bytes."""
        faults = []
        if self.code is None:
            faults.append(f"still running after {self.seconds:.0f} s")
        elif self.code not in codes:
            faults.append(f"exit code {self.code}")
        if TRACEBACK in self.err or TRACEBACK in self.out:
            last = [line for line in (self.out + self.err).splitlines() if line.strip()][-1]
            faults.append("traceback: " + last.decode("utf-8", "replace")[:200])
        if most is not None and self.peak > most:
            faults.append(f"peak memory {self.peak / MIB:.0f} MiB, allowed {most / MIB:.0f}")
        return faults


def environment(**changes: str) -> dict[str, str]:
    """Ours, offline, one thread, with the package of this repository."""
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **fixed, "PYTHONPATH": paths, **changes}


def confine() -> None:
    """A ceiling for memory; and from the next exec on, file modes count for root too."""
    resource.setrlimit(resource.RLIMIT_DATA, (CEILING, CEILING))
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in DROPPED:
            libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def start(command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """A Python process of ours: `command` follows the interpreter."""
    fixed: dict[str, Any] = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "preexec_fn": confine}
    return subprocess.Popen([sys.executable, *command], env={**environment(), **(env or {})}, **fixed, **options)


def run(command: Sequence[str], *, limit: float = 300, env: Mapping[str, str] | None = None) -> Done:
    """Run to the end or to the limit of seconds."""
    begin = time.monotonic()
    process = start(command, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peak = Peak(process.pid)
    try:
        out, err = process.communicate(timeout=limit)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        code = None
    return Done(code, out, err, peak.stop(), time.monotonic() - begin)


def memory(pid: int, field: str = "VmRSS") -> int:
    """Bytes: VmRSS now, VmHWM at most since exec; 0 when the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class Peak:
    """Watches a process's peak memory until it ends; the kernel's own account for children counts their parent too."""

    def __init__(self, pid: int) -> None:
        self.pid, self.most, self._over = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, memory(self.pid, "VmHWM"))

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most
