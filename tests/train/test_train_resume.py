"""A run that is killed, interrupted, or out of disk space loses nothing but time."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_tiny import read_log, tiny_config, tiny_values

from ramatch.errors import RamatchError
from ramatch.train import checkpoint
from ramatch.train.config import TrainConfig
from ramatch.train.folder import RunFolder
from ramatch.train.interrupt import Interrupted
from ramatch.train.run import train

HERE = Path(__file__).parent


def quiet(config: TrainConfig, **options):
    return train(config, progress=False, **options)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the test forks")
@pytest.mark.parametrize("cache", ["none", "device"])
def test_killed_at_any_moment_ends_bit_identical(tiny: Path, tmp_path: Path, cache: str) -> None:
    values = tiny_values(
        tiny, output=str(tmp_path), epochs=7, data__cache=cache, checkpoint__every=3, optim__accumulate=2, batch_size=8
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    seed = {"none": 5, "device": 11}[cache]
    done = subprocess.run(
        [sys.executable, str(HERE / "train_killer.py"), json.dumps(values), str(seed)],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(found["same"].values()), found
    stages = {stage for stage, *_ in found["kills"]}
    assert {"write", "rename"} <= stages, f"kills during a save must have happened: {found}"
    assert len(found["kills"]) >= 4, found
    assert any(temporary for *_, temporary in found["kills"]), "a save was cut short"
    assert found["temporary files left"] == []


def test_ctrl_c_saves_and_says_how_to_go_on(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, output=str(tmp_path / "a"), epochs=16, checkpoint__every=1000, eval__every=1000)
    reference = tiny_config(tiny, output=str(tmp_path / "b"), epochs=16, checkpoint__every=1000, eval__every=1000)

    def press() -> None:
        log = tmp_path / "a" / "log.jsonl"
        while not log.is_file() or log.read_bytes().count(b"\n") < 8:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(Interrupted, match="--resume auto"):
        quiet(config)
    assert signal.getsignal(signal.SIGINT) is before
    saved = checkpoint.list_checkpoints(tmp_path / "a" / "checkpoints")
    assert 0 < checkpoint.load_checkpoint(saved[-1])["place"]["step"] < 64
    quiet(config, resume="auto")
    quiet(reference)
    ours, theirs = (load_file(tmp_path / x / "model" / "ram.safetensors") for x in "ab")
    assert all(torch.equal(ours[name], t) for name, t in theirs.items())


def test_full_disk_leaves_the_last_good_checkpoint(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = Path.write_bytes, []

    def full(path: Path, content) -> int:
        calls.extend([path] if ".pt." in path.name else [])
        if len(calls) == 3:
            write(path, content[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, content)

    config = tiny_config(tiny, output=str(tmp_path / "run"))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RamatchError, match=r"disk is full.*last good checkpoint is .*step-.*resume"):
        quiet(config)
    folder = tmp_path / "run" / "checkpoints"
    good = checkpoint.latest_good(folder)
    assert good is not None
    assert list(folder.glob(".*.tmp")) == []
    monkeypatch.setattr(Path, "write_bytes", write)
    result = quiet(config, resume="auto")
    assert result.steps == 8


def test_full_disk_in_the_log(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ramatch.train import folder

    def full(self, kind, *, step, **values) -> None:
        if step == 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder.RunLog, "write", full)
    with pytest.raises(RamatchError, match=r"disk is full.*step-00000004"):
        quiet(tiny_config(tiny, output=str(tmp_path / "run")))


def test_last_k_and_best(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, output=str(tmp_path / "run"), epochs=5, checkpoint__keep=3)
    result = quiet(config)
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["best.pt", "step-00000016.pt", "step-00000018.pt", "step-00000020.pt"]
    entries = [e for e in read_log(tmp_path / "run" / "log.jsonl") if e["kind"] == "eval" and e["step"] > 0]
    best = max(entries, key=lambda e: e["mAP"])
    assert result.best == best["mAP"]
    assert (result.best_step, result.weights) == (best["step"], best["weights"])
    kept = checkpoint.load_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")["adapters"]
    saved = load_file(tmp_path / "run" / "model" / "ram.safetensors")
    assert all(torch.equal(kept[name], t) for name, t in saved.items())
    assert result.reports["validation"]["mAP"] == pytest.approx(best["mAP"])
    assert not any(name.startswith("backbone.") for name in saved)


def test_nothing_is_kept_when_nothing_is_asked(tiny: Path, tmp_path: Path) -> None:
    quiet(tiny_config(tiny, output=str(tmp_path / "run"), epochs=1, checkpoint__keep=0))
    assert checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints") == []
    assert (tmp_path / "run" / "model" / "ram.safetensors").is_file()


def test_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save_checkpoint(checkpoint.checkpoint_path(tmp_path, step), {"place": {"step": step}})
    newest = checkpoint.checkpoint_path(tmp_path, 3)
    newest.write_bytes(newest.read_bytes()[:-200])
    checkpoint.checkpoint_path(tmp_path, 4).write_bytes(b"")
    (tmp_path / ".step-00000005.pt.x.tmp").write_bytes(b"half")
    found = checkpoint.latest_good(tmp_path)
    assert found is not None
    assert found[0].name == "step-00000002.pt"
    assert checkpoint.latest_good(tmp_path / "nothing") is None


def test_random_states_come_back() -> None:
    import random

    import numpy as np

    device = torch.device("cpu")
    random.gauss(0, 1)  # leaves a second number waiting, which belongs to the state
    state = checkpoint.rng_state(device)

    def draw() -> tuple:
        return random.gauss(0, 1), random.random(), float(np.random.randn()), float(torch.rand(()))

    first = draw()
    checkpoint.set_rng_state(state, device)
    assert draw() == first


def test_changed_settings_are_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, output=str(tmp_path / "run"), epochs=1)
    quiet(config)
    with pytest.raises(RamatchError, match=r"optim\.lr: 0\.003 → 0\.5"):
        quiet(config.replace(**{"optim.lr": 0.5}), resume="auto")
    with pytest.raises(RamatchError, match="epochs: 1 → 3"):
        quiet(config.replace(epochs=3), resume="auto")
    with pytest.raises(RamatchError, match="already holds a run"):
        quiet(config)
    again = quiet(config.replace(log_every=1), resume="auto")  # changes nothing that is learned
    assert again.steps == 4
    with pytest.raises(RamatchError, match="no such checkpoint"):
        quiet(config, resume=str(tmp_path / "none.pt"))


def test_changed_data_and_backbone_are_refused(tiny: Path, tmp_path: Path) -> None:
    from train_tiny import squares, tiny_backbone

    from ramatch.modeling.checkpoints.folder import save_backbone

    save_backbone(tiny_backbone(), tmp_path / "backbone")
    squares(tmp_path / "data", train=40, test=4)
    config = tiny_config(tmp_path, epochs=1)
    quiet(config)
    rows = json.loads((tmp_path / "data/train.json").read_text())
    changed = {**rows, "images": [[path, ["red"]] for path, _ in rows["images"]]}
    (tmp_path / "data/train.json").write_text(json.dumps(changed))
    with pytest.raises(RamatchError, match="the data is not what the run began with"):
        quiet(config, resume="auto")
    (tmp_path / "data/train.json").write_text(json.dumps(rows))
    save_backbone(tiny_backbone(seed=9), tmp_path / "backbone")
    with pytest.raises(RamatchError, match="the backbone is not what the run began with"):
        quiet(config, resume="auto")


def test_only_damaged_checkpoints_do_not_start_anew_without_a_word(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, output=str(tmp_path), epochs=2, checkpoint__every=2)
    quiet(config)
    for path in checkpoint.list_checkpoints(tmp_path / "checkpoints"):
        path.write_bytes(b"damaged")
        with pytest.raises(RamatchError, match="not a checkpoint that can be read safely"):
            checkpoint.load_checkpoint(path)
    with pytest.raises(RamatchError, match=r"none of the \d+ checkpoints in .* can be read"):
        quiet(config, resume="auto")


@pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")
def test_one_training_at_a_time_in_a_folder(tiny: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        for resume in (False, "auto"):
            with pytest.raises(RamatchError, match="another training runs in"):
                quiet(tiny_config(tiny, output=str(tmp_path / "run"), epochs=1), resume=resume)
    assert not folder.path.exists()  # nothing began
    with folder.locked(), RunFolder(tmp_path / "other").locked():
        pass
