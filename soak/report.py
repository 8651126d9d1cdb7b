"""What was required, how often it was tried, and what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

SHOWN = 20  # misses of a requirement that are listed


@dataclass(frozen=True)
class Check:
    """One requirement: `found` says what was seen, above all where it was missed."""

    part: str
    name: str
    required: str
    cases: int
    ok: bool
    found: str
    seconds: float


@dataclass
class Soak:
    """A run of the parts: where they may write, how long they may be, and what they have found."""

    work: Path
    short: bool = False
    seed: int = 0
    out: TextIO = field(default_factory=lambda: sys.stdout)
    checks: list[Check] = field(default_factory=list)
    part: str = ""

    def size(self, full: int, short: int) -> int:
        """How many cases, by the form of the run."""
        return short if self.short else full

    def folder(self, name: str) -> Path:
        path = self.work / self.part / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def clear(self) -> None:
        """Remove what the present part wrote; shutil would recurse, and some trees are deep."""
        subprocess.run(["rm", "-rf", str(self.work / self.part)], check=False)

    def check(self, name: str, required: str, misses: Iterable[str] | str, *, cases: int, since: float) -> bool:
        """Note a requirement: met if there are no misses. `since` is on the clock of time.monotonic."""
        found = [misses] if isinstance(misses, str) else list(misses)
        found = [miss for miss in found if miss]
        ok = not found
        text = "; ".join(found[:SHOWN]) + (f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
        check = Check(self.part, name, required, cases, ok, text, round(time.monotonic() - since, 1))
        self.checks.append(check)
        print(row(check), file=self.out, flush=True)
        return ok

    @property
    def missed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]


HEAD = f"{'part':<9}{'check':<22}{'cases':>7}  {'result':<7}{'seconds':>8}  required"


def row(check: Check) -> str:
    """A line of the table; what was found follows where it was a miss."""
    line = f"{check.part:<9}{check.name:<22}{check.cases:>7}  {'ok' if check.ok else 'MISSED':<7}{check.seconds:>8.1f}"
    line += f"  {check.required}"
    if check.ok:
        return line
    return line + "\n" + textwrap.indent(textwrap.fill(printable(check.found), 110), " " * 11)


def write_json(soak: Soak, path: Path) -> None:
    path.write_text(json.dumps([asdict(check) for check in soak.checks], indent=1) + "\n", encoding="utf-8")


def printable(text: str, most: int = 1200) -> str:
    """Text for a terminal: hostile names lose their control characters here."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text.encode("utf-8", "replace").decode())[
        :most
    ]
