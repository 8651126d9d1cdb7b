"""The model of cost: by hand, and as docs/scale.md tells it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from ramatch.scale.cost import FEW_LABELS, GENERAL_WORDS, Cost, Machine, Rates, estimate

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    (10**7, 1, Machine(), "few", FEW_LABELS),
    (10**7, 1, Machine(), "general", GENERAL_WORDS),
    (10**7, 1, Machine(actors=4), "general", GENERAL_WORDS),
    (10**7, 1, Machine(gpus=0, cores=64), "few", FEW_LABELS),
    (10**9, 1, Machine(), "few", FEW_LABELS),
    (10**9, 16, Machine(), "few", FEW_LABELS),
    (10**9, 16, Machine(cores=32), "few", FEW_LABELS),
    (10**9, 16, Machine(actors=4), "general", GENERAL_WORDS),
    (10**9, 64, Machine(gpus=0, cores=64), "few", FEW_LABELS),
]


def cells(images: int, machines: int, machine: Machine, labels: str, found: Cost) -> list[str]:
    """A row of the table."""
    gpus = f"{machine.gpus} GPU × {machine.actors} actors, " if machine.actors > 1 else f"{machine.gpus} GPU, "
    what = f"{machines} × ({gpus if machine.gpus else ''}{machine.cores} cores)"
    hours = [
        f"{number:,.1f}" if number < 100 else f"{number:,.0f}"
        for number in (found.hours, found.gpu_hours, found.core_hours)
    ]
    sizes = [
        f"{found.read / 1e6:,.0f} MB/s",
        f"{found.read_bytes / 1e12:,.2f} TB",
        f"{found.written_bytes / 1e9:,.1f} GB",
    ]
    return [f"{images:,}", what, labels, f"{found.rate:,.0f}", found.bound, *hours, *sizes]


def test_the_table_is_the_model() -> None:
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8").split("<!-- cost:", 1)[1].split("\n\n", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n")[3:]]
    assert rows == [cells(n, m, machine, name, estimate(n, m, machine, rates)) for n, m, machine, name, rates in CASES]


def test_by_hand() -> None:
    rates = Rates(gpu=1000, decode=100, cpu=10, host=0.001, share=0.5, image_bytes=100, row_bytes=10)
    decoding = estimate(3_600_000, 2, Machine(gpus=1, cores=2), rates)
    assert (decoding.bound, decoding.rate, decoding.hours) == ("decoding", 400, 2.5)
    assert (decoding.gpu_hours, decoding.core_hours) == (5, 10)
    assert (decoding.read, decoding.read_bytes, decoding.written_bytes) == (20_000, 360e6, 36e6)
    assert decoding.parts == 14063
    answers = estimate(1000, 1, Machine(gpus=1, cores=100), rates)
    assert (answers.bound, answers.rate) == ("answers", pytest.approx(250))
    model = estimate(1000, 1, Machine(gpus=1, cores=100, actors=4), rates)
    assert (model.bound, model.rate) == ("model", pytest.approx(500))
    cores = estimate(1000, 1, Machine(gpus=0, cores=11), rates)
    assert (cores.bound, cores.rate, cores.gpu_hours) == ("cores", pytest.approx(50), 0)


def test_its_rates_are_published_figures() -> None:
    with (ROOT / "results" / "speed.csv").open(encoding="utf-8", newline="") as stream:
        found = {(row["table"], row["row"]): row for row in csv.DictReader(stream)}

    def value(table: str, row: str, column: str = "value") -> float:
        return float(found[table, row][column])

    assert value("one-pass", "test, 1,006 labels, batch 512") == FEW_LABELS.gpu
    assert value("one-pass", "test, 20,000 labels, batch 512") == GENERAL_WORDS.gpu
    for column, rates in (("value", FEW_LABELS), ("beside", GENERAL_WORDS)):
        assert value("scale", "decoding, images/s of one core", column) == rates.decode
        assert value("scale", "tagging on a CPU, images/s of one core", column) == rates.cpu
        assert value("scale", "rows of an answer, µs of one core", column) == pytest.approx(1e6 * rates.host)
        assert value("scale", "a row on disk, bytes", column) == rates.row_bytes


def test_the_part_that_bounds_is_named_in_the_page() -> None:
    """18 cores are what one H200 wants."""
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    [cores] = re.findall(r"cores: (\d+) would do", text)
    assert estimate(1, 1, Machine(cores=int(cores))).bound != "decoding"
    assert estimate(1, 1, Machine(cores=int(cores) - 1)).bound == "decoding"
