"""Rows of an output by image, and how to compare them with those of `ramatch tag` without an engine."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ramatch.scale.parts import from_row


def rows_of(out: Path) -> list[dict]:
    """Of a .jsonl or .parquet file or a folder of parts, by name."""
    if out.suffix == ".jsonl":
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    else:
        files = sorted(out.glob("part-*.parquet")) if out.is_dir() else [out]
        rows = [from_row(row) for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    return sorted(rows, key=lambda row: row["image"])


def same(found: list[dict], local: list[dict]) -> None:
    """The same images, each once, with the same answers; the last digit depends on which images went through the model
    together."""
    answered = [row for row in found if "error" not in row]
    assert len({row["image"] for row in found}) == len(found)
    assert [row["image"] for row in answered] == [row["image"] for row in local]
    for a, b in zip(answered, local, strict=True):
        assert a.keys() == b.keys()
        assert [e.keys() for e in a["labels"]] == [e.keys() for e in b["labels"]]
        assert [e["label"] for e in a["labels"]] == [e["label"] for e in b["labels"]]
        assert [e["score"] for e in a["labels"]] == pytest.approx([e["score"] for e in b["labels"]], abs=2e-4)


def put_tar(path: Path, files: list[Path], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:
        for file in files:
            archive.add(file, file.name)
        content = b"a note"
        member = tarfile.TarInfo("note.txt")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


def put_parquet(path: Path, files: list[Path], *, group: int = 4, nested: bool = True) -> None:
    cells = [{"bytes": file.read_bytes(), "path": file.name} if nested else file.read_bytes() for file in files]
    table = pa.table({"id": [file.name for file in files], "image": cells})
    pq.write_table(table, path, row_group_size=group)
