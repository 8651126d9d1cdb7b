"""Before and after in one session: the bench of an older checkout and ours in turns, and the ratio of each line.

`python -m benchmarks.speed --baseline DIR`, where DIR is a checkout that has the package under src/ and either
`benchmarks/` beside it or, as older ones, `ramatch.bench` inside. Each turn of each side is a process of its own, so
that nothing is shared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ramatch.errors import RamatchError

from .measure import Row, row

ROOT = Path(__file__).parents[1]
LINES = ("clip", "test", "many", "retag", "train")
# what the new side must reach beside the old one: beginning of a row's name → least ratio
BARS = {"test, 1,006 labels, paper preset, batch": 0.95, "train, 925 labels, EMA, batch": 1.0}


def run_bench(checkout: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of one run of a checkout's own bench."""
    module = "benchmarks.speed" if (checkout / "benchmarks" / "speed.py").is_file() else "ramatch.bench.speed"
    path = os.pathsep.join([str(checkout / "src"), str(checkout)])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", module, *arguments, "--json", str(file)]
        run = subprocess.run(
            command, cwd=checkout, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
        if run.returncode or not file.is_file():
            raise RamatchError(f"{checkout}: its bench failed: {(run.stderr or run.stdout).strip()[-800:]}")
        return json.loads(file.read_text())["rows"]


def compare(
    baseline: str | Path,
    lines: Sequence[str] | None = None,
    *,
    turns: int = 2,
    arguments: Sequence[str] = (),
    run: Callable[[Path, Sequence[str]], list[dict[str, Any]]] = run_bench,
) -> Iterator[Row]:
    """Rows that both sides have, with the median of the turns of each: the value is ours, the baseline the old one's.
    Rows with a target that only we have follow as they are."""
    old = Path(baseline).resolve()
    if not (old / "src" / "ramatch").is_dir():
        raise RamatchError(f"{baseline} is no checkout of ramatch: it has no src/ramatch")
    asked = ["--lines", ",".join(lines or LINES), *arguments]
    values: dict[str, dict[Path, list[float]]] = defaultdict(lambda: defaultdict(list))
    units: dict[str, str] = {}
    judged: dict[str, dict[str, Any]] = {}
    for turn in range(turns):
        for side in (old, ROOT) if turn % 2 == 0 else (ROOT, old):  # neither is always the first on a warm machine
            for entry in run(side, asked):
                if entry["value"] is not None:
                    values[entry["what"]][side].append(entry["value"])
                    units[entry["what"]] = entry["unit"]
                if side == ROOT and entry["ok"] is not None:
                    judged[entry["what"]] = entry
    for what, found in values.items():
        if units[what].endswith("/s") and found[old] and found[ROOT]:
            bar = next((least for start, least in BARS.items() if what.startswith(start)), None)
            before = {"baseline": median(found[old]), "baseline_what": "before", "ratio_at_least": bar}
            turned = {"before": found[old], "after": found[ROOT]}
            yield row(what, median(found[ROOT]), units[what], **before, turns=turned)  # type: ignore[arg-type]
    for entry in judged.values():
        yield Row(**entry | {"what": f"by itself: {entry['what']}"})
