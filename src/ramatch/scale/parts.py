"""Output in parts, each written whole or not at all under a name that its content decides: a run that was cut short
goes on with the parts that are missing, and work that is done twice is there once."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import RamatchError, require
from ..files import expect, parse_json, shown, write_atomic
from ..prediction import Prediction, Unreadable
from .inputs import Listing, Unit
from .stores import Folder

MANIFEST = "_ramatch.json"  # readers of a folder of parquet files pass over names that begin so
FORMAT, ANEW = 1, "--overwrite to begin anew"
_NAME = re.compile(r"part-([0-9a-f]{20})-(\d{5})\.parquet")
_ABOUT = b"ramatch"  # in a part's metadata
CHECKERS = 16  # threads that look at parts


def part_name(unit: str, number: int) -> str:
    return f"part-{unit}-{number:05d}.parquet"


def is_complete(parts: dict[int, dict[str, Any]]) -> bool:
    """Whether these are all parts of a unit."""
    return bool(parts) and parts.keys() == set(range(len(parts))) and parts[len(parts) - 1]["last"]


def schema() -> Any:
    """Of a row: what `Prediction.to_dict` or `Unreadable.to_dict` has, without maps."""
    a: Any = require("pyarrow", extra="scale")
    numbers = [(name, a.float64()) for name in ("probability", "relative", "score")]
    label = a.struct(
        [
            ("label", a.string()),
            *numbers,
            ("calibrated", a.bool_()),
            ("familiarity", a.float64()),
            ("parents", a.list_(a.string())),
        ]
    )
    sizes = [("width", a.int32()), ("height", a.int32())]
    return a.schema(
        [("image", a.string()), ("labels", a.list_(label)), ("calibrated", a.bool_()), *sizes, ("error", a.string())]
    )


def to_row(found: Prediction | Unreadable, **chosen: Any) -> dict[str, Any]:
    """`chosen`: top and threshold of `Prediction.to_dict`. A name that is not UTF-8 gets a stand-in."""
    row = found.to_dict() if isinstance(found, Unreadable) else found.to_dict(**chosen)
    return {k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for k, v in row.items()}


def from_row(row: dict[str, Any]) -> dict[str, Any]:
    """What `to_row` was given, of a row that was read back."""
    if row["error"] is not None:
        return {"image": row["image"], "error": row["error"]}
    optional = ("probability", "relative", "parents")
    labels = [{k: v for k, v in entry.items() if v is not None or k not in optional} for entry in row["labels"]]
    return {**{k: v for k, v in row.items() if k != "error"}, "labels": labels}


class Parts:
    """A folder of parts and a manifest of what they are of."""

    def __init__(self, address: str) -> None:
        self.folder = Folder(address)

    def begin(self, listing: Listing, settings: dict[str, Any], *, resume: bool) -> dict[str, dict[int, dict]]:
        """What is there already (see `whole`). Without `resume` the folder must be new; with it, of the same run."""
        now = {"format": FORMAT, "settings": settings, "input": listing.fingerprint(), "units": len(listing.units)}
        names = set(self.folder.names())
        if MANIFEST in names:
            if not resume:
                raise RamatchError(f"{self.folder.address} holds a run already; --resume to go on, or {ANEW}")
            with self.folder.open(MANIFEST) as file:
                before = parse_json(file.read().decode("utf-8", "replace"), f"{self.folder.address}/{MANIFEST}")
            self._compare(expect(before, dict, MANIFEST), json.loads(json.dumps(now)))
            self.folder.clean()
        elif names:
            raise RamatchError(f"{self.folder.address} holds other files; choose a new folder")
        self.folder.write(MANIFEST, json.dumps(now, indent=1, ensure_ascii=True).encode())
        return self.whole(listing.units)

    def discard(self) -> None:
        """Remove an earlier run; of a folder that is none, nothing."""
        names = self.folder.names()
        if names and MANIFEST not in names:
            raise RamatchError(f"{self.folder.address} holds other files; choose a new folder")
        self.folder.remove()

    def _compare(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        old, new = expect(before.get("settings"), dict, f"{MANIFEST}: settings"), now["settings"]
        names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
        told = [f"{name} was {shown(old.get(name))}, is now {shown(new.get(name))}" for name in names]
        if before.get("format") != FORMAT:
            told = [f"it has format {before.get('format')}, this version writes {FORMAT}"]
        if told:
            changed = f"{self.folder.address} was made with other settings: {'; '.join(told)}"
            raise RamatchError(f"{changed}. Use the same ones, or {ANEW}")
        if before.get("input") != now["input"]:
            counts = f"{before.get('units')} units of work, now {now['units']}"
            other = f"{self.folder.address} was made of other images ({counts})"
            raise RamatchError(f"{other}: choose another folder for these, or {ANEW}")

    def whole(self, units: Iterable[Unit]) -> dict[str, dict[int, dict[str, Any]]]:
        """Of each unit, the parts that are there and not cut short, by their numbers, with what they say of
        themselves."""
        wanted = {unit.key for unit in units}
        found: dict[str, dict[int, dict[str, Any]]] = {}
        with ThreadPoolExecutor(CHECKERS) as pool:
            for about in pool.map(self._about, self.folder.names()):
                if about and about["unit"] in wanted:
                    found.setdefault(about["unit"], {})[about["number"]] = about
        return found

    def total(self, units: list[Unit]) -> tuple[int, int, int]:
        """Rows, those of them with an error, and parts. A unit that is not complete is an error."""
        found = self._complete(units)
        parts = [about for unit in units for about in found[unit.key].values()]
        return sum(about["rows"] for about in parts), sum(about["failed"] for about in parts), len(parts)

    def _complete(self, units: list[Unit]) -> dict[str, dict[int, dict[str, Any]]]:
        found = self.whole(units)
        lacking = [unit for unit in units if not is_complete(found.get(unit.key, {}))]
        if lacking:
            told = f"{len(lacking)} of {len(units)} units of work are not done, such as {lacking[0].names[0]}"
            raise RamatchError(f"{self.folder.address}: {told}; go on with --resume")
        return found

    def _about(self, name: str) -> dict[str, Any] | None:
        """What a part says of itself; None of any other file, and of one that was cut short."""
        parquet: Any = require("pyarrow.parquet", extra="scale")
        if not (match := _NAME.fullmatch(name)):
            return None
        try:
            with self.folder.open(name) as stream:
                file = parquet.ParquetFile(stream)
                about = json.loads(file.schema_arrow.metadata[_ABOUT])
                rows = file.metadata.num_rows
        except (OSError, ValueError, TypeError, KeyError):
            return None
        same = (about["unit"], about["number"]) == (match[1], int(match[2]))
        return about if same and rows == about["rows"] else None

    def write(self, unit: str, number: int, last: bool, rows: list[dict[str, Any]]) -> None:
        arrow: Any = require("pyarrow", extra="scale")
        parquet: Any = require("pyarrow.parquet", extra="scale")
        failed = sum("error" in row for row in rows)
        about = {"unit": unit, "number": number, "last": last, "rows": len(rows), "failed": failed}
        table = arrow.Table.from_pylist(rows, schema().with_metadata({_ABOUT: json.dumps(about).encode()}))
        buffer = io.BytesIO()
        parquet.write_table(table, buffer, compression="zstd")
        self.folder.write(part_name(unit, number), buffer.getvalue())

    def tables(self, units: list[Unit]) -> Iterator[Any]:
        """All rows in the order of the input, a table for each part."""
        parquet: Any = require("pyarrow.parquet", extra="scale")
        found = self._complete(units)
        for unit in units:
            for number in range(len(found[unit.key])):
                with self.folder.open(part_name(unit.key, number)) as stream:
                    yield parquet.ParquetFile(stream).read().replace_schema_metadata()

    def merge(self, units: list[Unit], out: str | Path) -> None:
        """One parquet or JSONL file of all parts, which is written as they are read."""
        parquet: Any = require("pyarrow.parquet", extra="scale")

        def whole(temporary: Path) -> None:
            if str(out).lower().endswith(".parquet"):
                with parquet.ParquetWriter(temporary, schema(), compression="zstd") as writer:
                    for table in self.tables(units):
                        writer.write_table(table)
                return
            with temporary.open("w", encoding="utf-8") as file:
                for table in self.tables(units):
                    file.writelines(json.dumps(from_row(row), ensure_ascii=False) + "\n" for row in table.to_pylist())

        write_atomic(out, whole)
