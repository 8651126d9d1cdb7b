"""Labels as people type them: one set of rules for the command line, Python, the server, the page and data sets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import RamatchError
from .files import read_text

SEPARATORS = ",;|\t\n\r"
QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»"}
HEADINGS = ("label", "labels", "class", "classes", "name", "tag", "tags")  # a table's first cell that is no label


@dataclass(frozen=True)
class LabelList:
    """Tidy labels, each once, in the order given; `notes` says what was merged."""

    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def tidy(label: Any) -> str:
    """A label with its white space in order."""
    if not isinstance(label, str):
        raise RamatchError(f"a label must be text, got {label!r}")
    return " ".join(label.replace("\ufeff", "").split())


def merge_labels(labels: Iterable[Any]) -> LabelList:
    """Tidy labels; empty ones are dropped, those that differ in case or spaces only are merged into the first."""
    spellings: dict[str, list[str]] = {}
    for label in filter(None, map(tidy, labels)):
        spellings.setdefault(label.casefold(), []).append(label)
    notes = []
    for kept, *more in spellings.values():
        if more:
            others = ", ".join(dict.fromkeys(repr(s) for s in more if s != kept))
            what = f"{others} and '{kept}' are one label" if others else f"'{kept}' is given twice"
            notes.append(f"{what}; it counts once, as '{kept}'")
    return LabelList(tuple(kept for kept, *_ in spellings.values()), tuple(notes))


def split_labels(text: str) -> list[str]:
    """Labels in a line or page of text: commas, semicolons, bars, tabs or new lines separate, quotes keep together."""
    labels, current, closing = [], "", ""
    for character in text:
        if closing:
            current, closing = (current, "") if character == closing else (current + character, closing)
        elif character in SEPARATORS:
            labels.append(current)
            current = ""
        elif character in QUOTES and not current.strip():  # an apostrophe inside a word is none
            closing = QUOTES[character]
        else:
            current += character
    if closing:
        raise RamatchError(f"a quote is not closed in the labels '{text[:60]}'")
    return [*labels, current]


def read_labels(path: str | Path) -> LabelList:
    """Labels of a file: one per line, `#` begins a comment; a single line, CSV or TSV is split as typed labels are."""
    return parse_page(read_text(path), table={".csv": ",", ".tsv": "\t"}.get(Path(path).suffix.lower()))


def parse_page(text: str, table: str | None = None) -> LabelList:
    """Labels of a file's text; `table`: the separator, where it is a table."""
    if table is not None:
        cells = [cell for row in csv.reader(io.StringIO(text), delimiter=table) for cell in row]
        return merge_labels(cells[1:] if cells and tidy(cells[0]).lower() in HEADINGS else cells)
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return merge_labels(split_labels(lines[0]) if len(lines) == 1 else lines)


def parse_labels(labels: str | Path | Iterable[Any]) -> LabelList:
    """Labels however they are given: a list of names, a text with several, or the name of a file that exists."""
    if isinstance(labels, Path):
        return read_labels(labels)
    if not isinstance(labels, str):
        return merge_labels(labels)
    is_name = labels.endswith((".txt", ".csv", ".tsv")) and not any(c in labels for c in ",;|\n\r")
    if is_name and Path(labels).is_file():
        return read_labels(labels)
    return merge_labels(split_labels(labels))
