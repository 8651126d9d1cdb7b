"""Hugging Face datasets: a `save_to_disk` folder of Arrow files, or parquet files. Needs the extra `data`.

The images are a column of {"bytes", "path"}. Those of Arrow files are read in place as slices of the file;
those of parquet files by row group, a few of which are kept decoded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ramatch.data.annotations import Reading, Row
from ramatch.data.formats import tables
from ramatch.data.formats.request import Request, load_json
from ramatch.data.images import natural_key
from ramatch.data.sources import ImageSource, ParquetImage, SliceImage
from ramatch.errors import RamatchError, require

DESCRIPTION = "Hugging Face dataset (Arrow or parquet)"

Cell = tuple[str, ImageSource | None]  # (path or "", where its bytes are)


def detect(request: Request) -> bool:
    if request.path.is_dir():
        return is_saved(request.path) or bool(_parquet_files(request.path))
    return request.suffix in (".parquet", ".arrow")


def splits(folder: Path) -> list[str]:
    if (folder / "dataset_dict.json").is_file():
        return list(load_json(folder / "dataset_dict.json").get("splits", []))
    return sorted({_split_of(p, folder) for p in _parquet_files(folder)} - {""})


def read(request: Request) -> Reading:
    files, names = _files(request), None
    reading = Reading(rows=[], roots=[request.path if request.path.is_dir() else request.path.parent])
    image = label = None
    for file in files:
        table, cells = (_read_arrow if file.suffix == ".arrow" else _read_parquet)(file)
        image, label = _columns(file, table.schema)
        names = names or _class_names(table.schema, label)
        values = _label_values(table, label)
        separator = tables.choose_separator(values, request.classes or names)
        for number, (cell, value) in enumerate(zip(cells(image), values, strict=True)):
            labels = tables.parse_labels(value, separator, request.classes)
            if names:
                labels = [names[x] if isinstance(x, int) and 0 <= x < len(names) else x for x in labels]
            path, source = cell
            key = path or f"{file.name}:{number}"
            where = f"{file.name}, row {number}"
            reading.rows.append(Row(key if path or source else "", labels, image=source, where=where))
    _make_keys_unique(reading.rows)
    reading.classes = names
    reading.notes.append(f"image from column {image!r}, labels from column {label!r}, {len(files)} file(s)")
    return reading


# ---------------------------------------------------------------------------------------------------- files


def is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def _parquet_files(folder: Path) -> list[Path]:
    return sorted((p for p in folder.rglob("*.parquet") if not p.name.startswith(".")), key=natural_key)


def _split_of(path: Path, folder: Path) -> str:
    """`data/train-00000-of-00002.parquet` or `train/part-0.parquet` is of the split train."""
    first = path.relative_to(folder).parts[0]
    if first != path.name and first != "data":
        return first
    return re.split(r"[-.]\d|\.", path.name)[0]


def _files(request: Request) -> list[Path]:
    folder = request.path
    if not folder.is_dir():
        return list(request.files or [folder])
    if is_saved(folder):
        if (folder / "dataset_dict.json").is_file():
            folder = folder / _one_of(splits(folder), request)
        state = load_json(folder / "state.json")
        return [folder / entry["filename"] for entry in state["_data_files"]]
    files = _parquet_files(folder)
    found = splits(folder)
    if request.split or len(found) > 1:
        split = _one_of(found, request)
        files = [p for p in files if _split_of(p, folder) == split]
    return files


def _one_of(found: Sequence[str], request: Request) -> str:
    if request.split in found:
        return str(request.split)
    if request.split is None and len(found) == 1:
        return found[0]
    wanted = f"no split {request.split!r}" if request.split else "several splits, name one"
    raise RamatchError(f"{request.path}: {wanted}; splits here: {', '.join(found) or 'none'}")


# -------------------------------------------------------------------------------------------------- columns


def _columns(file: Path, schema: Any) -> tuple[str, str]:
    arrow = require("pyarrow", extra="data")
    pictures = [f.name for f in schema if arrow.types.is_struct(f.type) and _has_bytes(f.type)]
    pictures += [f.name for f in schema if arrow.types.is_binary(f.type) or arrow.types.is_large_binary(f.type)]
    image = pictures[0] if pictures else tables.find_column(schema.names, tables.IMAGE_COLUMNS)
    rest = [name for name in schema.names if name != image]
    label = tables.find_column(rest, (*tables.LABEL_COLUMNS, "objects"))
    if image is None or label is None:
        what = "images ({bytes, path} or a path)" if image is None else "labels"
        raise RamatchError(f"{file}: no column of {what}; columns are {', '.join(schema.names)}")
    return image, label


def _has_bytes(kind: Any) -> bool:
    return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))


def _label_values(table: Any, label: str) -> list[Any]:
    values = table.column(label).to_pylist()
    if values and isinstance(values[0], dict) and tables.find_column(list(values[0]), tables.LABEL_COLUMNS):
        inner = tables.find_column(list(values[0]), tables.LABEL_COLUMNS)
        values = [list(dict.fromkeys(v[inner])) if v else [] for v in values]  # detection sets: objects.category
    return values


def _class_names(schema: Any, label: str) -> list[str] | None:
    """Names of a ClassLabel column, from the features that `datasets` keeps in the schema's metadata."""
    raw = (schema.metadata or {}).get(b"huggingface")
    if not raw:
        return None
    stack = [json.loads(raw).get("info", {}).get("features", {}).get(label)]
    while stack:  # the names may be inside a list feature, or inside objects.category
        feature = stack.pop()
        if isinstance(feature, dict):
            if isinstance(feature.get("names"), list):
                return [str(n) for n in feature["names"]]
            stack += [v for v in feature.values() if isinstance(v, (dict, list))]
        elif isinstance(feature, list):
            stack += feature
    return None


def _make_keys_unique(rows: Sequence[Row]) -> None:
    """The stored paths are often bare names that repeat; different pictures must not be merged for that."""
    seen: dict[str, int] = {}
    for row in rows:
        times = seen[row.key] = seen.get(row.key, 0) + 1
        if times > 1 and row.image is not None:
            row.key = f"{row.key}#{times}"


# -------------------------------------------------------------------------------------------- parquet, Arrow


def _read_parquet(file: Path) -> tuple[Any, Any]:
    parquet = require("pyarrow.parquet", extra="data")
    handle = parquet.ParquetFile(file)
    _, label = _columns(file, handle.schema_arrow)
    table = handle.read(columns=[label]).replace_schema_metadata(handle.schema_arrow.metadata)
    schema = handle.schema_arrow

    def cells(column: str) -> Iterator[Cell]:
        field = schema.field(column).type
        nested = hasattr(field, "num_fields") and field.num_fields > 0
        for group in range(handle.num_row_groups):
            if not nested and str(field) in ("string", "large_string"):
                for path in handle.read_row_group(group, columns=[column]).column(column).to_pylist():
                    yield path or "", None
                continue
            paths: Sequence[str | None] = [None] * handle.metadata.row_group(group).num_rows
            if nested and any(field.field(i).name == "path" for i in range(field.num_fields)):
                part = handle.read_row_group(group, columns=[f"{column}.path"]).column(column)
                paths = [(cell or {}).get("path") for cell in part.to_pylist()]
            there = _has_content(handle, group, column)
            for row, path in enumerate(paths):
                yield path or "", ParquetImage(os.path.abspath(file), group, row, column) if there[row] else None

    return _WithSchema(table, schema), cells


def _has_content(handle: Any, group: int, column: str) -> list[bool]:
    """Which rows hold bytes; from the statistics if these settle it, else by reading the column."""
    facts = handle.metadata.row_group(group)
    for i in range(facts.num_columns):
        chunk = facts.column(i)
        if chunk.path_in_schema in (column, f"{column}.bytes"):
            statistics = chunk.statistics
            if statistics is not None and statistics.has_null_count and statistics.null_count == 0:
                return [True] * facts.num_rows
    cells = handle.read_row_group(group, columns=[column]).column(column).to_pylist()
    return [bool(cell.get("bytes") if isinstance(cell, dict) else cell) for cell in cells]


class _WithSchema:
    """A table of the label column that still knows the schema of the whole file."""

    def __init__(self, table: Any, schema: Any) -> None:
        self.column, self.schema = table.column, schema


def _read_arrow(file: Path) -> tuple[Any, Any]:
    arrow = require("pyarrow", extra="data")
    mapped = arrow.memory_map(os.fspath(file))
    try:
        table = arrow.ipc.open_stream(mapped).read_all()
    except arrow.ArrowInvalid:
        mapped.seek(0)
        table = arrow.ipc.open_file(mapped).read_all()
    mapped.seek(0)
    base = mapped.read_buffer(mapped.size()).address

    def cells(column: str) -> Iterator[Cell]:
        for chunk in table.column(column).chunks:
            if arrow.types.is_string(chunk.type):
                yield from ((path or "", None) for path in chunk.to_pylist())
                continue
            struct = arrow.types.is_struct(chunk.type)
            content = chunk.field("bytes") if struct else chunk
            has_path = struct and any(chunk.type.field(i).name == "path" for i in range(chunk.type.num_fields))
            paths = chunk.field("path").to_pylist() if has_path else [None] * len(chunk)
            for path, source in zip(paths, _slices(file, content, base, mapped.size()), strict=True):
                yield path or "", source

    return table, cells


def _slices(file: Path, content: Any, base: int, size: int) -> list[ImageSource | None]:
    """Where each value of a binary array lies in the memory-mapped file."""
    if content.null_count == len(content):
        return [None] * len(content)
    _, offsets_buffer, data = content.buffers()
    wide = np.int64 if str(content.type).startswith("large") else np.int32
    offsets = np.frombuffer(offsets_buffer, dtype=wide)[content.offset : content.offset + len(content) + 1]
    start = data.address - base
    if not 0 <= start <= size - data.size:
        raise RamatchError(f"{file}: compressed Arrow files cannot be read in place; save the dataset as parquet")
    valid = content.is_valid().to_pylist()
    return [
        SliceImage(os.path.abspath(file), start + int(a), int(b - a), f"row {row}") if ok else None
        for row, (a, b, ok) in enumerate(zip(offsets[:-1], offsets[1:], valid, strict=True))
    ]
