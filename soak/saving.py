"""Index, save, tag, adapt and align under SIGKILL: what is on the disk afterwards is the old, the new, or refused,
never half of one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

from soak.kills import killed
from soak.pictures import encode, noise
from soak.process import run as run_process
from soak.process import start as start_process
from soak.report import Soak
from soak.worlds import LABELS, tiny_captions, tiny_model

SAVE = """
import sys
from ramatch import Recognizer
recognizer = Recognizer.from_pretrained(sys.argv[1], device="cpu")
print("loaded", flush=True)
while True:
    recognizer.save_pretrained(sys.argv[2], with_backbone=True)
"""


def run(soak: Soak) -> None:
    model, rng = tiny_model(soak.folder("model")), random.Random(soak.seed)
    _index(soak, model, rng)
    _save(soak, model, rng)
    _tag(soak, model)
    _folders(soak)


def _photos(folder: Path, count: int) -> Path:
    for i in range(count):
        (folder / f"n{i:06d}.png").write_bytes(encode(noise(seed=i), "PNG"))
    return folder


def _index(soak: Soak, model: Path, rng: random.Random) -> None:
    start, count, kills = time.monotonic(), soak.size(300, 60), soak.size(20, 3)
    whole, killed = (_photos(soak.folder(name), count) for name in ("whole", "killed"))
    command = ["-m", "ramatch", "index", "--model", str(model), "--batch-size", "4", "--quiet"]
    begun = time.monotonic()
    misses = run_process([*command, str(whole)]).faults(codes=(0,))
    seconds = time.monotonic() - begun
    for _ in range(kills):
        process = start_process([*command, str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.5, 1.0) * seconds)  # the first half is imports
        process.kill()
        process.wait()
    misses += run_process([*command, str(killed)]).faults(codes=(0,))
    misses += run_process([*command, "--verify", str(killed)]).faults(codes=(0,))
    found = [_search(folder, model) for folder in (whole, killed)]
    if not found[0] or found[0] != found[1]:
        misses.append(f"another answer than that of an index that was never stopped: {len(found[0])}, {len(found[1])}")
    misses += [f"temporary file {path.name}" for path in killed.rglob("*.tmp")]
    required = "after SIGKILLs it goes on, answers as a whole one, leaves no temporary file"
    soak.check("index", required, misses, cases=kills, since=start)


def _search(folder: Path, model: Path) -> list[tuple[str, float]]:
    words = ["-m", "ramatch", "search", "cat", "--in", str(folder), "--model", str(model), "--top", "500"]
    done = run_process([*words, "--sort", "name", "--format", "json"])
    hits = json.loads(done.out or b"[]")
    return sorted((Path(hit["image"]).name, round(hit["probability"], 4)) for hit in hits)


def _save(soak: Soak, model: Path, rng: random.Random) -> None:
    """A model saved again and again over itself, as `train`, `adapt` and `import-authors` save theirs at the end."""
    start, kills, misses = time.monotonic(), soak.size(20, 3), []
    folder, photo = soak.folder("saved"), _photos(soak.folder("photo"), 1) / "n000000.png"
    tag = ["-m", "ramatch", "tag", str(photo), "--labels", LABELS, "--format", "jsonl", "--model"]
    right = run_process([*tag, str(model)]).out
    for i in range(kills):
        process = start_process(
            ["-c", SAVE, str(model), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        done = run_process([*tag, str(folder)])
        misses += [f"kill {i + 1}: {fault}" for fault in done.faults(codes=(0, 2))]
        if done.code == 0 and done.out != right:
            misses.append(f"kill {i + 1}: loads, and answers something else")
    soak.check("saving a model", "loads as it was saved, or is refused in words", misses, cases=kills, since=start)


def _tag(soak: Soak, model: Path) -> None:
    photos, kills = _photos(soak.folder("photos"), soak.size(200, 40)), soak.size(50, 4)
    for form in ("jsonl", "csv"):
        start, root = time.monotonic(), soak.folder(f"tag {form}")
        argv = ["tag", str(photos), "--labels", LABELS, "--model", str(model), "--batch-size", "2", "--quiet"]
        argv += ["--device", "cpu", "--out", "{out}", "--resume"]
        limits = {"seed": soak.seed, "limit": soak.size(150, 30)}
        runs, misses = killed(argv, root, kills, suffix=f".{form}", check="rows", **limits)
        rows = [sorted((root / each["run"]).read_bytes().splitlines()) for each in runs if each["code"] == 0]
        if not all(rows) or any(other != rows[0] for other in rows):
            misses.append(f"other rows than those of a run that was never stopped: {[len(part) for part in rows]}")
        required = "after SIGKILLs, --resume ends with the rows of a whole run; all whole rows are right at any time"
        soak.check(f"tag --resume, {form}", required, misses, cases=sum(r["killed"] for r in runs), since=start)


def _folders(soak: Soak) -> None:
    verbs = tiny_captions(soak.folder("captions"))
    for name, argv in verbs.items():
        start, root = time.monotonic(), soak.folder(name)
        limits = {"seed": soak.seed, "limit": soak.size(200, 40)}
        runs, misses = killed([*argv, "--out", "{out}"], root, soak.size(30, 4), check="folder", **limits)
        for each in runs:
            misses += [f"{each['run']}: {what}" for what in _other_weights(root / "whole", root / each["run"])]
        required = "after SIGKILLs its folder is not there, or whole; run again, it ends with the same weights"
        soak.check(name, required, misses, cases=sum(r["killed"] for r in runs), since=start)


def _other_weights(whole: Path, folder: Path) -> list[str]:
    names = [p.relative_to(whole) for p in whole.rglob("*.safetensors")]
    if not names:
        return ["no weights were written"]
    return [f"{n} differs" for n in names if (whole / n).read_bytes() != (folder / n).read_bytes()]
