"""A verb killed at random moments and started again, as kill_worker does it, and what was wrong with that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from soak.process import run as run_process


def killed(
    argv: list[str], root: Path, kills: int, *, seed: int, limit: float, **more: str
) -> tuple[list[Any], list[str]]:
    """The runs (name, exit code, kills), first the one left alone, and faults. `more`: see kill_worker.main."""
    values = {"argv": argv, "root": str(root), "kills": kills, "seed": seed, "limit": limit, **more}
    done = run_process(["-m", "soak.kill_worker", json.dumps(values)], limit=limit + 100)
    runs = [json.loads(line) for line in done.out.splitlines() if line.startswith(b"{")]
    misses, landed = done.faults(), sum(each["killed"] for each in runs)
    if landed < kills:
        misses.append(f"only {landed} kills of {kills} in the time")
    for each in runs:
        misses += [f"{each['run']}: {fault}" for fault in each["faults"]]
        if each["code"] != 0:
            log = (root / f"{Path(each['run']).stem}.log").read_text(errors="replace").strip().splitlines()[-1:]
            misses.append(f"{each['run']}: exit code {each['code']} {' '.join(log)[-200:]}")
    return runs, misses
