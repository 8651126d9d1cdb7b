"""Speed beside a baseline in the same run: `python -m benchmarks.speed`, `benchmarks.ot`, `benchmarks.serve`. Not in the wheel."""
