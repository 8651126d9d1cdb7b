"""Damaged and hostile annotation files, vocabularies, recipes, models and checkpoints."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from soak.annotation_cases import write_arrow
from soak.file_cases import PICTURE, World
from soak.process import Done
from soak.process import run as run_process
from soak.report import Soak
from soak.worlds import tiny_model, tiny_training


def run(soak: Soak) -> None:
    start, count = time.monotonic(), soak.size(2_000, 120)
    world = _world(soak)
    results: list[dict[str, Any]] = []
    deaths: list[str] = []
    while len(results) < count and len(deaths) < 20:
        done = _worker(soak, world, len(results), count - len(results))
        lines = [json.loads(line) for line in done.out.splitlines()]
        begun = [line for line in lines if "family" in line]
        ended = {line["case"]: line for line in lines if "fault" in line}
        results += [{**line, **ended.get(line["case"], {"fault": "", "ran": False, "opened": []})} for line in begun]
        if len(ended) < len(begun):
            last = done.err.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
            deaths.append(f"{begun[-1]['family']} ({begun[-1]['what']}): exit code {done.code} {last[0][:120]}")
        elif not begun:
            raise RuntimeError(done.err.decode("utf-8", "replace")[-500:])
    _judge(soak, results, deaths, start)


def _world(soak: Soak) -> World:
    secret, home = soak.folder("secret"), soak.folder("world")
    for name in ("canary.png", "canary.bin", "canary.txt"):
        (secret / name).write_bytes(PICTURE)
    write_arrow(secret / "canary.arrow", {"beach.png": ["canary"]})
    values = tiny_training(home, epochs=1, checkpoint__every=2)
    recipe = home / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    done = run_process(["-m", "ramatch", "train", "--recipe", str(recipe), "--out", str(home / "run")])
    found = sorted((home / "run" / "checkpoints").glob("step-*.pt"))
    if not found:
        raise RuntimeError(f"no checkpoint to damage: {done.err.decode('utf-8', 'replace')[-300:]}")
    shutil.copy(found[-1], home / "checkpoint.pt")
    return World(tiny_model(home / "model"), recipe, home / "checkpoint.pt", secret, soak.folder("cases") / "marker")


def _worker(soak: Soak, world: World, first: int, count: int) -> Done:
    paths = {name: str(path) for name, path in asdict(world).items()}
    values = {"world": paths, "seed": soak.seed, "first": first, "count": count}
    return run_process(["-m", "soak.file_worker", json.dumps(values)], limit=600)


def _judge(soak: Soak, results: list[dict[str, Any]], deaths: list[str], start: float) -> None:
    count = len(results)
    soak.check("process", "no case ends the process", deaths, cases=count, since=start)
    for family in dict.fromkeys(result["family"] for result in results):
        those = [result for result in results if result["family"] == family]
        faults: Counter[str] = Counter(result["fault"] for result in those if result["fault"])
        example = {result["fault"]: f"case {result['case']}, {result['what']}" for result in reversed(those)}
        misses = [f"{n}x {fault} ({example[fault]})" for fault, n in faults.most_common()]
        soak.check(family, "success, RamatchError or exit code 2", misses, cases=len(those), since=start)
    ran = [f"{r['family']}, case {r['case']}: {r['what']}" for r in results if r["ran"]]
    soak.check("no code", "no planted payload is run", ran, cases=count, since=start)
    away = [
        f"{r['family']}, case {r['case']}: {r['what']} opened {Path(r['opened'][0]).name}"
        for r in results
        if r["opened"]
    ]
    soak.check("inside the folder", "no planted path outside is opened", away, cases=count, since=start)
