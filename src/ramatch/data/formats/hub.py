"""Hugging Face datasets: a `save_to_disk` folder of Arrow files, or parquet files. Needs the extra `data`.

The images are a column of {"bytes", "path"}. Those of Arrow files are read in place as slices of the file;
those of parquet files by row group, a few of which are kept decoded.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ramatch.data.annotations import Reading, Request, Row
from ramatch.data.formats import tables
from ramatch.data.images import natural_key
from ramatch.data.sources import FileImage, ImageSource, ParquetImage, parquet_column
from ramatch.errors import RamatchError, require
from ramatch.files import expect, parse_json, read_json, shown

DESCRIPTION = "Hugging Face dataset (Arrow or parquet)"

Cell = tuple[str, ImageSource | None]  # (path or "", where its bytes are)


def detect(request: Request) -> bool:
    if request.path.is_dir():
        return is_saved(request.path) or bool(_parquet_files(request.path))
    return request.suffix in (".parquet", ".arrow")


def splits(folder: Path) -> list[str]:
    listing = folder / "dataset_dict.json"
    if not listing.is_file():
        return sorted({_split_of(p, folder) for p in _parquet_files(folder)} - {""})
    return _beside(listing, expect(read_json(listing), dict, listing).get("splits", []))


def read(request: Request) -> Reading:
    files = _files(request)
    reading = Reading(roots=[request.path if request.path.is_dir() else request.path.parent])
    seen: Counter[str] = Counter()
    image = label = None
    for file in files:
        try:
            schema, column, cells = (_open_arrow if file.suffix == ".arrow" else _open_parquet)(file)
            image, label = _columns(file, schema)
            reading.classes = reading.classes or _class_names(schema, label)
            values = _label_values(column(label))
            found = list(zip(cells(image), values, strict=True))
        except RamatchError:
            raise
        except Exception as error:  # the parser raises many kinds on rubbish
            raise RamatchError(f"{file}: not a readable {file.suffix[1:]} file ({error})") from error
        names = reading.classes or []
        separator = tables.choose_separator(values, request.classes or names)
        for number, ((path, source), value) in enumerate(found):
            labels = tables.parse_labels(value, separator, request.classes)
            labels = [names[x] if isinstance(x, int) and 0 <= x < len(names) else x for x in labels]
            key = path or (f"{file.name}:{number}" if source else "")
            seen[key] += 1
            if seen[key] > 1 and source is not None:  # bare names often repeat; the pictures differ
                key = f"{key}#{seen[key]}"
            reading.rows.append(Row(key, labels, image=source, where=f"{file.name}, row {number}"))
    reading.notes.append(f"image from column {image!r}, labels from column {label!r}, {len(files)} file(s)")
    return reading


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
    if not is_saved(folder):
        files, found = _parquet_files(folder), splits(folder)
        if not request.split and len(found) <= 1:
            return files
        split = _one_of(found, request)
        return [p for p in files if _split_of(p, folder) == split]
    if (folder / "dataset_dict.json").is_file():
        folder = folder / _one_of(splits(folder), request)
    state = folder / "state.json"
    entries = expect(expect(read_json(state), dict, state).get("_data_files"), list, f"{state}: _data_files")
    names = [expect(entry, dict, f"{state}: a data file").get("filename") for entry in entries]
    return [folder / name for name in _beside(state, names)]


def _beside(listing: Path, names: Any) -> list[str]:
    """Names of files or folders in a listing, which must lie beside it."""
    for name in expect(names, list, f"{listing}: its names"):
        if Path(expect(name, str, f"{listing}: a name")).name != name:
            raise RamatchError(f"{listing}: {shown(name)} is not the name of a file or folder beside it")
    return list(names)


def _one_of(found: Sequence[str], request: Request) -> str:
    if request.split in found:
        return str(request.split)
    if request.split is None and len(found) == 1:
        return found[0]
    wanted = f"no split {request.split!r}" if request.split else "several splits, name one"
    raise RamatchError(f"{request.path}: {wanted}; splits here: {', '.join(found) or 'none'}")


def _columns(file: Path, schema: Any) -> tuple[str, str]:
    types = require("pyarrow", extra="data").types
    pictures = [f.name for f in schema if "bytes" in _fields(f.type)]
    pictures += [f.name for f in schema if types.is_binary(f.type) or types.is_large_binary(f.type)]
    image = pictures[0] if pictures else tables.find_column(schema.names, tables.IMAGE_COLUMNS)
    rest = [name for name in schema.names if name != image]
    label = tables.find_column(rest, (*tables.LABEL_COLUMNS, "objects"))
    if image is None or label is None:
        what = "images ({bytes, path} or a path)" if image is None else "labels"
        raise RamatchError(f"{file}: no column of {what}; columns are {', '.join(schema.names)}")
    return image, label


def _fields(kind: Any) -> set[str]:
    """Names of the fields of a struct type; none for another type."""
    struct = require("pyarrow", extra="data").types.is_struct(kind)
    return {kind.field(i).name for i in range(kind.num_fields)} if struct else set()


def _label_values(values: list[Any]) -> list[Any]:
    first = values[0] if values else None
    inner = tables.find_column(list(first), tables.LABEL_COLUMNS) if isinstance(first, dict) else None
    if inner is None:
        return values
    return [list(dict.fromkeys(v[inner])) if v else [] for v in values]  # detection sets: objects.category


def _class_names(schema: Any, label: str) -> list[str] | None:
    """Names of a ClassLabel column, from the features that `datasets` keeps in the schema's metadata."""
    raw = (schema.metadata or {}).get(b"huggingface")
    if not raw:
        return None
    stack = [parse_json(raw.decode(), "its metadata").get("info", {}).get("features", {}).get(label)]
    while stack:  # the names may be inside a list feature, or inside objects.category
        feature = stack.pop()
        if isinstance(feature, dict):
            if isinstance(feature.get("names"), list):
                return [str(n) for n in feature["names"]]
            stack += feature.values()
        elif isinstance(feature, list):
            stack += feature
    return None


# -------------------------------------------------------------------------------------------- parquet, Arrow
# Both give (schema, values of a column by its name, cells of an image column by its name).


def _parts(schema: Any, column: str) -> tuple[str | None, str | None]:
    """What the paths and the bytes of an image column are called, both or one of them."""
    kind = schema.field(column).type
    if str(kind) in ("string", "large_string"):
        return column, None
    if not (fields := _fields(kind)):
        return None, column
    return f"{column}.path" if "path" in fields else None, f"{column}.bytes" if "bytes" in fields else None


def _open_parquet(file: Path) -> tuple[Any, Any, Any]:
    handle = require("pyarrow.parquet", extra="data").ParquetFile(file)
    schema = handle.schema_arrow

    def cells(column: str) -> Iterator[Cell]:
        path, content = _parts(schema, column)
        for group in range(handle.num_row_groups):
            nothing = [None] * handle.metadata.row_group(group).num_rows
            paths = parquet_column(handle, group, path) if path else nothing
            there = _has_content(handle, group, content) if content else nothing
            for row, (name, full) in enumerate(zip(paths, there, strict=True)):
                source = ParquetImage(os.path.abspath(file), group, row, content) if content and full else None
                yield name or "", source

    return schema, lambda column: handle.read(columns=[column]).column(column).to_pylist(), cells


def _has_content(handle: Any, group: int, column: str) -> list[bool]:
    """Which rows hold bytes; from the statistics if these settle it, else by reading the column."""
    facts = handle.metadata.row_group(group)
    for chunk in map(facts.column, range(facts.num_columns)):
        statistics = chunk.statistics if chunk.path_in_schema == column else None
        if statistics is not None and statistics.has_null_count and statistics.null_count == 0:
            return [True] * facts.num_rows
    return list(map(bool, parquet_column(handle, group, column)))


def _open_arrow(file: Path) -> tuple[Any, Any, Any]:
    arrow = require("pyarrow", extra="data")
    mapped = arrow.memory_map(os.fspath(file))
    try:
        table = arrow.ipc.open_stream(mapped).read_all()
    except arrow.ArrowInvalid:
        mapped.seek(0)
        table = arrow.ipc.open_file(mapped).read_all()
    table.validate(full=True)  # offsets that point outside the file would crash the process
    mapped.seek(0)
    base = mapped.read_buffer(mapped.size()).address

    def cells(column: str) -> Iterator[Cell]:
        path, content = _parts(table.schema, column)
        flat, nothing = table.select([column]).flatten(), [None] * len(table)
        paths = flat[path].to_pylist() if path else nothing
        chunks = flat[content].chunks if content else []
        places = (place for chunk in chunks for place in _places(file, chunk, base, mapped.size()))
        for row, (name, place) in enumerate(zip(paths, places if content else nothing, strict=True)):
            yield name or "", FileImage(os.path.abspath(file), *place, f"row {row}") if place else None

    return table.schema, lambda column: table.column(column).to_pylist(), cells


def _places(file: Path, values: Any, base: int, size: int) -> list[tuple[int, int] | None]:
    """Where each value of a binary array begins in the memory-mapped file, and its length."""
    if values.null_count == len(values):
        return [None] * len(values)
    _, offsets_buffer, data = values.buffers()
    start = data.address - base
    if not 0 <= start <= size - data.size:
        raise RamatchError(f"{file}: compressed Arrow files cannot be read in place; save the dataset as parquet")
    wide = np.int64 if str(values.type).startswith("large") else np.int32
    offsets = np.frombuffer(offsets_buffer, wide)[values.offset : values.offset + len(values) + 1].tolist()
    between = zip(offsets, offsets[1:], values.is_valid().to_pylist(), strict=False)
    return [(start + a, b - a) if there else None for a, b, there in between]
