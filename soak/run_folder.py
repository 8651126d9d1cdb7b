"""What a run's folder must look like whatever happened to the run."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file


def broken(folder: Path) -> list[str]:
    """Files that cannot be read, and temporary files left behind."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        try:
            if path.name.endswith(".tmp"):
                found.append(f"temporary file {name}")
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".yaml":
                yaml.safe_load(path.read_text(encoding="utf-8"))
            elif path.suffix == ".safetensors":
                load_file(path)
            elif path.suffix == ".pt":
                torch.load(path, map_location="cpu", weights_only=True)
            elif path.name == "log.jsonl":
                [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except Exception as error:
            found.append(f"{name} is broken ({type(error).__name__})")
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Whether two runs ended with the same bits: the model's files and the newest checkpoint's weights."""
    found = []
    mine, theirs = ({p.name: p for p in (f / "model").rglob("*") if p.is_file()} for f in (one, other))
    for name in sorted(mine.keys() | theirs.keys()):
        if name.endswith(".tmp"):
            continue
        if name not in mine or name not in theirs:
            found.append(f"model/{name} is missing")
        elif mine[name].read_bytes() != theirs[name].read_bytes():
            found.append(f"model/{name} differs")
    last = [sorted((f / "checkpoints").glob("step-*.pt"))[-1:] for f in (one, other)]
    if not all(last) or last[0][0].name != last[1][0].name:
        return [*found, "the newest checkpoints are of different steps"]
    states = [torch.load(path[0], map_location="cpu", weights_only=True) for path in last]
    for part in ("adapters", "ema"):
        if not all(torch.equal(states[0][part][name], t) for name, t in states[1][part].items()):
            found.append(f"{part} of the newest checkpoint differ")
    return found
