"""Optimisers, schedule, EMA, augmentation, log: the parts of the loop, one by one."""

from __future__ import annotations

import io
import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from train_tiny import read_log, tiny_backbone

from ramatch.config import preset
from ramatch.errors import RamatchError
from ramatch.modeling.ram import RAM
from ramatch.progress import Progress, clock
from ramatch.train.config import OptimConfig
from ramatch.train.folder import RunLog
from ramatch.train.optim import (
    EMA,
    build_optimizers,
    clamp,
    param_groups,
    rates,
    reference_schedule,
    schedule,
    set_rates,
    trainable,
)
from ramatch.train.task import RAMTask


def tiny_ram(**changes) -> RAM:
    return RAM(tiny_backbone(), preset("ramatch", adapted_layers=1, saa_layers=1, prompt_layers=1, **changes))


def task(ram: RAM) -> RAMTask:
    return RAMTask(ram, ("red", "blue"), "mmc", torch.float32)


def test_each_parameter_learns_in_its_own_way() -> None:
    ram = tiny_ram()
    adam, sgd = build_optimizers(task(ram).roles(), OptimConfig(lr=1e-6, prompt_lr=2e-3, temperature_lr=3e-5))
    assert isinstance(adam, torch.optim.AdamW)
    assert isinstance(sgd, torch.optim.SGD)
    names = {id(p): name for name, p in ram.named_parameters()}
    groups = {g["role"]: {names[id(p)] for p in g["params"]} for o in (adam, sgd) for g in o.param_groups}
    assert groups["temperatures"] == {"tau_global", "tau_region"}
    assert groups["prompts"] == {"label_set.prompts", "region_set.visual_prompts"}
    assert all(name.startswith("region_set.tss") for name in groups["adapters"] | groups["norms"])
    together = set().union(*groups.values())
    assert together == {n for n in ram.adapters() if "running" not in n and "num_batches" not in n}, "all that learns"
    assert {g["role"]: g["weight_decay"] for g in adam.param_groups}["norms"] == 0
    assert rates([adam, sgd]) == {"adapters": 1e-6, "norms": 1e-6, "temperatures": 3e-5, "prompts": 2e-3}
    set_rates([adam, sgd], 0.5)
    set_rates([adam, sgd], 0.5)  # from the peak, not from the last value
    assert rates([adam, sgd])["prompts"] == 1e-3


def test_what_is_decayed() -> None:
    """Matrices only; everything, as the authors' program has it, with `decay_all`."""
    roles = task(tiny_ram()).roles()
    found = {g["role"]: g["weight_decay"] for g in param_groups(roles, OptimConfig(weight_decay=0.3))}
    assert found == {"adapters": 0.3, "norms": 0.0, "temperatures": 0.0, "prompts": 0.0}
    found = {g["role"]: g["weight_decay"] for g in param_groups(roles, OptimConfig(weight_decay=0.3, decay_all=True))}
    assert set(found.values()) == {0.3}
    linear = nn.Linear(2, 2)
    config = OptimConfig(text_lr=1e-4, vision_lr=2e-4)
    groups = param_groups({"text": [linear.weight], "vision": [linear.bias]}, config)
    assert [(g["role"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("text", 1e-4, 1e-4),
        ("vision_norms", 2e-4, 0.0),
    ]


def test_the_reference_schedule_is_that_of_the_authors_program() -> None:
    found = [5 * reference_schedule(epoch) for epoch in range(6)]
    assert found == pytest.approx([2.0, 3.5, 4.97, 4.95, 4.92, 4.88], abs=0.006)


def test_the_average_as_the_settings_have_it() -> None:
    assert OptimConfig(ema_decay=0.9).decay(1, 100) == 0.9
    warm = OptimConfig(ema_decay=0.9, ema_warmup=True)
    assert [warm.decay(step, 100) for step in (1, 8, 200)] == [2 / 11, 0.5, 0.9]
    numbers, mean = EMA({"x": (x := torch.zeros(()))}), OptimConfig(average=0.5)
    for step in range(1, 11):
        x.fill_(step)
        numbers.update(mean.decay(step, 10))
    assert numbers.average["x"].item() == pytest.approx(sum(range(5, 11)) / 6)


def test_frozen_and_empty_parameters_do_not_learn() -> None:
    ram = tiny_ram(prompts="none", visual_prompts=0, tss=False)
    assert set(trainable(ram)) == {"tau_global", "tau_region"}
    ram.requires_grad_(False)
    with pytest.raises(RamatchError, match="nothing to train"):
        trainable(ram)


def test_schedule() -> None:
    values = [schedule(step, 100, 0.1, 0.01) for step in range(100)]
    assert values[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert values[10] == pytest.approx(1.0)
    assert values[99] == pytest.approx(0.01)
    assert all(a >= b for a, b in pairwise(values[10:]))
    middle = 10 + 89 / 2
    assert schedule(round(middle), 100, 0.1, 0.01) == pytest.approx(0.505, abs=0.01)
    assert schedule(0, 1, 0.0) == 1.0
    assert all(math.isfinite(schedule(s, 3, 1.0)) for s in range(3))


def test_temperatures_stay_positive() -> None:
    ram = tiny_ram(tau_region=0.02)
    limits = task(ram).limits(0.1)
    with torch.no_grad():
        ram.tau_region.fill_(-1.0)
        ram.tau_global.fill_(3.0)
    clamp(limits)
    assert ram.tau_region.item() == pytest.approx(0.002)
    assert ram.tau_global.item() == 3.0


def test_ema_is_the_formula() -> None:
    ram = tiny_ram()
    ema, decay = EMA(ram.adapters()), 0.9
    expected = {name: t.clone().double() for name, t in ram.adapters().items()}
    assert any("running_mean" in name for name in expected), "BatchNorm's statistics are averaged too"
    for _ in range(4):
        with torch.no_grad():
            for t in ram.adapters().values():
                t.add_(torch.randn_like(t) if t.is_floating_point() else 1)
        ema.update(decay)
        for name, t in ram.adapters().items():
            if t.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * t.double()
            else:
                expected[name] = t.double()
    for name, t in ema.state_dict().items():
        torch.testing.assert_close(t.double(), expected[name], rtol=1e-5, atol=1e-6)
    plain = {name: t.clone() for name, t in ram.adapters().items()}
    with ema.applied():
        for name, t in ram.adapters().items():
            torch.testing.assert_close(t.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(t, plain[name]) for name, t in ram.adapters().items()), "swapped back exactly"
    ema.restart()
    assert all(torch.equal(t, plain[name]) for name, t in ema.state_dict().items())


def test_log_is_cut_at_the_checkpoint(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path, tensorboard=False)
    log.write("step", step=1, loss=2.0)
    position = log.position()
    log.write("step", step=2, loss=float("nan"))
    log.close()
    assert [e["loss"] for e in read_log(path)] == [2.0, None]
    with open(path, "a") as file:
        file.write('{"kind": "st')  # a crash in the middle of a line
    assert len(read_log(path)) == 2
    log = RunLog(path, position=position, tensorboard=False)
    log.write("step", step=2, loss=1.5)
    log.close()
    assert [(e["step"], e["loss"]) for e in read_log(path)] == [(1, 2.0), (2, 1.5)]
    for line in path.read_text().splitlines():
        json.loads(line)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_place_or_in_lines() -> None:
    for stream, lines in ((Screen(), 0), (io.StringIO(), 2)):
        line = Progress(100, "training", stream=stream)
        line.start()
        line.update(10, "loss 1.0", force=True)
        line.update(20, "loss 0.5", force=True)
        assert stream.getvalue().count("\n") == lines
        assert "20/100" in stream.getvalue()
        assert "img/s" in stream.getvalue()
        assert "left" in stream.getvalue()
    silent = io.StringIO()
    Progress(5, "x", stream=silent, enabled=False).update(3, force=True)
    assert silent.getvalue() == ""
    assert (clock(59.6), clock(3723)) == ("1:00", "1:02:03")


def test_frozen_backbone_gets_no_gradient() -> None:
    ram = tiny_ram().train()
    targets = torch.eye(3)[:, [0, 1]]
    ram.loss(ram(torch.randn(3, 3, 32, 32), ["red", "blue"], targets), targets).backward()
    assert all(p.grad is None for p in ram.backbone.parameters())
    assert all(p.grad is not None for p in trainable(ram).values())
    assert isinstance(ram, nn.Module)


def test_tensorboard_where_installed(tmp_path) -> None:
    import importlib.util

    log = RunLog(tmp_path / "log.jsonl")
    log.write("step", step=1, loss=2.0)
    log.close()
    events = list((tmp_path / "tensorboard").glob("events*"))
    assert bool(events) == (importlib.util.find_spec("tensorboard") is not None)
    assert read_log(tmp_path / "log.jsonl")[0]["loss"] == 2.0
