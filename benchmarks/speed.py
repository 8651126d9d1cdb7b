"""Speed, each line with a baseline measured beside it in the same run: `python -m benchmarks.speed`.

Weights are random and of real size (ViT-B/16; on a CPU the small model's), so nothing is downloaded: speed does not
depend on what the numbers are, except for the transport solver's iterations, which get labels that differ.
A line that fails or takes too long is reported as such and the others still run. See docs/performance.md for the
method.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ramatch.errors import RamatchError
from ramatch.files import write_json
from ramatch.memory import use_growing_segments

from .compare import compare
from .lines_cpu import CPU_LINES
from .lines_profile import PROFILE_LINES
from .lines_test import TEST_LINES
from .lines_train import TRAIN_LINES
from .measure import Row, errors_in_words, run_line
from .models import Bench, Line

LINES: dict[str, Line] = {**TEST_LINES, **TRAIN_LINES, **PROFILE_LINES, **CPU_LINES}
ON_GPU = (
    *("ceilings", "clip", "test", "train", "many", "retag", "vocabulary", "solver", "linear", "reference"),
    *("profile", "profile_train"),
)
ON_CPU = ("ceilings", "tag", "first", "solver")


def bench_speed(
    device: str | torch.device | None = None,
    lines: Sequence[str] | None = None,
    *,
    cap: float | None = 60.0,
    compiled: bool = False,
    model: str | None = None,
    report: Callable[[Row], None] | None = None,
    **sizes: Any,
) -> list[dict[str, Any]]:
    """Measure lines and return their rows: what, value, unit, baseline, ratio, target, ok, note, more.

    Args:
        lines: names from `LINES`; by default those that belong to the device.
        cap: seconds a line may take before it is given up.
        compiled: also measure plain CLIP under torch.compile.
        model: for the lines that start `ramatch tag`; by default the bundled one.
        report: called with every row as it comes.
        sizes: fields of `Bench` (batches, labels, ...), for a smaller run.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = tuple(lines) if lines else ON_GPU if device.type == "cuda" else ON_CPU
    unknown = [name for name in chosen if name not in LINES]
    if unknown:
        raise RamatchError(f"unknown line(s) {', '.join(unknown)}; known: {', '.join(LINES)}")
    bench = Bench(device, compiled=compiled, model=model, **sizes)
    found: list[Row] = []
    for name in chosen:
        found += run_line(name, partial(LINES[name], bench), cap, report or (lambda _: None), device)
    return [entry.to_dict() for entry in found]


def machine(device: torch.device) -> dict[str, str]:
    """What the numbers were measured on."""
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return {"device": name, **versions, "threads": str(torch.get_num_threads())}


def format_row(entry: Row) -> str:
    """One line of the table."""

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

    ratio = "" if entry.ratio is None else f"{entry.ratio:.2f}×"
    verdict = "" if entry.ok is None else "ok" if entry.ok else "MISSED"
    baseline = number(entry.baseline) if entry.baseline else ""
    text = f"{entry.what:<78} {number(entry.value):>9} {entry.unit:<8} {baseline:>9} "
    text += f"{ratio:>8}  {entry.target:<22} {verdict:<7}"
    return f"{text} {entry.note}".rstrip()


HEADING = f"{'what':<78} {'value':>9} {'unit':<8} {'baseline':>9} {'ratio':>8}  {'target':<22} {'':<7} note"


def show_rows(measure: Callable[[Callable[[Row], None]], object], device: str | None, json: str | None) -> None:
    """Print every row that `measure` reports as it comes, and write all of them to a JSON file if one is named."""
    about = machine(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    print("  ".join(f"{k} {v}" for k, v in about.items()), HEADING, sep="\n", flush=True)
    rows: list[dict[str, Any]] = []

    def report(entry: Row) -> None:
        print(format_row(entry), flush=True)
        if entry.more.get("trace"):
            print(entry.more["trace"], file=sys.stderr, flush=True)
        rows.append(entry.to_dict())
        if json:  # after every row: a run that is cut short leaves what it had
            write_json(json, {"machine": about, "rows": rows})

    measure(report)
    missed = [entry["what"] for entry in rows if entry["ok"] is False]
    print(
        f"{len(missed)} of {sum(e['ok'] is not None for e in rows)} targets missed"
        + "".join(f"\n  {m}" for m in missed)
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default=None)
    parser.add_argument("--lines", default=None, metavar="A,B", help=f"of {', '.join(LINES)}")
    parser.add_argument("--cap", type=float, default=60.0, metavar="S", help="seconds a line may take")
    parser.add_argument("--budget", type=float, default=1.0, metavar="S", help="seconds of one measurement")
    parser.add_argument("--compiled", action="store_true", help="also plain CLIP under torch.compile")
    parser.add_argument("--model", default=None, help="for the line `first`; default: the bundled one")
    parser.add_argument(
        "--baseline", default=None, metavar="DIR", help="a checkout to compare with, in turns, line by line"
    )
    parser.add_argument("--turns", type=int, default=2, metavar="N", help="of each side, with --baseline")
    parser.add_argument("--json", default=None, metavar="F", help="also write the rows to this file")
    args = parser.parse_args(argv)
    use_growing_segments()
    lines = args.lines.split(",") if args.lines else None

    def alone(report: Callable[[Row], None]) -> None:
        options = {"cap": args.cap, "budget": args.budget, "compiled": args.compiled, "model": args.model}
        bench_speed(args.device, lines, report=report, **options)

    def beside(report: Callable[[Row], None]) -> None:
        same = [
            "--cap",
            str(args.cap),
            "--budget",
            str(args.budget),
            *(["--device", args.device] if args.device else []),
        ]
        for entry in compare(args.baseline, lines, turns=args.turns, arguments=same):
            report(entry)

    show_rows(beside if args.baseline else alone, args.device, args.json)
    return 0


if __name__ == "__main__":
    errors_in_words(main)
