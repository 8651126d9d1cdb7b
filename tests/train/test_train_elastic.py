"""`torchrun` with restarts: a worker is killed in the middle, and the run ends as one that was left alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_tiny import TIMES, read_log, tiny_values

from ramatch.train.config import TrainConfig, dump_config

psutil = pytest.importorskip("psutil")


def start(config: Path, out: Path) -> subprocess.Popen:
    """As docs/training.md has it, on one machine with two processes."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:1", "--nproc-per-node=2", "--max-restarts=3"]
    words += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "-m", "ramatch", "train"]
    words += ["--recipe", str(config), "--out", str(out), "--device", "cpu", "--resume", "auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def workers(process: subprocess.Popen) -> dict[int, int]:
    """Rank → pid."""
    found = {}
    for child in psutil.Process(process.pid).children():
        rank = child.environ().get("RANK")
        if rank is not None:
            found[int(rank)] = child.pid
    return found


def finish(process: subprocess.Popen) -> str:
    try:
        text, _ = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            for pid in [*workers(process).values(), process.pid]:
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, text[-3000:]
    return text


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to, and beside it the settings."""
    folder = tmp_path_factory.mktemp("elastic")
    values = tiny_values(tiny, epochs=6, batch_size=8, checkpoint__every=2, log_every=1)
    (folder / "config.yaml").write_text(dump_config(TrainConfig.from_dict(values)), encoding="utf-8")
    finish(start(folder / "config.yaml", folder / "whole"))
    return folder / "whole"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_is_started_again_from_the_newest_checkpoint(whole: Path, tmp_path: Path, rank: int) -> None:
    broken = tmp_path / "broken"
    run = start(whole.with_name("config.yaml"), broken)
    checkpoints, end = broken / "checkpoints", time.monotonic() + 120
    while len(list(checkpoints.glob("step-*.pt"))) < 2:
        assert time.monotonic() < end, "no checkpoint"
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.002)
    os.kill(workers(run)[rank], signal.SIGKILL)
    text = finish(run)
    assert "continuing at step" in text, text[-3000:]
    assert "connectFullMesh failed" not in text, "who starts again finds the living, not the addresses of the dead"
    one, two = (load_file(folder / "model" / "ram.safetensors") for folder in (whole, broken))
    assert one.keys() == two.keys()
    differ = [name for name in one if not torch.equal(one[name], two[name])]
    assert not differ, "the weights are the same to the bit"
    logs = [
        [{k: v for k, v in e.items() if k not in TIMES} for e in read_log(f / "log.jsonl")] for f in (whole, broken)
    ]
    assert logs[0] == logs[1]
