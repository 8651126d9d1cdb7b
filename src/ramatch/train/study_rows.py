"""Rows of a study's CSV: one for each variant, data set, backbone and seed, written as soon as it is known."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ..errors import RamatchError
from ..files import read_text, write_text
from .study_spec import COSTS, METRICS

Row = dict[str, str]
COLUMNS = ("table", "row", "variant", "method", "data", "backbone", "seed", *METRICS, *COSTS)
COLUMNS += ("settings", "command", "date", "device", "note")


class RowFile:
    """A CSV that grows by whole rows; None: rows are kept in memory alone."""

    def __init__(self, path: str | Path | None) -> None:
        self.path, self._rows = None if path is None else Path(path), list[Row]()

    def rows(self) -> list[Row]:
        """What is there now."""
        if self.path is None or not self.path.exists():
            return list(self._rows)
        reader = csv.DictReader(io.StringIO(read_text(self.path), newline=""), strict=True)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise RamatchError(f"{self.path}: not a file of studies (other columns); give --out another name")
        return list(reader)

    def append(self, row: Row) -> None:
        """The file with one more row; a crash leaves the file before or the one after."""
        rows = [*self.rows(), row]  # read anew: another run may have added to it meanwhile
        self._rows = rows
        if self.path is not None:
            out = io.StringIO(newline="")
            writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_text(self.path, out.getvalue())


def row_name(variant: str, data: str, backbone: str, seed: int, settings: dict[str, Any]) -> str:
    """Unique among the rows of a study: with other settings it is another row."""
    digest = hashlib.blake2b(settings_text(settings).encode(), digest_size=3).hexdigest()
    return f"{variant}: {data}, {backbone}, seed {seed}, settings {digest}"


def settings_text(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def make_row(facts: dict[str, Any], values: dict[str, float], device: torch.device) -> Row:
    """Facts (table, row, variant, …) and figures as text; what is not known stays empty."""
    places = {"seconds": 1, "memory_gb": 3, "step_memory_gb": 3, "test_memory_gb": 3}
    shown = {name: f"{value:.{places.get(name, 2)}f}" for name, value in values.items()}
    found = {**facts, **shown, "date": date.today().isoformat(), "device": machine(device)}
    return {name: str(found.get(name, "")) for name in COLUMNS}


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    return f"{os.cpu_count()} CPU cores"
