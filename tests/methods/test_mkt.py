"""MKT: learns; its scores and loss as loops; where it starts; its two stages."""

from __future__ import annotations

import pytest
import torch
from learning import TARGETS, at_length, features, heads, keep, learn, linear, output, pairs, plain, small, squares
from train_tiny import SEEN, tiny_backbone, tiny_values, tiny_world

from ramatch.config import preset
from ramatch.methods import build_method
from ramatch.modeling.checkpoints.folder import load_ram
from ramatch.train import train
from ramatch.train.config import TrainConfig


def test_learns():
    before, after, loss = learn(small("mkt", hidden=64), 6)
    assert before < 0.6
    assert after > 0.85
    assert loss[-1] < 0.6 * loss[0]


def test_scores_and_loss_as_loops():
    model = plain("mkt", heads=4, hidden=8, top_k=2, distill=0.3, length=3.0)
    (image, regions, labels), (found, where), block = features(), output(model), model.blocks[0]
    wholes, frozens = [], []
    for b in range(3):
        x = [at_length(row, 3.0) for row in (image[b], *regions[b])]
        qkv = [linear(block.qkv, block.ln1(row).detach()) for row in x]
        keys, values = torch.stack([r[32:64] for r in qkv]), torch.stack([r[64:] for r in qkv])
        x = [row + linear(block.out, heads(q[:32], keys, values, 4)) for row, q in zip(x, qkv, strict=True)]
        x = [row + linear(block.fc2, torch.nn.functional.gelu(linear(block.fc1, block.ln2(row).detach()))) for row in x]
        whole = linear(model.global_head, x[0])
        first, _, second = model.local_head
        parts = [linear(second, torch.nn.functional.gelu(linear(first, row))) for row in x[1:]]
        for n, name in enumerate(labels.unit):
            scores = [float((part * name).sum()) for part in parts]
            best = sorted(range(6), key=scores.__getitem__)[-2:]
            expected = float((whole * name).sum()) + sum(scores[k] for k in best) / 2
            assert found.image[b, n].item() == pytest.approx(expected, rel=1e-9)
            assert {k for k in range(6) if where[b, k, n] > 0} == set(best)
        wholes.append(whole)
        frozens.append(at_length(image[b], 3.0))
    rank = sum(map(sum, pairs(found.image, TARGETS))) / 3
    distance = sum(float((w - f).abs().sum()) for w, f in zip(wholes, frozens, strict=True)) / 3
    assert model.criterion(found, TARGETS).item() == pytest.approx(rank + 0.3 * distance, rel=1e-5)


def test_starts_as_the_frozen_model():
    model, clip = small("mkt").eval(), small("clip").eval()
    pixels, _ = squares(4, seed=5)
    with torch.no_grad():
        ours, theirs = model(pixels, SEEN).image, clip(pixels, SEEN).image
    assert torch.allclose(ours / 10, theirs / clip.backbone.logit_scale, atol=1e-5)


def test_two_stages_are_two_rates():
    def state(**rates: float) -> tuple[bool, bool]:
        """Whether the student learned, and the context."""
        model = small("mkt", hidden=8)
        start = {key: value.clone() for key, value in model.adapters().items()}
        learn(model, 1, **rates)
        changed = {key for key, value in model.adapters().items() if not torch.equal(value, start[key])}
        return "local_head.2.weight" in changed, "label_set.prompts" in changed

    assert state(prompt_lr=0.0) == (True, False)
    assert state(lr=0.0, prompt_lr=0.1) == (False, True)


def test_second_stage_goes_on_from_the_first_run(tmp_path):
    """As the file's head tells it: the student of the first run stays, the context that began as words learns."""

    def run(name: str, **changes: object) -> dict[str, torch.Tensor]:
        changes = {"model__method": "mkt", "model__settings": {"hidden": 8}, "epochs": 1, **changes}
        train(TrainConfig.from_dict(tiny_values(tmp_path, output=str(tmp_path / name), **changes)), progress=False)
        return load_ram(tmp_path / name / "model", build=build_method).adapters()

    tiny_world(tmp_path)
    words = small("mkt").label_set.prompts
    first = run("first", optim__prompt_lr=0.0)
    second = run("second", optim__lr=0.0, optim__prompt_lr=0.1, model__init=str(tmp_path / "first" / "model"))
    assert torch.equal(first["label_set.prompts"], words)
    assert first["local_head.2.weight"].abs().max() > 0
    student = [key for key in first if key.startswith(("blocks", "global_head", "local_head"))]
    assert len(student) > 10
    assert all(torch.equal(first[key], second[key]) for key in student)
    assert not torch.equal(second["label_set.prompts"], words)


@pytest.mark.parametrize("changes", [{"prompts": "none"}, {"templates": ["{}"]}])
def test_no_context_without_words(changes):
    model = build_method(tiny_backbone(), preset("ramatch", **changes), {"name": "mkt"})
    assert model.label_set.mode == "none"
    cache = keep(model, squares(4, seed=5)[0])
    assert model(cache.pick(0, slice(None)), SEEN).image.isfinite().all()
