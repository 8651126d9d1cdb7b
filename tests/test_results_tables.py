"""Published figures: rows of results/*.csv say where they come from, and the documentation's tables are rendered from
them."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.render_tables import PAGES, over_seeds

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "results").glob("*.csv"))
SCRIPT = ROOT / "scripts" / "render_tables.py"


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream, strict=True))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_row_says_where_it_comes_from(file: Path) -> None:
    wrong = []
    for line, row in enumerate(rows(file), start=2):
        assert None not in row, f"{file.name}:{line}: more cells than the head has"
        assert None not in row.values(), f"{file.name}:{line}: fewer cells than the head has"
        if not row["row"] or not row["table"] or not (row["command"] or row["note"]):
            wrong.append((line, "wants a table, a name, and a command or a note on why there is none"))
        if not re.fullmatch(r"2026-\d\d-\d\d", row["date"]) and not re.search(r"reported|the paper", row["note"]):
            wrong.append((line, "wants a date"))
    assert not wrong


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_row_is_written_twice(file: Path) -> None:
    names = [(row["table"], row["row"], row.get("beside_what")) for row in rows(file)]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_tables_are_those_of_the_files() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_table_is_noticed_and_rendered_again(tmp_path: Path) -> None:
    for name in (*PAGES, *(file.relative_to(ROOT).as_posix() for file in FILES), "scripts/render_tables.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    page, script = tmp_path / "README.md", str(tmp_path / "scripts/render_tables.py")
    page.write_text(page.read_text(encoding="utf-8").replace("79.1", "97.1"), encoding="utf-8")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "README.md: stale tables: run make tables\n")
    assert subprocess.run([sys.executable, script], capture_output=True).returncode == 0
    assert page.read_bytes() == (ROOT / "README.md").read_bytes()


def test_rows_of_seeds_become_means() -> None:
    same = {"table": "t", "variant": "a", "data": "d", "backbone": "b", "settings": "{}", "zsl_map": ""}
    rows = [{**same, "row": f"a, seed {seed}", "seed": seed, "zsl_f1": f1} for seed, f1 in (("0", "50"), ("1", "53"))]
    first, other = over_seeds([*rows, {**rows[0], "settings": "{1}"}])
    assert (first["row"], first["seeds"], first["zsl_f1"], first["zsl_f1_sd"]) == ("a", "2", "51.5", "2.1")
    assert (first["zsl_map"], first["zsl_map_sd"]) == ("", "")
    assert (other["seeds"], other["zsl_f1"], other["zsl_f1_sd"]) == ("1", "50.0", "")


def figures(text: str) -> set[str]:
    """Figures of a text: numbers with a decimal place or a thousands separator; a separator is taken away."""
    found = re.findall(r"(?<![\w.,])\d+(?:,\d{3})+(?![\w,]*\d)|(?<![\w.])\d+\.\d+(?![\w.]*\d)", text)
    return {figure.replace(",", "") for figure in found}


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_figures_in_sentences_are_in_the_files_too(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    sentences = "\n".join(line for line in text.split("\n") if not line.startswith("|"))
    versions_and_settings = r"≥ [\d.]+|`[^`\n]*` [\d.]+|Apache-[\d.]+|CC-BY [\d.]+"
    sentences = re.sub(versions_and_settings, "", sentences)
    cells = [cell.replace(",", "") for file in FILES for row in rows(file) for cell in row.values()]
    known = {number for cell in cells for number in re.findall(r"\d+(?:\.\d+)?", cell)}
    assert sorted(figures(sentences) - known) == []
