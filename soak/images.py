"""Mutated pictures and awkward folders, through `ramatch tag` and through the server."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from soak import trees
from soak.pictures import bombs, mutated
from soak.process import MIB, Done
from soak.process import run as run_process
from soak.report import Soak
from soak.servers import Server
from soak.worlds import LABELS, tiny_model

MOST = 2560 * MIB  # two decoders at 100 million pixels of 4 bytes, decoded and as RGB, and the program itself
SERVER_MOST = 2048 * MIB  # the same at the server's 50 million
NUMBER = re.compile(r"(n\d{6})")
CONTROLS = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
ANSWERED = "every picture is answered, or named as failed and counted"
ANSWERS = "200, 400, 413, 415 or 422"
REFUSED = {400, 413, 415, 422}


def run(soak: Soak) -> None:
    model = tiny_model(soak.folder("model"))
    _command_line(soak, model)
    _bombs(soak, model)
    shapes: dict[str, Callable[[Path], int]] = {
        "links and pipes": trees.links,
        "folders in circles": trees.loops,
        "odd names": trees.names,
        "1,000 deep": trees.deep,
    }
    if soak.short:
        del shapes["folders in circles"]
    for name, plant in shapes.items():
        _tree(soak, model, name, plant)
    _server(soak, model)


def _tag(model: Path, folder: Path, limit: float, form: str = "jsonl") -> Done:
    command = ["-m", "ramatch", "tag", str(folder), "--labels", LABELS, "--model", str(model), "--format", form]
    return run_process(command, limit=limit)


def _account(done: Done, expected: int) -> list[str]:
    """What is wrong with the account that a run of `ramatch tag` gave of so many pictures."""
    answered = [
        NUMBER.search(str(json.loads(line)["image"])) for line in done.out.splitlines() if line.startswith(b"{")
    ]
    shown = {match[1] for match in answered if match}
    failed = {m[1] for m in re.finditer(r"could not read [^\n]*?(n\d{6})", done.err.decode("utf-8", "replace"))}
    wanted = {f"n{i:06d}" for i in range(expected)}
    misses = []
    if missing := sorted(wanted - shown - failed):
        misses.append(f"{len(missing)} of {expected} neither answered nor named: {', '.join(missing[:6])}")
    if twice := shown & failed:
        misses.append(f"both answered and failed: {sorted(twice)[:3]}")
    total = re.search(rb"(\d+) of (\d+) images could not be read", done.err)
    if failed and (total is None or int(total[1]) != len(failed)):
        misses.append(f"{len(failed)} were named as failed, the count says {total[0].decode() if total else 'nothing'}")
    return misses


def _command_line(soak: Soak, model: Path) -> None:
    start, count, folder = time.monotonic(), soak.size(10_000, 300), soak.folder("mutated")
    for name, content in mutated(count, soak.seed):
        (folder / name).write_bytes(content)
    done = _tag(model, folder, limit=300)
    soak.check("mutated, tag", "no crash, traceback or hang", done.faults(), cases=count, since=start)
    soak.check("account, tag", ANSWERED, _account(done, count), cases=count, since=start)


def _bombs(soak: Soak, model: Path) -> None:
    """Each alone, so that the peak is its own."""
    for name, make in list(bombs().items())[: 1 if soak.short else None]:
        start, folder = time.monotonic(), soak.folder(name)
        for i in range(2):
            (folder / f"n{i:06d}.png").write_bytes(make())
        done = _tag(model, folder, limit=60)
        misses = done.faults(most=MOST) + _account(done, 2)
        soak.check(name, f"answered or failed, below {MOST // MIB} MiB", misses, cases=2, since=start)


def _tree(soak: Soak, model: Path, name: str, plant: Callable[[Path], int]) -> None:
    folder = soak.folder(name.replace(" ", "-"))
    count = plant(folder)
    for form in ("jsonl",) if soak.short else ("jsonl", "table"):
        start = time.monotonic()
        done = _tag(model, folder, limit=60, form=form)
        misses = done.faults()
        if form == "jsonl":
            misses += _account(done, count)
        if found := CONTROLS.search(done.err if form == "jsonl" else done.out + done.err):
            misses.append(f"a name's control character {found[0]!r} reaches the terminal")
        required = "every picture answered or named; no traceback, hang or control character"
        soak.check(f"{name}, {form}", required, misses, cases=count, since=start)
    trees.make_removable(folder)


def _server(soak: Soak, model: Path) -> None:
    start, count = time.monotonic(), soak.size(10_000, 200)
    with Server(model, soak.folder("log") / "server.log") as server:
        work = (content for _, content in mutated(count, soak.seed + 1))
        misses = _post(server, work) + server.faults()
        soak.check("mutated, server", f"{ANSWERS}, no traceback", misses, cases=count, since=start)
        soak.check("ready afterwards", "/readyz 200 within 5 s", server.ready_within(5), cases=1, since=start)
    # just below this server's 50 million pixels; the last, of scans, has a check of its own
    for name, make in [] if soak.short else list(bombs(7_000).items())[:-1]:
        start = time.monotonic()
        with Server(model, soak.folder("log") / f"{name}.log") as server:
            misses = _post(server, [make()] * 2) + server.faults() + [server.ready_within(5)]
            if server.peak > SERVER_MOST:
                misses.append(f"peak memory {server.peak / MIB:.0f} MiB")
            soak.check(f"{name}, server", f"{ANSWERS}, below {SERVER_MOST // MIB} MiB", misses, cases=2, since=start)


def _post(server: Server, pictures: Iterable[bytes]) -> list[str]:
    """Send all, four at a time; the answers that no picture should get."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda content: server.tag(content, labels=LABELS, timeout=30), pictures))
    statuses = Counter(status for status, _ in answers)
    wrong = {str(s): n for s, n in statuses.items() if s != 200 and s not in REFUSED}
    return [f"answers {wrong}"] if wrong else []
