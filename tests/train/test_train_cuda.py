"""What only a GPU can show: no waiting for it in the hot path, half precision there, learning there."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from train_tiny import tiny_config

from ramatch.train.run import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def waits(tiny: Path, folder: Path, steps: int, **changes) -> int:
    """How often a run of so many steps waited for the GPU."""
    config = tiny_config(
        tiny,
        output=str(folder),
        device="cuda",
        data__cache="device",
        data__validation=0.0,
        batch_size=2,
        max_steps=steps,
        log_every=1000,
        checkpoint__keep=0,
        **changes,
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(config, progress=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(w.message) for w in found)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_do_not_wait_for_the_gpu(tiny: Path, tmp_path: Path, precision: str) -> None:
    waits(tiny, tmp_path / "warm", 5, precision=precision)
    few, many = (waits(tiny, tmp_path / str(n), n, precision=precision) for n in (10, 40))
    assert many - few < 3, f"{few} waits in 10 steps, {many} in 40"


def test_learns_on_the_gpu(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tiny,
        output=str(tmp_path / "run"),
        device="cuda",
        precision="bf16",
        epochs=25,
        optim__lr=0.02,
        data__cache="device",
        augment={"enabled": False},
        eval__every=50,
    )
    result = train(config, progress=False)
    assert result.best is not None
    assert result.best > 65


def test_resumes_on_the_gpu(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, output=str(tmp_path / "run"), device="cuda", precision="fp16", epochs=2)
    train(config, progress=False)
    for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*.pt"))[1:]:
        path.unlink()
    result = train(config, resume="auto", progress=False)
    assert result.steps == 8
