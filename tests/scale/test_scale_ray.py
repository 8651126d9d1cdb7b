"""A real Ray with two workers: the rows of the local run, when a worker is killed in the middle, and when the program
that drives it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import LABELS, Result, put_photos
from library_helpers import agree, answers, content
from scale_helpers import put_tar, rows_of, same
from train_tiny import squares

from ramatch.errors import RamatchError
from ramatch.evaluation.models import collect_scores, load_model, read_test
from ramatch.library import Library
from ramatch.recognizer import Recognizer
from ramatch.scale import cluster
from ramatch.scale.evaluate import collect_on_ray
from ramatch.scale.inputs import Unit

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
psutil = pytest.importorskip("psutil")
Call = Callable[..., Result]
PHOTOS, PART = 240, 2


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
        ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=150_000_000)
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    put_photos(folder / "photos", *(f"img{i}.png" for i in range(PHOTOS)))
    (folder / "photos" / "broken.jpg").write_bytes(b"no picture")
    return folder / "photos"


@pytest.fixture(scope="module")
def local(many: Path, model: Path) -> list[dict]:
    """The answers of `ramatch tag` without an engine."""
    from ramatch.cli import main

    out = many.parent / "local.jsonl"
    main([str(word) for word in ("tag", many, *options(model), "--out", out)])
    return rows_of(out)


def options(model: Path, *more: object) -> list[object]:
    return ["--model", model, "--labels", LABELS, "--top", 3, "--device", "cpu", *more]


def command(many: Path, model: Path, out: Path, actors: int = 1) -> list[object]:
    return ["tag", many, *options(model), "--engine", "ray", "--actors", actors, "--part-size", PART, "--out", out]


def actors() -> list[int]:
    """Processes of the pool, by what Ray calls them in the process list."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if words.startswith("ray::") and "_Actor" in words:
            found.append(process.info["pid"])
    return found


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.005)


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def test_a_worker_is_killed_in_the_middle(
    two_workers: Any, ramatch: Call, many: Path, model: Path, tmp_path: Path, local: list
) -> None:
    out, killed, others = tmp_path / "out", list[tuple[int, int]](), set(actors())

    def kill() -> None:
        wait_for(lambda: len(set(actors()) - others) == 2, "two actors")
        pid = max(set(actors()) - others)  # before they work: looking through all processes takes a while
        wait_for(lambda: len(parts(out)) >= 3, "parts")
        there = len(parts(out))
        os.kill(pid, signal.SIGKILL)
        killed.append((pid, there))

    thread = threading.Thread(target=kill)
    thread.start()
    done = ramatch(*command(many, model, out, 2))
    thread.join()
    assert done.code == 1, done.err
    assert f"{PHOTOS + 1} images in {out}, 0 of them from before" in done.err
    [(pid, there)] = killed
    assert there < PHOTOS // PART, "it was killed in the middle"
    assert not psutil.pid_exists(pid)
    rows = rows_of(out)
    same(rows, local)
    assert len(rows) == PHOTOS + 1


def test_the_driver_is_killed_and_begun_again(
    two_workers: Any, ramatch: Call, many: Path, model: Path, tmp_path: Path, local: list
) -> None:
    out = tmp_path / "out.jsonl"
    folder = Path(f"{out}.parts")
    others = set(actors())
    words = [sys.executable, "-m", "ramatch", *map(str, command(many, model, out))]
    address = ray.get_runtime_context().gcs_address
    process = subprocess.Popen(words, env={**os.environ, "RAY_ADDRESS": address}, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: len(parts(folder)) >= 3 or process.poll() is not None, "parts")
        process.kill()
    finally:
        _, error = process.communicate()
    wait_for(lambda: set(actors()) <= others, "end of its actors")  # Ray ends what a dead driver began
    assert not out.exists(), error.decode()
    before = parts(folder)
    assert 3 <= len(before) < PHOTOS // PART
    half, *whole = before
    content = half.read_bytes()
    half.write_bytes(content[: len(content) // 2])
    stamps = {path: path.stat().st_mtime_ns for path in whole}
    ramatch(*command(many, model, out)).refused("--resume")
    kept: dict[Path, int] = {}
    merge = cluster.flow  # parts are gone when it is done: look at them while it runs

    def watched(*arguments: Any) -> Iterator[dict[str, Any]]:
        yield from merge(*arguments)
        kept.update({path: path.stat().st_mtime_ns for path in whole})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "flow", watched)
        done = ramatch(*command(many, model, out), "--resume")
    assert done.code == 1, done.err
    assert kept == stamps, "what was whole was left as it was"
    rows = rows_of(out)
    same(rows, local)
    assert len(rows) == PHOTOS + 1


def test_shards_on_two_workers(
    two_workers: Any, ramatch: Call, many: Path, model: Path, tmp_path: Path, local: list
) -> None:
    files = sorted(many.glob("img*.png"))
    for i in range(3):
        put_tar(tmp_path / f"{i}.tar", files[i::3])
    out = tmp_path / "out.parquet"
    call = ["tag", tmp_path, *options(model), "--engine", "ray", "--part-size", 16, "--out", out]
    done = ramatch(*call)
    assert done.code == 0, done.err
    rows = rows_of(out)
    names = sorted(rows, key=lambda row: row["image"].rpartition(":")[2])
    wanted = sorted((row for row in local), key=lambda row: Path(row["image"]).name)
    same([{**row, "image": other["image"]} for row, other in zip(names, wanted, strict=True)], wanted)


def test_what_goes_wrong_in_a_process_is_said(two_workers: Any) -> None:
    def broken(work: Unit) -> Iterator[Any]:
        raise RamatchError("this does not go")
        yield

    with pytest.raises(RamatchError, match="this does not go"):
        list(cluster.flow([0], broken, dict, (), cluster.pool("cpu")))


def test_the_pool_is_as_large_as_the_cluster(two_workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.pool(None) == cluster.Pool(1, 0.0, pytest.approx(1.8), 0.1, 2)
    with pytest.raises(RamatchError, match="Ray sees no GPU"):
        cluster.pool("cuda")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 16.0, "GPU": 2.0})
    assert cluster.pool(None) == cluster.Pool(2, 1.0, 0.0, 1.0, 0)
    assert cluster.pool("cuda", 4).gpus == 0.5
    assert cluster.pool("cpu").actors == 8
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1.0})
    one = cluster.pool(None)
    assert one.actors * one.cpus + one.decode_cpus <= 1, "a single core has room for both"


def test_evaluation_has_the_scores_of_the_local_run(
    two_workers: Any, ramatch: Call, model: Path, tmp_path: Path
) -> None:
    squares(tmp_path / "data", train=4, test=20)
    data, ram = read_test(tmp_path / "data").annotations, load_model(model, device="cpu").ram
    local = collect_scores(ram, data, batch_size=6, workers=0, progress=False)
    found = collect_on_ray(ram, data, pool=cluster.pool("cpu", 2), batch_size=6, progress=False)
    assert (found.keys, found.labels) == (local.keys, local.labels)
    np.testing.assert_allclose(found.scores, local.scores, atol=1e-5)
    np.testing.assert_allclose(found.features, local.features, atol=1e-5)
    np.testing.assert_array_equal(found.targets, local.targets)
    call = ["eval", "--model", model, "--data", tmp_path / "data", "--device", "cpu", "--engine", "ray"]
    done = ramatch(*call, "--json", tmp_path / "report.json")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["images"] == 20
    (tmp_path / "data" / "images" / "test003.png").write_bytes(b"no picture")
    ramatch(*call).refused("test003.png", "ramatch data check")


def test_an_index_holds_what_the_local_one_holds(two_workers: Any, ramatch: Call, many: Path, model: Path) -> None:
    few = many.parent / "few"
    few.mkdir()
    for name in ("img1.png", "img2.png", "img3.png", "broken.jpg"):
        (few / name).write_bytes((many / name).read_bytes())
    (few / "copy.png").write_bytes((few / "img1.png").read_bytes())
    told, found = [], []
    recognizer = Recognizer.from_pretrained(model, device="cpu", cache=0)
    for engine in ("local", "ray"):
        library = few.parent / f"library-{engine}"
        call = ["index", few, "--model", model, "--device", "cpu", "--library", library, "--batch-size", 2]
        done = ramatch(*call, "--engine", engine)
        assert done.code == 1, done.err
        told.append((done.out, done.err.splitlines()[-1]))
        with Library.open(library) as opened:
            found.append((content(opened), answers(opened, recognizer)))
    assert told[1] == told[0]
    assert "3 new" in told[0][0]
    assert found[1][0] == found[0][0]
    assert found[1][1].keys() == found[0][1].keys()
    agree(found[1][1], found[0][1])
    again = ramatch(*call, "--engine", "ray")
    assert "5 unchanged" in again.out
    assert "0 encoded" in again.out
