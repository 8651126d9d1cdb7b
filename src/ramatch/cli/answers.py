"""How answers look: table, json, csv, jsonl."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import printable
from ._shared import cell


class Format(NamedTuple):
    """How answers are written: before all, each one, between two, after all; whether notes come last."""

    head: str
    one: Callable[[dict[str, Any]], str]
    between: str = ""
    tail: str = ""
    notes: bool = False


def _table(answer: dict[str, Any]) -> str:
    entries = [{**entry, "label": printable(entry["label"])} for entry in answer["labels"]]
    calibrated, width = answer["calibrated"], max((len(entry["label"]) for entry in entries), default=0)
    lines = [printable(answer["image"])]
    for entry in entries:
        value, mark = (
            entry["probability" if calibrated else "relative"],
            " " if entry["calibrated"] == calibrated else "?",
        )
        lines.append(f"  {entry['label']:<{width}}  {value:5.2f}{mark} {'█' * round(20 * value)}".rstrip())
    if not entries:
        lines.append("  (no label reaches the threshold)")
    if "tags" in answer:
        lines.append(f"  → {change_line(answer['tags'])}")
    return "\n".join(lines) + "\n"


def change_line(change: dict[str, Any]) -> str:
    """What became of the tags at an image."""
    signs = (("added", "+ "), ("removed", "- "), ("by_hand", "made by hand: "))
    said = "; ".join(sign + ", ".join(change[name]) for name, sign in signs if change[name])
    return printable(f"{change['file']}: {said or ('the same tags, noted anew' if change['written'] else 'as it was')}")


def _json(answer: dict[str, Any]) -> str:
    return "\n" + json.dumps(answer, ensure_ascii=False, indent=None if "grid" in answer else 1)  # maps are long


def _jsonl(answer: dict[str, Any]) -> str:
    return json.dumps(answer, ensure_ascii=False) + "\n"


def _csv(answer: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    image, rest = cell(answer["image"]), COLUMNS[1:]
    writer.writerows([image, cell(e["label"]), *(e.get(name) for name in rest)] for e in answer["labels"])
    return text.getvalue()


COLUMNS = ("label", "probability", "score", "relative", "calibrated", "familiarity")  # without calibration: relative
FORMATS = {
    "table": Format("", _table, notes=True),
    "json": Format("[", _json, ",", "\n]\n"),
    "csv": Format(",".join(["image", *COLUMNS]) + "\n", _csv),
    "jsonl": Format("", _jsonl),
}
