"""It learns; and every way of running it learns the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_tiny import SEEN, UNSEEN, read_log, tiny_backbone, tiny_config

from ramatch.data.splits import hold_out
from ramatch.errors import RamatchError
from ramatch.modeling.checkpoints.folder import save_backbone
from ramatch.train import ImageCache, load_recipe
from ramatch.train.assemble import read_data
from ramatch.train.config import DataConfig, OptimConfig
from ramatch.train.optim import build_optimizers, clip_together
from ramatch.train.run import train


def quiet(config, **options):
    return train(config, progress=False, **options)


def test_smoke_recipe_learns(tiny: Path, tmp_path: Path) -> None:
    """The recipe's own loop and settings on a tiny backbone and tiny pictures, made to learn in seconds."""
    config = load_recipe(
        "coco-ov-smoke",
        [
            f"output={tmp_path / 'run'}",
            f"model.backbone={tiny / 'backbone'}",
            f"data.path={tiny / 'data'}",
            'model.ram={"adapted_layers": 1, "saa_layers": 1, "prompt_layers": 1, "tau_region": 0.05}',
            "data.validation=0.25",
            "optim.lr=0.02",
            "augment.enabled=false",
            "epochs=30",
            "eval.every=50",
            "eval.test=true",
            "tensorboard=false",
            "seed=1",
        ],
    )
    result = quiet(config)
    entries = read_log(tmp_path / "run" / "log.jsonl")
    losses = [e["loss"] for e in entries if e["kind"] == "step"]
    start = next(e for e in entries if e["kind"] == "eval" and e["step"] == 0)
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5
    assert result.best is not None
    assert result.best > start["mAP"] + 15, f"{start['mAP']} → {result.best}"
    assert result.reports["gzsl"].labels == len(SEEN + UNSEEN)
    assert result.reports["zsl"].labels == len(UNSEEN)


def test_run_folder_explains_itself(tiny: Path, tmp_path: Path) -> None:
    result = quiet(tiny_config(tiny, output=str(tmp_path / "run"), epochs=1, eval__test=True))
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} >= {
        "README.txt",
        "run.json",
        "config.yaml",
        "log.jsonl",
        "validation.json",
        "checkpoints",
        "model",
        "eval.json",
    }
    assert load_recipe(folder / "config.yaml") == tiny_config(tiny, output=str(folder), epochs=1, eval__test=True)
    run = json.loads((folder / "run.json").read_text())
    assert (run["status"], run["steps"], run["images"]) == ("finished", 4, 77)
    assert set(json.loads((folder / "eval.json").read_text())) == {"validation", "zsl", "gzsl"}
    assert result.reports["gzsl"]["mAP"] == json.loads((folder / "eval.json").read_text())["gzsl"]["mAP"]
    assert "--resume auto" in (folder / "README.txt").read_text()
    held = set(json.loads((folder / "validation.json").read_text()))
    data = read_data(tiny_config(tiny).data)
    assert held.isdisjoint(r.key for r in data.train.records)


def test_seed_decides_everything(tiny: Path, tmp_path: Path) -> None:
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        quiet(tiny_config(tiny, output=str(tmp_path / name), epochs=1, seed=seed))
        runs[name] = load_file(tmp_path / name / "model" / "ram.safetensors")
    assert all(torch.equal(runs["a"][k], v) for k, v in runs["b"].items())
    assert not all(torch.equal(runs["a"][k], v) for k, v in runs["c"].items())


def test_cache_and_loader_agree_without_augmentation(tiny: Path, tmp_path: Path) -> None:
    """Same pictures, same order: decoding once, in workers, or in the main process makes no difference."""
    cache, found = ImageCache(2), []
    for name, changes in (("a", {}), ("b", {"data__cache": "device"}), ("c", {"data__workers": 1})):
        config = tiny_config(tiny, output=str(tmp_path / name), epochs=1, augment={"enabled": False}, **changes)
        quiet(config, images=cache if name == "b" else None)
        found.append(load_file(tmp_path / name / "model" / "ram.safetensors"))
    for other in found[1:]:
        for name, tensor in found[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)


def test_images_are_decoded_once_for_several_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ramatch.data.annotations import Record

    decoded, load = [], Record.load
    monkeypatch.setattr(Record, "load", lambda self, *a: decoded.append(self.key) or load(self, *a))
    cache = ImageCache(1)
    for name in "ab":
        config = tiny_config(tiny, output=str(tmp_path / name), epochs=1, data__cache="device", seed=ord(name))
        quiet(config, images=cache)
    assert len(decoded) == len(set(decoded)) == 96


def test_rates_follow_the_authors_schedule(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, output=str(tmp_path / "run"), epochs=3, log_every=1, optim__schedule="reference")
    quiet(config)
    entries = [e for e in read_log(tmp_path / "run" / "log.jsonl") if e["kind"] == "step"]
    for epoch, factor in enumerate((0.4, 0.7, 0.99384)):
        found = {(e["lr_adapters"], e["lr_prompts"]) for e in entries if e["epoch"] == epoch}
        assert len(found) == 1, "rates change between epochs only"
        assert found.pop() == pytest.approx((3e-3 * factor, 0.02 * factor), rel=1e-4)


def test_accumulation_takes_fewer_steps(tiny: Path, tmp_path: Path) -> None:
    result = quiet(tiny_config(tiny, output=str(tmp_path / "run"), epochs=1, batch_size=8, optim__accumulate=4))
    assert result.steps == 3, "9 batches: two groups of four and a last one of one"
    entries = [e for e in read_log(tmp_path / "run" / "log.jsonl") if e["kind"] == "step"]
    assert entries[-1]["images"] == 72


def test_accumulated_gradient_is_the_mean(tiny: Path, tmp_path: Path) -> None:
    """With a loss that is a mean over images, two batches of 8 make the same step as one of 16."""
    found = []
    for name, changes in (("a", {"batch_size": 16}), ("b", {"batch_size": 8, "optim__accumulate": 2})):
        config = tiny_config(
            tiny, output=str(tmp_path / name), max_steps=1, loss="asl", data__validation=0.0, **changes
        )
        config = config.replace(**{"model.ram.tss": False, "optim.ema_decay": 0.0})
        quiet(config)
        found.append(load_file(tmp_path / name / "model" / "ram.safetensors"))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_and_keeps_the_backbones_identity(tiny: Path, tmp_path: Path, precision: str) -> None:
    from ramatch.train import evaluate

    result = quiet(tiny_config(tiny, output=str(tmp_path / "run"), epochs=2, precision=precision))
    saved = load_file(result.folder / "model" / "ram.safetensors")
    assert all(t.dtype in (torch.float32, torch.int64) for t in saved.values())
    assert all(torch.isfinite(t).all() for t in saved.values())
    report = evaluate(result.folder, tiny / "data", device="cpu", workers=0, progress=False)  # refuses another backbone
    assert report.images == 40


@pytest.mark.parametrize("loss", ["mmc-image", "asl", "ranking"])
def test_other_losses(tiny: Path, tmp_path: Path, loss: str) -> None:
    result = quiet(tiny_config(tiny, output=str(tmp_path / "run"), epochs=1, loss=loss))
    assert result.steps == 4


def test_unseen_labels_can_be_held_out(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tiny, output=str(tmp_path / "run"), epochs=1, data__holdout_classes=["blue"], eval__metric="mAP_H"
    )
    data = read_data(config.data)
    assert "blue" not in data.train.classes
    assert data.validation is not None
    assert data.validation.classes == ("red", "green", "yellow", "blue")
    assert not any("blue" in r.labels for r in data.train.records)
    assert any("blue" in r.labels for r in data.validation.records)
    assert {r.key for r in data.train.records}.isdisjoint(r.key for r in data.validation.records)
    result = quiet(config)
    values = result.reports["validation"].values
    assert result.best == values["mAP_H"]
    assert 0 < values["mAP_unseen"] <= 100


def test_start_from_a_trained_model(tiny: Path, tmp_path: Path) -> None:
    quiet(tiny_config(tiny, output=str(tmp_path / "a"), epochs=1))
    second = quiet(tiny_config(tiny, output=str(tmp_path / "b"), epochs=1, model__init=str(tmp_path / "a" / "model")))
    entries = [e for e in read_log(second.folder / "log.jsonl") if e["kind"] == "eval"]
    first = json.loads((tmp_path / "a" / "eval.json").read_text())["validation"]["mAP"]
    assert entries[0]["mAP"] == pytest.approx(first)


def test_vision_tower_with_given_label_features(tiny: Path, tmp_path: Path) -> None:
    backbone = tiny_backbone()
    features = backbone.encode_text([f"A photo of a {c}." for c in SEEN + UNSEEN]).detach()
    save_file({"features": features}, tmp_path / "f.safetensors", metadata={"labels": json.dumps(SEEN + UNSEEN)})
    backbone.text = backbone.text_projection = backbone.tokenizer = None
    save_backbone(backbone, tmp_path / "vision")
    config = tiny_config(
        tiny,
        output=str(tmp_path / "run"),
        epochs=1,
        eval__test=True,
        model__backbone=str(tmp_path / "vision"),
        model__label_features=str(tmp_path / "f.safetensors"),
    )
    result = quiet(config)
    assert result.reports["zsl"].labels == len(UNSEEN)


def test_held_out_images_do_not_depend_on_order_or_seed() -> None:
    keys = [f"image{i}" for i in range(200)]
    chosen = {keys[i] for i in hold_out(keys, 0.1)}
    assert len(chosen) == 20
    backwards = keys[::-1]
    assert {backwards[i] for i in hold_out(backwards, 0.1)} == chosen


def test_unreadable_image_is_named(tiny: Path, tmp_path: Path) -> None:
    from train_tiny import squares

    data = squares(tmp_path / "data", train=20, test=2)
    (data / "images" / "train007.png").write_bytes(b"not a picture")
    for cache, workers in (("none", 0), ("none", 1), ("device", 1)):
        config = tiny_config(
            tiny,
            output=str(tmp_path / f"{cache}{workers}"),
            data__path=str(data),
            data__cache=cache,
            data__workers=workers,
            data__validation=0.0,
            epochs=1,
        )
        with pytest.raises(RamatchError, match=r"train007.png") as found:
            quiet(config)
        assert "Traceback" not in str(found.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data__path": "nowhere"}, "nowhere.*data.path"),
        ({"data__path": ""}, "no data given"),
        ({"data__holdout_classes": ["cow"]}, "no label 'cow'"),
        ({"eval__metric": "accuracy"}, "accuracy.*known.*mAP"),
        ({"model__init": "nowhere"}, "not a model folder"),
        ({"device": "cuda:99"}, "GPU|CUDA"),
    ],
)
def test_mistakes_are_explained(tiny: Path, tmp_path: Path, changes: dict, told: str) -> None:
    with pytest.raises(RamatchError, match=told):
        quiet(tiny_config(tiny, output=str(tmp_path / "run"), **changes))


def test_diverging_run_stops(tiny: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny, output=str(tmp_path / "run"), epochs=8, optim__clip_norm=None)
    with pytest.raises(RamatchError, match=r"the loss is .*: training diverged"):
        quiet(config.replace(**{"optim.lr": 1e30, "optim.prompt_lr": 1e30, "optim.temperature_lr": 1e30}))


def test_data_config_default_is_valid() -> None:
    assert DataConfig().split == "train"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_overflow_skips_every_optimiser(bad: float) -> None:
    """fp16: a gradient that is not finite, in either optimiser, must leave the parameters of both as they were."""
    for broken in (0, 1):
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizers = [torch.optim.AdamW([parameters[0]], lr=0.1), torch.optim.SGD([parameters[1]], lr=0.1)]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for poison in (True, False):
            scaler.scale(sum((p * p).sum() for p in parameters)).backward()
            if poison:
                assert parameters[broken].grad is not None
                parameters[broken].grad[1] = bad
            clip_together(optimizers, parameters, 1.0, scaler)
            before = [p.detach().clone() for p in parameters]
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            for parameter, kept in zip(parameters, before, strict=True):
                assert torch.equal(parameter, kept) == poison
                assert parameter.isfinite().all()
        assert scaler.get_scale() == 4.0


def test_clipping_is_that_of_torch() -> None:
    for norm in (0.5, 100.0):
        ours, theirs = ([torch.nn.Parameter(torch.arange(3.0) + i) for i in range(2)] for _ in range(2))
        for parameters in (ours, theirs):
            sum((p**3).sum() for p in parameters).backward()
        clip_together([], ours, norm)
        torch.nn.utils.clip_grad_norm_(theirs, norm)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_a_skipped_first_step_leaves_the_momentum_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused SGD makes its momentum with the first step, but one that fp16's scaler skips writes nothing there."""
    prompts = torch.nn.Parameter(torch.ones(4))
    (sgd,) = build_optimizers({"prompts": [prompts]}, OptimConfig(prompt_momentum=0.9))
    sgd.param_groups[0]["fused"] = True  # as on a GPU
    sgd._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "empty_like", lambda t, **_: torch.full(t.shape, float("nan")))  # what memory may hold
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # makes the scale
    for gradient in (float("inf"), 1.0):
        prompts.grad = torch.full((4,), gradient)
        clip_together([sgd], [prompts], None, scaler)
        before = prompts.detach().clone()
        scaler.step(sgd)
        scaler.update()
        assert torch.equal(prompts, before) == (gradient == float("inf"))
    assert prompts.isfinite().all()
