"""Two processes of one batch each do what one process of double batch does."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_tiny import read_log, tiny_config, tiny_values

from ramatch.train.run import train

HERE = Path(__file__).parent


ABORTED = -6  # gloo's threads, now and then, where one process is gone while the other still says good-bye


def run_two(values: dict, out: Path) -> list[str]:
    """Both processes' output; once more from the start if torch aborted one."""
    for last in (False, False, True):
        codes, texts, errors = zip(*_two(values, out), strict=True)
        if last or ABORTED not in codes:
            break
        shutil.rmtree(values["output"], ignore_errors=True)
    assert codes == (0, 0), "".join(errors)[-3000:]
    return list(texts)


def _two(values: dict, out: Path) -> list[tuple[int, str, str]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    base = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "train_two.py"), json.dumps(values), str(out)],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    try:
        for process in processes:
            text, error = process.communicate(timeout=150)
            found.append((process.returncode, text, error))
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_processes_equal_one_of_double_batch(tiny: Path, tmp_path: Path) -> None:
    # without TSS: its BatchNorm takes statistics per process on a CPU (SyncBatchNorm is for GPUs)
    changes = {"loss": "mmc", "epochs": 2, "optim__ema_decay": 0.9, "checkpoint__every": 0}
    values = tiny_values(tiny, output=str(tmp_path / "two"), batch_size=8, **changes)
    values["model"]["ram"] = {**values["model"]["ram"], "tss": False}
    texts = run_two(values, tmp_path)
    config = tiny_config(tiny, output=str(tmp_path / "one"), batch_size=16, **changes).replace(
        **{"model.ram.tss": False}
    )

    from train_two import gradients

    loss, grads = gradients(config)
    parts = [torch.load(tmp_path / f"grads{rank}.pt") for rank in range(2)]
    for part in parts:
        assert part["loss"] == pytest.approx(loss, rel=1e-5)
        for name, gradient in grads.items():
            torch.testing.assert_close(part["grads"][name], gradient, rtol=1e-4, atol=1e-6)

    train(config, progress=False)
    logs = [
        [(e["step"], e["images"], e["loss"]) for e in read_log(tmp_path / run / "log.jsonl") if e["kind"] == "step"]
        for run in ("one", "two")
    ]
    assert [e[:2] for e in logs[0]] == [e[:2] for e in logs[1]]
    assert [e[2] for e in logs[0]] == pytest.approx([e[2] for e in logs[1]], rel=1e-4)
    one, two = (load_file(tmp_path / run / "model" / "ram.safetensors") for run in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-5)
    assert "validation" in texts[0], "the first process has the reports"
    assert "validation" not in texts[1], "only the first one evaluates and writes"
