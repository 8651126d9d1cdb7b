"""Render the tables of README, docs and the model card from results/*.csv: `make tables`, or with --check to test them.

A page says where a table goes, and this script writes what lies between the two comments:

    <!-- table: recipes -->
    <!-- end -->

It needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGES = (
    "README.md",
    "docs/results.md",
    "docs/comparison.md",
    "docs/performance.md",
    "docs/scale.md",
    "docs/training.md",
    "docs/segmentation.md",
    "src/ramatch/models/ramatch-mini/README.md",
)
MARKERS = re.compile(r"<!-- table: (?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- end -->", flags=re.DOTALL)


class Table(NamedTuple):
    """A file under results/, and what each column shows of a row: a heading and a template with the file's columns."""

    file: str
    columns: dict[str, str]
    wide: bool = False  # a row for each variant, with {data_backbone_x} of all data and backbones, the paper's too


ACCURACY = {
    "ZSL F1@3": "{zsl_f1}",
    "ZSL mAP": "{zsl_map}",
    "GZSL F1@3": "{gzsl_f1}",
    "GZSL mAP": "{gzsl_map}",
}
SPEED = {
    "": "{row}",
    "ramatch": "{value} {unit}",
    "beside it": "{beside}, {beside_what}",
    "ratio": "{ratio}×",
    "goal": "{goal}",
}
FIGURES = {f"{protocol}_{name}" for protocol in ("zsl", "gzsl") for name in ("p3", "r3", "f1", "f1_5", "map")}
FIGURES |= {"images_per_s", "memory_gb"} | {f"{w}_{n}" for w in ("step", "test") for n in ("images_per_s", "memory_gb")}
STUDY = {"": "{row}", "data": "{data}", "backbone": "{backbone}", **ACCURACY, "seeds": "{seeds}"}
COST = {"train step, images/s": "{step_images_per_s}", "train step, GB": "{step_memory_gb}"}
COST |= {"test, images/s": "{test_images_per_s}", "test, GB": "{test_memory_gb}"}
STUDIES = ("matching", "modules", "loss", "lambda2", "prompt-length", "start-layer", "lla", "presets", "ours")
RIVALS = {"": "{row}"}
for place, key in (("COCO", "coco_ov_ramatch_mini"), ("UCM", "ucm_ov_ramatch_mini"), ("PETA", "peta_ov_ramatch_mini")):
    RIVALS |= {f"{place} GZSL mAP": f"{{{key}_gzsl_map}}", "F1@3" + " " * len(RIVALS): f"{{{key}_gzsl_f1}}"}
    RIVALS |= {"ZSL mAP" + " " * len(RIVALS): f"{{{key}_zsl_map}}"}
RIVALS |= {"CLIP: COCO GZSL mAP": "{coco_ov_clip_b16_gzsl_map}", "F1@3": "{coco_ov_clip_b16_gzsl_f1}"}
RIVALS |= {"paper: COCO F1@3": "{COCO_paper_gzsl_f1}"}
KCOT = {"": "{row}"}
for place, key in (("small model", "coco_ov_ramatch_mini"), ("CLIP", "coco_ov_clip_b16")):
    KCOT |= {f"{place}: {head}": f"{{{key}_{x}}}" for head, x in (("ZSL mAP", "zsl_map"), ("GZSL F1@3", "gzsl_f1"))}
    KCOT |= {f"{place}: GZSL mAP": f"{{{key}_gzsl_map}}"}
TABLES = {
    **{name: Table("studies.csv", STUDY) for name in STUDIES},
    "main": Table("studies.csv", RIVALS, wide=True),
    "kcot": Table("studies.csv", KCOT, wide=True),
    **{name: Table("studies.csv", STUDY | COST) for name in ("prompting", "efficiency")},
    "recipes": Table("coco_ov.csv", {"": "{row}", **ACCURACY, "seeds": "{seeds}"}),
    "study": Table("coco_ov.csv", {"": "{row}", **ACCURACY}),
    "mini": Table("coco_ov.csv", {"": "{row}", **ACCURACY, "seeds": "{seeds}"}),
    "model-card": Table("coco_ov.csv", {"": "{row}", **ACCURACY}),
    "calibration": Table(
        "calibration.csv",
        {
            "labels": "{row}",
            "ECE before": "{ece_before}",
            "ECE after": "{ece_after}",
            "classwise ECE after": "{classwise_ece_after}",
            "F1 at 0.5 after": "{f1_at_half}",
            "F1 at 0.47, the threshold chosen on the fitting images": "{f1_at_threshold}",
        },
    ),
    "authors": Table(
        "authors_speed.csv",
        {
            "images/s": "{row}",
            "theirs": "{theirs}",
            "theirs under autocast": "{theirs_autocast}",
            "ours": "{ours}",
            "ratio": "{ratio}×",
            "to autocast": "{ratio_autocast}×",
            "memory": "{theirs_memory} / {ours_memory}",
        },
    ),
    "gpu": Table("speed.csv", {**SPEED, "memory": "{memory_gb} GB"}),
    "one-pass": Table(
        "speed.csv", {"": "{row}", "now": "{value} {unit}", "before": "{beside}", "ratio": "{ratio}×", "bar": "{goal}"}
    ),
    "cpu": Table("speed.csv", SPEED),
    "runtimes": Table("speed.csv", SPEED),
    "scale": Table("speed.csv", {"": "{row}", "80 labels": "{value}", "general vocabulary": "{beside}"}),
    "serve": Table(
        "serve.csv",
        {
            "": "{row}",
            "images/s": "{images_s}",
            "p50": "{p50}",
            "p95": "{p95}",
            "p99": "{p99}",
            "mean batch": "{mean_batch}",
            "refused": "{refused}",
        },
    ),
    "own-data": Table(
        "own_data.csv",
        {
            "": "{row}",
            "GZSL mAP": "{gzsl_map}",
            "seen": "{seen_map}",
            "unseen": "{unseen_map}",
            "GZSL F1@3": "{gzsl_f1}",
            "ECE": "{ece}",
            "prior": "{prior}",
        },
    ),
    "pointing": Table(
        "localization.csv",
        {"": "{row}", "pointing game": "{pointing}", "energy in the box": "{energy}", "IoU with the box": "{iou}"},
    ),
    "masks": Table(
        "localization.csv",
        {
            "": "{row}",
            "labels given": "{labels_given}",
            "20 labels": "{all_labels}",
            "20 labels and background": "{background}",
        },
    ),
    "operations": Table(
        "operations.csv",
        {
            "GFLOP per image": "{row}",
            "plain CLIP": "{clip}",
            "`paper`, 1,006 labels": "{paper_1006}",
            "`reference`, 1,006": "{reference_1006}",
            "`paper`, 20,000": "{paper_20000}",
        },
    ),
}


def read_rows(file: str) -> list[dict[str, str]]:
    """Rows of a file under results/; a column `x_sd` is the standard deviation of `x`."""
    with (RESULTS / file).open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, strict=True))
    return over_seeds(rows) if rows and "seed" in rows[0] else rows


def over_seeds(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Of a study's rows, one for each seed: means, with `x_sd` and `seeds`. A variant measured with several settings
    is several rows."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        key = ("table", "variant", "data", "backbone", "settings")
        groups.setdefault(tuple(row[name] for name in key), []).append(row)
    found = []
    for group in groups.values():
        mean = {**group[0], "row": group[0]["variant"], "seeds": str(len(group))}
        for name in FIGURES & group[0].keys():
            values = [float(row[name]) for row in group if row[name]]
            mean[name] = f"{statistics.mean(values):.1f}" if values else ""
            mean[f"{name}_sd"] = f"{statistics.stdev(values):.1f}" if len(values) > 1 else ""
        found.append(mean)
    return found


def side_by_side(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Of rows for each variant, data and backbone one row for each variant that was measured here."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        key = re.sub(r"\W", "_", f"{row['data']}_{row['backbone']}")
        here = found.setdefault(row["variant"], {"row": row["variant"]})
        here |= {f"{key}_{name}": value for name, value in row.items() if name.removesuffix("_sd") in FIGURES}
    measured = {row["variant"] for row in rows if row["backbone"] != "paper"}
    return [row for name, row in found.items() if name in measured]


def show(row: dict[str, str], template: str) -> str:
    """A cell: the template filled in, or a dash where the row has nothing for it."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        text, spread = row.get(name, ""), row.get(f"{name}_sd", "")
        text = f"{int(text):,}" if text.isdecimal() else text
        return f"{text} ± {spread}" if spread else text

    empty = all(not row.get(name) for name in re.findall(r"{(\w+)}", template))
    return "–" if empty else re.sub(r"{(\w+)}", value, template).replace("|", "\\|")


def render(name: str) -> str:
    """A table as markdown. A row may belong to several: its `table` lists their names, separated by blanks."""
    if name not in TABLES:
        raise SystemExit(f"unknown table {name!r}; known: {', '.join(TABLES)}")
    table = TABLES[name]
    rows = [row for row in read_rows(table.file) if name in row["table"].split()]
    if not rows:
        raise SystemExit(f"results/{table.file} has no row of table {name!r}")
    if table.wide:
        paper = [row for row in read_rows("paper.csv") if name in row["table"].split()]
        rows = side_by_side([*rows, *paper])
    lines = ["| " + " | ".join(head.strip() for head in table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(show(row, template) for template in table.columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def rendered(text: str, page: str) -> str:
    """A page with all its tables as they should be."""
    if text.count("<!-- table:") != len(MARKERS.findall(text)):
        raise SystemExit(f"{page}: a '<!-- table: NAME -->' without its '<!-- end -->'")
    return MARKERS.sub(lambda m: f"<!-- table: {m['name']} -->\n{render(m['name'])}<!-- end -->", text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Render the tables of the documentation from results/*.csv.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a table is stale")
    check = parser.parse_args().check
    stale = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        new = rendered(text, page)
        if new != text:
            stale.append(page)
            if not check:
                (ROOT / page).write_text(new, encoding="utf-8")
    for page in stale:
        print(f"{page}: {'stale tables: run make tables' if check else 'tables rendered'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
