"""CSV, TSV, JSONL and JSON tables: one column names the image, others its labels, in the usual spellings."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ramatch.data.annotations import Reading, Request, Row
from ramatch.data.images import is_image_name
from ramatch.errors import RamatchError
from ramatch.files import expect, parse_json, read_text, shown

DESCRIPTION = "table"

IMAGE_COLUMNS = (
    "file_name filename filepath file_path image_path img_path path image img file image_name img_name imagename "
    "image_file photo image_id imageid name key id"
).split()
LABEL_COLUMNS = (
    "labels label tags tag classes class categories category keywords keyword attributes attribute label_names "
    "labelname class_name annotations targets target"
).split()
SPLIT_COLUMNS = ("split", "subset", "set", "partition", "fold")
SEPARATORS = (";", "|", ",")
YES, NO = {"1", "1.0", "true", "yes", "y"}, {"0", "0.0", "false", "no", "n", "", "-1", "-1.0"}
SUFFIXES = (".csv", ".tsv", ".tab", ".jsonl", ".ndjson")


def detect(request: Request) -> bool:
    if request.suffix in SUFFIXES:
        return True
    content = request.json
    if isinstance(content, list):
        return bool(content) and isinstance(content[0], dict)
    if isinstance(content, dict):  # {"a.jpg": ["cat", "dog"], ...}
        return bool(content) and all(is_image_name(str(k)) for k in list(content)[:20])
    return False


def read(request: Request) -> Reading:
    columns, rows, start = load_table(request)
    image = find_column(columns, IMAGE_COLUMNS)
    if image is None:
        columns_are = f"columns are {_listing(columns)}; call one of them 'image' or 'path'"
        raise RamatchError(f"{request.path}: no column names the image; {columns_are}")
    split = find_column(columns, SPLIT_COLUMNS)
    rows, notes = _pick_split(request, split, rows)
    label = find_column([c for c in columns if c != image], LABEL_COLUMNS)
    reading = Reading(roots=[request.path.parent], notes=notes)
    if label is not None:
        cells = _label_cells(request, image, label, rows, reading)
    else:
        others = [c for c in columns if c and c not in (image, split)]
        cells = _one_hot_cells(request, image, others, rows, reading)
    for number, (row, labels) in enumerate(zip(rows, cells, strict=True), start=start):
        if isinstance(row.get(image), (dict, list)):
            name = f"line {number}: {image!r} is {shown(row[image])}"
            raise RamatchError(f"{request.path}: {name}; expected the name of an image")
        reading.rows.append(Row(_text(row.get(image)), labels, where=f"line {number}"))
    return reading


def splits(request: Request) -> list[str]:
    """Values of the split column, if there is one."""
    columns, rows, _ = load_table(request)
    column = find_column(columns, SPLIT_COLUMNS)
    return sorted({_text(row.get(column)) for row in rows} - {""}) if column else []


def find_column(columns: Sequence[str], spellings: Sequence[str]) -> str | None:
    """The column called by the first of `spellings` that occurs, whatever its case and punctuation."""
    plain = {c.strip().casefold().replace(" ", "_").replace("-", "_"): c for c in reversed(columns)}
    return next((plain[s] for s in spellings if s in plain), None)


def load_table(request: Request) -> tuple[list[str], list[dict[str, Any]], int]:
    """(column names, rows, number of the first row's line)."""
    path = request.path
    if request.suffix in (".jsonl", ".ndjson"):
        lines = read_text(path).rstrip("\r\n").split("\n")
        entries = [parse_json(x, f"{path}: line {n}") if x.strip() else {} for n, x in enumerate(lines, start=1)]
    elif request.suffix == ".json":
        entries = request.json
        if isinstance(entries, dict):
            entries = [{"image": key, "labels": value} for key, value in entries.items()]
    else:
        return _csv_rows(path)
    for number, entry in enumerate(expect(entries, list, f"{path}: the content"), start=1):
        expect(entry, dict, f"{path}: entry {number}")
    return list(dict.fromkeys(k for e in entries for k in e)), entries, 1


def read_csv(path: Path) -> list[list[str]]:
    """Rows of cells, blank lines too; comma, semicolon or tab between them."""
    text = read_text(path)
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = "\t" if path.suffix.lower() in (".tsv", ".tab") else max(",;\t", key=first.count)
    try:
        table = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True))
    except csv.Error as error:
        raise RamatchError(f"{path}: not a readable table ({error})") from error
    if not any(table):
        raise RamatchError(f"{path}: the file is empty")
    return table


def _csv_rows(path: Path) -> tuple[list[str], list[dict[str, Any]], int]:
    table = read_csv(path)
    start = next(number for number, row in enumerate(table, start=1) if row)
    header = [cell.strip() for cell in table[start - 1]]
    if is_image_name(header[0]):  # no header: path first, labels after it
        labels: list[Any] = [[cell for cell in row[1:] if cell.strip()] for row in table]
        if all(len(cells) <= 1 for cells in labels):  # one may itself hold several (`a.jpg,cat;dog`): split as text
            labels = ["".join(cells) for cells in labels]
        rows = [{"image": row[0], "labels": cells} if row else {} for row, cells in zip(table, labels, strict=True)]
        return ["image", "labels"], rows, 1
    double = [name for name, times in Counter(header).items() if times > 1 and name]
    if double:
        raise RamatchError(f"{path}: the column {double[0]!r} occurs twice")
    return header, [dict(zip(header, r, strict=False)) for r in table[start:]], start + 1


def _pick_split(request: Request, column: str | None, rows: list[dict[str, Any]]) -> tuple[list[dict], list[str]]:
    if request.split is None or column is None:
        return rows, []
    wanted = request.split.casefold()
    chosen = [r for r in rows if _text(r.get(column)).casefold() == wanted]
    if chosen:
        return chosen, [f"rows with {column} = {request.split}"]
    if wanted in request.path.stem.casefold():
        return rows, []  # the file itself is the split
    known = ", ".join(sorted({_text(r.get(column)) for r in rows})[:10])
    raise RamatchError(f"{request.path}: no rows with {column} = {request.split!r}; there are: {known}")


def _label_cells(request: Request, image: str, label: str, rows: list[dict], reading: Reading) -> list[list[Any]]:
    separator = choose_separator([r.get(label) for r in rows], request.classes)
    found = [parse_labels(r.get(label), separator, request.classes) for r in rows]
    keys = [key for key in (_text(r.get(image)) for r in rows) if key]
    reading.one_label_per_row = len(set(keys)) < len(keys) and all(len(labels) <= 1 for labels in found)
    how = "one label per row" if reading.one_label_per_row else "one row per image"
    if separator:
        how += f", labels separated by {'spaces' if separator == ' ' else repr(separator)}"
    reading.notes.append(f"image from column {image!r}, labels from column {label!r} ({how})")
    return found


def _one_hot_cells(
    request: Request, image: str, others: list[str], rows: list[dict], reading: Reading
) -> list[list[str]]:
    hot = [c for c in others if _is_binary([r.get(c) for r in rows])]
    if not hot:
        expected = "expected a column 'labels', or one column of 0 and 1 per label"
        columns_are = f"besides {image!r} the columns are {_listing(others)}"
        raise RamatchError(f"{request.path}: no labels found; {columns_are}; {expected}")
    reading.classes = [c.strip() for c in hot]
    reading.notes.append(f"image from column {image!r}, one column of 0 and 1 per label ({len(hot)})")
    ignored = [c for c in others if c not in hot]
    if ignored:
        reading.notes.append(f"columns not used: {_listing(ignored)}")
    return [[c.strip() for c in hot if _text(r.get(c)).casefold() in YES] for r in rows]


def _is_binary(values: Sequence[Any]) -> bool:
    plain = {_text(v).casefold() for v in values}
    return bool(plain & (YES | NO - {""})) and plain <= YES | NO


def choose_separator(cells: Sequence[Any], classes: Sequence[str] | None = None) -> str | None:
    """One separator for a whole column, so that 'salt, pepper; oil' is not cut at the comma."""
    known = set(classes or ())
    texts = [c for c in cells if isinstance(c, str) and c.strip() not in known and not c.strip().startswith("[")]
    for separator in SEPARATORS:
        if any(separator in text for text in texts):
            return separator
    if known and any(len(t.split()) > 1 and set(t.split()) <= known for t in texts):
        return " "
    return None


def parse_labels(cell: Any, separator: str | None, classes: Sequence[str] | None = None) -> list[Any]:
    """Labels of one cell: a list, a JSON or Python list in text, `{label: yes/no}`, or separated text."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return []
    if isinstance(cell, dict):
        return [k for k, v in cell.items() if _text(v).casefold() in YES]
    if isinstance(cell, (list, tuple)):
        return [_name_of(x) for x in cell]
    if not isinstance(cell, str):
        return [cell]
    text = cell.strip()
    if classes and text in classes:
        return [text]
    if text.startswith("[") and text.endswith("]"):
        for parse in (json.loads, ast.literal_eval):
            try:
                return list(parse(text))
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    if not text:
        return []
    pieces = text.split() if separator == " " else text.split(separator) if separator else [text]
    return [piece.strip() for piece in pieces]


def _name_of(item: Any) -> Any:
    """A label that is an object ({"name": "cat", "box": ...}) by its name."""
    column = find_column(list(item), ("name", *LABEL_COLUMNS)) if isinstance(item, dict) else None
    return item[column] if column else item


def _text(value: Any) -> str:
    return "" if value is None else shown(value) if isinstance(value, (dict, list)) else str(value).strip()


def _listing(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
