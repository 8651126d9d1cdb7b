"""Speed beside a baseline in the same run: `python -m benchmarks.speed`, `.ot`, `.serve`. Not in the wheel."""
