"""The bench measures what it says, keeps going when a line fails, and judges targets rightly."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks import compare, measure, speed
from benchmarks.lines_profile import kind_of
from benchmarks.models import CLIP_TEXT, label_names, random_labels, random_ram, word_tokenizer
from ramatch.errors import RamatchError

TINY = {
    "size": "tiny",
    "batches": (2, 4),
    "train_batches": (2, 4),
    "labels": 11,
    "many_labels": 40,
    "train_labels": 9,
    "new_labels": 7,
    "budget": 0.002,
}
CPU = torch.device("cpu")


def test_every_line_of_the_gpu_runs_at_small_size() -> None:
    lines = [name for name in speed.ON_GPU if name not in ("ceilings", "solver")]
    rows = speed.bench_speed("cpu", lines, **TINY)
    failed = [(r["what"], r["note"], r["more"].get("trace")) for r in rows if "failed" in r["what"]]
    assert not failed
    found = {r["what"]: r for r in rows}
    test = found["test, 11 labels, paper preset, batch 4"]
    clip = found["plain CLIP encoding, transformers, batch 4"]
    assert test["value"] > 0
    assert test["baseline"] == clip["value"]
    assert test["ratio"] == pytest.approx(test["value"] / clip["value"])
    for preset in ("paper", "reference"):
        assert found[f"test, 11 labels, {preset} preset, batch 2"]["unit"] == "img/s"
        assert found[f"our own unfused path, {preset} preset, batch 2"]["value"] > 0
    gap = found["difference from the plain path in float32, paper preset, tower in float32"]
    assert 0 <= gap["value"] < 1e-4
    assert gap["ok"] is True
    assert found["train, 9 labels, EMA, batch 4"]["value"] > 0
    assert found["retagging kept trunks, batch 4"]["baseline_what"] == "tagging afresh"
    assert json.loads(json.dumps(rows)) == rows


def test_a_failing_line_is_reported_and_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench):
        yield measure.row("one thing", 3.0, "img/s")
        raise ValueError("no such kernel")

    def slow(bench):
        time.sleep(5)
        yield measure.row("never", 1.0, "s")

    monkeypatch.setitem(speed.LINES, "broken", broken)
    monkeypatch.setitem(speed.LINES, "slow", slow)
    monkeypatch.setitem(speed.LINES, "good", lambda bench: iter([measure.row("fine", 2.0, "s")]))
    begun = time.perf_counter()
    seen = []
    rows = speed.bench_speed("cpu", ["broken", "slow", "good"], cap=0.2, report=seen.append)
    assert time.perf_counter() - begun < 3
    assert [r["what"] for r in rows] == ["one thing", "broken: failed", "slow: failed", "fine"]
    assert "no such kernel" in rows[1]["note"]
    assert "longer than 0.2 s" in rows[2]["note"]
    assert rows[1]["ok"] is False
    assert len(seen) == len(rows) + 3  # and how long each line took
    with pytest.raises(RamatchError, match="unknown line"):
        speed.bench_speed("cpu", ["typo"])


@pytest.mark.parametrize(
    ("options", "ok", "ratio"),
    [
        ({"value": 9.0, "unit": "img/s", "baseline": 10.0, "ratio_at_least": 0.8}, True, 0.9),
        ({"value": 7.0, "unit": "img/s", "baseline": 10.0, "ratio_at_least": 0.8}, False, 0.7),
        ({"value": 9.0, "unit": "img/s", "baseline": 10.0, "ratio_at_least": 0.8, "at_least": 10}, False, 0.9),
        ({"value": 2.0, "unit": "ms", "baseline": 30.0, "ratio_at_least": 10}, True, 15.0),
        ({"value": 2.0, "unit": "GB", "at_most": 2.5}, True, None),
        ({"value": 3.0, "unit": "GB", "at_most": 2.5}, False, None),
        ({"value": None, "unit": "ms", "at_most": 2.5}, False, None),
        ({"value": 5.0, "unit": "img/s", "ratio_at_least": 0.8}, False, None),  # no baseline was measured: not shown
        ({"value": 5.0, "unit": "img/s"}, None, None),
    ],
)
def test_targets(options, ok, ratio) -> None:
    entry = measure.row("x", options.pop("value"), options.pop("unit"), **options)
    assert entry.ok is ok
    assert entry.ratio == pytest.approx(ratio) if ratio is not None else entry.ratio is None
    assert ("MISSED" in speed.format_row(entry)) == (ok is False)


def test_seconds_per_call() -> None:
    found = measure.seconds_per_call(lambda: time.sleep(0.004), CPU, budget=0.05, repeats=3, warmup=1)
    assert 0.004 <= found < 0.02


def test_command_writes_json(tmp_path, capsys) -> None:
    path = tmp_path / "speed.json"
    assert speed.main(["--device", "cpu", "--lines", "ceilings", "--json", str(path), "--budget", "0.01"]) == 0
    saved = json.loads(path.read_text())
    assert saved["machine"]["torch"] == torch.__version__
    assert [r["unit"] for r in saved["rows"]][:2] == ["GB/s", "TFLOP/s"]
    assert "ceiling: copy" in capsys.readouterr().out


def test_before_and_after_take_turns(tmp_path) -> None:
    """Medians of both sides, bars on their ratio, and the new side's own targets."""
    (tmp_path / "src" / "ramatch").mkdir(parents=True)
    rates = {tmp_path: iter([100.0, 300.0, 200.0]), compare.ROOT: iter([150.0, 180.0, 900.0])}
    name, asked = "test, 1,006 labels, paper preset, batch 32", []

    def run(side, arguments):
        asked.append((side, list(arguments)))
        rows = [measure.row(name, next(rates[side]), "img/s"), measure.row("retagging", 9.0, "img/s", at_least=10)]
        return [entry.to_dict() for entry in [*rows, measure.row("a line took", 3.0, "s")]]

    rows = list(compare.compare(tmp_path, ["test"], turns=3, arguments=["--cap", "9"], run=run))
    assert [side == tmp_path for side, _ in asked] == [True, False, False, True, True, False]
    assert all(arguments == ["--lines", "test", "--cap", "9"] for _, arguments in asked)
    found = {entry.what: entry for entry in rows}
    assert (found[name].value, found[name].baseline, found[name].ratio) == (180.0, 200.0, 0.9)
    assert found[name].ok is False  # the bar is 0.95
    assert found["retagging"].ok is None
    assert found["by itself: retagging"].ok is False
    assert len(rows) == 3
    with pytest.raises(RamatchError, match="no checkout of ramatch"):
        list(compare.compare(tmp_path / "none", run=run))


def test_labels_and_tokens_are_realistic() -> None:
    names = label_names(200)
    assert len(set(names)) == 200
    assert label_names(200, 1) != names
    ids, lengths = word_tokenizer(CLIP_TEXT)([f"A photo of a {n}." for n in names])
    assert set(lengths.tolist()) == {8, 9, 10}  # start, four words, label, full stop, end
    assert ids.max() == CLIP_TEXT.vocab - 1
    assert (ids == 1).sum() == 0  # no unknown word


def test_random_model_is_alive() -> None:
    ram = random_ram("tiny", "ramatch", CPU)
    assert all(t.back.weight.abs().max() > 0 for t in ram.region_set.tss)
    labels = random_labels(30, 64, CPU)
    close = (labels.unit @ labels.unit.T - torch.eye(30)).abs().max()
    assert close < 0.7


def test_kernel_kinds() -> None:
    names = {
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_bias_TNT": "matrix products",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>": "attention",
        "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc": "convolutions",
        "_sinkhorn_kernel": "transport",
        "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>": "element by element",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>": "LayerNorm",
        "void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 10>": "softmax",
        "mystery": "other",
    }
    assert {name: kind_of(name) for name in names} == names
