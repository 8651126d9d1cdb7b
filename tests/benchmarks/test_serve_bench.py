"""The load generator against a server with a fake model whose cost is known."""

from __future__ import annotations

from functools import partial

import pytest
from serve_fakes import FakeRecognizer

from benchmarks.serve import Load, bench_serve
from ramatch.errors import RamatchError
from ramatch.serve.settings import ServeSettings


def test_batching_beats_one_at_a_time_and_overload_is_refused() -> None:
    lines: list[str] = []
    result = bench_serve(
        partial(FakeRecognizer, seconds=0.05),
        concurrency=(1, 8),
        seconds=0.8,
        overload=4.0,
        echo=lines.append,
        settings=ServeSettings(queue_size=8, max_batch=8),
        vocabulary="voc20",
    )
    one, single, eight, flood = result["rows"]
    # A call costs 50 ms however many images it has: one at a time cannot pass 20/s, eight at a time can.
    assert one["images_per_s"] < 20
    assert single["images_per_s"] < 20
    assert eight["images_per_s"] > 1.5 * one["images_per_s"]
    assert eight["images_per_batch"] > 1.5
    assert eight["refused_429"] == 0
    assert flood["refused_429"] > 0
    assert flood["answered"] > 0
    for row in result["rows"]:
        assert row["other"] == 0
        assert row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
    assert result["gain"] > 1.5
    assert sum("server," in line for line in lines) == 3


def test_percentiles() -> None:
    row = Load(latencies=[i / 1000 for i in range(1, 101)], statuses={200: 100, 429: 3, 500: 1}, seconds=2.0).row("x")
    assert (row["p50_ms"], row["p95_ms"], row["p99_ms"]) == (50.0, 95.0, 99.0)
    assert row["images_per_s"] == 50.0
    assert (row["refused_429"], row["other"]) == (3, 1)
    assert Load().row("nothing")["p50_ms"] is None


def _broken() -> None:
    raise RamatchError("no such model 'x'")


def test_errors_of_the_server_reach_the_caller() -> None:
    with pytest.raises(RamatchError, match="no such model"):
        bench_serve(_broken, echo=lambda line: None)
    with pytest.raises(RamatchError, match="greater than 0"):
        bench_serve(FakeRecognizer, concurrency=(0,))
