"""A short form of every part of the soak. Each requirement is a test of its own; known faults are strict xfails."""

from __future__ import annotations

import functools
import io
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from soak import files, hostile_http, images, server, solver, threads, training
from soak.file_cases import Payload
from soak.pictures import mutated
from soak.report import Check, Soak
from soak.worlds import tiny_model

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def bad_company(soak: Soak) -> None:
    hostile_http.run(soak, tiny_model(soak.folder("model")))


PARTS: dict[str, Callable[[Soak], None]] = {
    "solver": solver.run,
    "threads": threads.run,
    "files": files.run,
    "images": images.run,
    "training": training.run,
    "load": server.run_load,
    "bad company": bad_company,
}
CHECKS: dict[str, dict[str, str]] = {  # part → requirement → the known fault, or nothing
    "solver": {
        "awkward problems": "infinite starting potentials give NaN; the exp domain says converged where it underflowed",
        "refusals": "a NaN tol and NaN starting potentials are taken",
        "gradients": "",
    },
    "threads": {
        "predict, cache 64": "predict swaps the model's config while another thread reads it",
        "predict, cache 0": "predict swaps the model's config while another thread reads it",
        "encode_vocabulary": "encode_vocabulary swaps the label encoder's config while another thread reads it",
    },
    "files": {
        "process": "",
        "annotations": "parquet and arrow errors are not turned into RamatchError",
        "vocabulary": "",
        "recipe": "recipes that are not UTF-8, and values that YAML itself refuses, end in a traceback",
        "model": "a broken tokenizer.json or config.json ends in a traceback",
        "foreign model": "",
        "checkpoint": "--resume with a broken checkpoint ends in a traceback",
        "no code": "",
        "inside the folder": "planted paths to images and weights outside the folder are followed",
    },
    "images": {
        "mutated, tag": "",
        "account, tag": "",
        "bomb-header": "a picture of 1 x 99,999,999 is resized to 32 columns and three thousand million rows",
        "links and pipes, jsonl": "dangling links, loops and pipes are skipped without a word",
        "odd names, jsonl": "control characters of a file name are printed as they are",
        "1,000 deep, jsonl": "a deep folder ends in a RecursionError",
        "mutated, server": "",
        "ready afterwards": "",
    },
    "training": {
        "kills": "",
        "kills, files": "",
        "full disk": "",
        "read-only folder": "",
        "two in one folder": "with --resume auto a second training begins beside the first",
    },
    "load": {
        "twice its load": "",
        "memory": "",
        "ready afterwards": "",
        "SIGTERM under load": "the server ends by the signal instead of with exit code 0",
    },
    "bad company": {
        "slow headers": "",
        "slow bodies": "slow uploads take all places, and others hear 429 until the deadline",
        "disconnects": "",
        "short connections": "",
        "odd fields": "a lone surrogate in vocabulary and a deadline of 400 digits are answered with 500",
        "JPEG of many scans": "a JPEG with thousands of scans holds a decoder for minutes",
        "log": "the answers with 500 leave tracebacks in the log",
        "2 MB of zeros": "validation collects a million errors, on the event loop",
    },
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


def cases() -> list:
    return [
        pytest.param(
            part, name, marks=[pytest.mark.xfail(strict=True, reason=fault)] if fault else [], id=f"{part}: {name}"
        )
        for part, names in CHECKS.items()
        for name, fault in names.items()
    ]


@pytest.mark.parametrize(("part", "name"), cases())
def test_requirement(part: str, name: str) -> None:
    check = result(part)[name]
    assert check.ok, f"{check.required}: {check.found}"
    assert check.cases > 0


@pytest.mark.parametrize("part", PARTS)
def test_every_requirement_is_tested(part: str) -> None:
    assert set(result(part)) - NOT_TESTED.get(part, set()) == set(CHECKS[part])


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
