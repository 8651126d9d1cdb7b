"""A short form of every part of the soak. Each requirement is a test of its own."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from soak import files, hostile_http, images, saving, server, solver, threads, training, workers
from soak.file_cases import Payload
from soak.pictures import mutated
from soak.report import Check, Soak
from soak.worlds import tiny_model

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def bad_company(soak: Soak) -> None:
    hostile_http.run(soak, tiny_model(soak.folder("model")))


def several(soak: Soak) -> None:
    workers.run(soak, tiny_model(soak.folder("model")))


PARTS: dict[str, Callable[[Soak], None]] = {
    "solver": solver.run,
    "threads": threads.run,
    "files": files.run,
    "images": images.run,
    "training": training.run,
    "saving": saving.run,
    "load": server.run_load,
    "bad company": bad_company,
    "workers": several,
}
CHECKS: dict[str, set[str]] = {  # part → its requirements
    "solver": {"awkward problems", "refusals", "gradients"},
    "threads": {"predict, cache 64", "predict, cache 0", "encode_vocabulary"},
    "files": {
        "process",
        "annotations",
        "vocabulary",
        "recipe",
        "model",
        "foreign model",
        "checkpoint",
        "no code",
        "inside the folder",
    },
    "images": {
        "mutated, tag",
        "account, tag",
        "bomb-header",
        "links and pipes, jsonl",
        "odd names, jsonl",
        "1,000 deep, jsonl",
        "mutated, server",
        "ready afterwards",
    },
    "training": {"kills", "kills, files", "full disk", "read-only folder", "two in one folder"},
    "load": {"twice its load", "memory", "ready afterwards", "SIGTERM under load"},
    "bad company": {
        "slow headers",
        "slow bodies",
        "disconnects",
        "short connections",
        "odd fields",
        "JPEG of many scans",
        "log",
        "2 MB of zeros",
    },
    "saving": {"index", "saving a model", "tag --resume, jsonl", "tag --resume, csv", "align", "adapt"},
    "workers": {"worker death", "parent death"},
}
NOT_TESTED = {"load": {"latency"}}  # a percentile of a few seconds on a busy machine says little: the long form has it


@functools.cache
def result(part: str) -> dict[str, Check]:
    with tempfile.TemporaryDirectory(prefix="soak-") as work:
        soak = Soak(Path(work).resolve(), short=True, out=io.StringIO(), part=part)
        try:
            PARTS[part](soak)
        finally:
            soak.clear()
    return {check.name: check for check in soak.checks}


CASES = [(part, name) for part, names in CHECKS.items() for name in sorted(names)]


@pytest.mark.parametrize(("part", "name"), CASES, ids=[f"{part}: {name}" for part, name in CASES])
def test_requirement(part: str, name: str) -> None:
    check = result(part)[name]
    assert check.ok, f"{check.required}: {check.found}"
    assert check.cases > 0


@pytest.mark.parametrize("part", PARTS)
def test_every_requirement_is_tested(part: str) -> None:
    assert set(result(part)) - NOT_TESTED.get(part, set()) == CHECKS[part]


def test_the_planted_pickle_is_sharp(tmp_path: Path) -> None:
    content = pickle.dumps({"weight": Payload(tmp_path / "marker")}, protocol=2)
    pickle.loads(content)
    assert (tmp_path / "marker").exists()


def test_mutations_repeat_with_their_seed() -> None:
    first, again, other = (list(mutated(60, seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_a_miss_is_counted_and_shown(tmp_path: Path) -> None:
    out = io.StringIO()
    soak = Soak(tmp_path, out=out, part="x")
    assert soak.check("one", "holds", [], cases=2, since=0)
    assert not soak.check("two", "holds", ["", "odd\x1b name"], cases=2, since=0)
    assert [check.name for check in soak.missed] == ["two"]
    assert "MISSED" in out.getvalue()
    assert "\x1b" not in out.getvalue()
