"""The tutorial notebook runs from end to end, and what is stored in it is what comes out.

`python tests/test_tutorial.py` runs it and stores its outputs anew.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


def executed(folder: Path) -> Any:
    """The notebook with its outputs made now, run in `folder`."""
    nbformat: Any = pytest.importorskip("nbformat")
    nbclient: Any = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}})
    client.execute()  # raises where a cell does
    return notebook


def kinds(notebook: Any) -> list[list[tuple[str, ...]]]:
    """What each code cell gives: text, table, picture."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [[tuple(sorted(out.get("data", {"stream": 0}))) for out in cell.outputs] for cell in cells]


def texts(notebook: Any) -> list[str]:
    """The outputs as text, numbers left out: their last digits differ between machines."""
    found = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    plain = [out.get("data", {}).get("text/plain", out.get("text", "")) for out in found]
    return [re.sub(r"\d+(\.\d+)?", "N", text) for text in plain]


@pytest.mark.timeout(600)
def test_the_tutorial_runs_and_gives_what_is_stored_in_it(tmp_path: Path) -> None:
    nbformat: Any = pytest.importorskip("nbformat")
    stored, fresh = nbformat.read(NOTEBOOK, as_version=4), executed(tmp_path)
    assert kinds(fresh) == kinds(stored)
    assert all(kinds(stored)), "every cell shows something"
    assert [text.split()[:1] for text in texts(fresh)] == [text.split()[:1] for text in texts(stored)]


def test_the_tutorial_is_short_and_says_nothing_of_a_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 600_000
    assert not re.search(r"/(root|home|tmp|work|Users|usr)/|\"stderr\"|C:\\\\", text)
    for link in re.findall(r"\]\(([\w.]+)\)", text):
        assert (NOTEBOOK.parent / link).is_file(), link


if __name__ == "__main__":
    import nbformat

    with tempfile.TemporaryDirectory() as place:
        made = executed(Path(place))
    for number, cell in enumerate(made.cells):
        cell.metadata = {}  # when it ran is of no interest
        cell["id"] = f"cell-{number}"
    made.metadata = {"kernelspec": made.metadata.kernelspec, "language_info": {"name": "python"}}
    nbformat.write(made, NOTEBOOK)
    sys.exit(0)
