"""The benchmark measures what it says, at equal error."""

from __future__ import annotations

import json

import pytest

from benchmarks import ot as bench


def test_rows_on_the_cpu():
    pytest.importorskip("ot", reason="POT is not installed")
    rows = bench.bench_ot("cpu", [(2, 20, 7)], many_labels=None, repeats=2)
    solver, scores = rows
    assert solver["bench"] == "solve_batch"
    assert solver["error"] < 1e-4
    assert 0 < solver["pot_error"] < 1e-4
    assert 0 < solver["pot_exp_error"] < 1e-4
    assert solver["pot_ratio"] == pytest.approx(solver["pot_ms"] / solver["ms"])
    assert scores["bench"] == "match_scores"
    assert scores["difference"] < 1e-3
    json.dumps(rows)
    assert len(bench.format_rows(rows).splitlines()) == 2


def test_without_pot_the_rest_is_measured(monkeypatch):
    monkeypatch.setattr(bench, "_pot", lambda: None)
    row = bench.bench_solver(bench.torch.device("cpu"), (2, 20, 7), repeats=1)
    assert row["ms"] > 0
    assert "ramatch[bench]" in row["note"]


def test_command_writes_rows_and_refuses_wrong_sizes(tmp_path, capsys):
    pytest.importorskip("ot", reason="POT is not installed")
    bench.main(["--device", "cpu", "--size", "2,12,5", "--repeats", "1", "--json", str(tmp_path / "b.json")])
    rows = json.loads((tmp_path / "b.json").read_text())
    assert [(r["bench"], r["B"], r["M"], r["N"]) for r in rows] == [
        ("solve_batch", 2, 12, 5),
        ("match_scores", 2, 12, 5),
    ]
    assert rows[0]["pot_ms"] > 0
    for wrong in ("2,12", "2,12,0"):
        with pytest.raises(SystemExit):
            bench.main(["--size", wrong])
        assert "B,M,N" in capsys.readouterr().err
