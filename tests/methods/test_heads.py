"""Systems that train a head on frozen features: every kind of backbone, half precision, unknown and missing targets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import backbone

from ramatch.config import preset
from ramatch.methods import build_method
from ramatch.methods.base import MethodOutput
from ramatch.modeling.ram import Labels

HEADS = ("mkt", "ml-decoder", "biam", "lesa", "sdl", "deep0tag")
LABELS = ("dog", "cat", "red car", "boat")
TARGETS = torch.tensor([[1, 0, -1, 0], [0, 0, 0, -1], [-1, -1, -1, -1], [1, 1, 0, 0]]).float()
KINDS = {"clip": "ramatch", "dual": "aligned", "given": "ramatch"}


def made(name: str, kind: str):
    torch.manual_seed(0)
    own = backbone("dual" if kind == "dual" else "clip", text=kind != "given")
    if kind == "given":
        features = torch.randn(6, own.dim, generator=torch.Generator().manual_seed(2))
        own.given_labels = dict(zip((*LABELS, "kite", "plane"), features, strict=True))
    settings = {"width": 32, "hidden": 32} if name == "ml-decoder" else {}
    return build_method(own, preset(KINDS[kind]), {"name": name, "settings": settings})


def pixels(model) -> torch.Tensor:
    size = (4, 3, *model.preprocess.size)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HEADS)
def test_every_parameter_learns_and_other_labels_are_recognized(name: str, kind: str):
    model = made(name, kind).train()
    images = pixels(model)
    for _ in range(2):  # layers that start at zero let no gradient through before the first step
        model.zero_grad()
        loss = model.loss(model(images, LABELS, TARGETS), TARGETS)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-4 * parameter.grad
    learning = {key: p for key, p in model.named_parameters() if p.requires_grad and p.numel()}
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learning.values())
    # a softmax does not see what all its logits have in common
    blind = {"lesa": {"attend.2.bias"}}.get(name, set())
    assert {key for key, p in learning.items() if p.grad.abs().max() == 0} <= blind
    with torch.no_grad():
        found = model.eval()(images, ("kite", "plane", "dog")).image
    assert found.shape == (4, 3)
    assert found.isfinite().all()


@pytest.mark.parametrize("name", HEADS)
def test_nothing_known_is_no_loss_to_rank(name: str):
    """Unknown targets pull nowhere: what a label of theirs scores has no gradient."""
    model = made(name, "clip").train()
    output = model(pixels(model), LABELS)
    scores = output.image.detach().requires_grad_()
    criterion = model.criterion(type(output)(scores, scores, extra=output.extra), TARGETS)
    (gradient,) = torch.autograd.grad(criterion, scores)
    assert (gradient[TARGETS < 0] == 0).all()
    assert gradient[0, 0] < 0 < gradient[0, 1]
    assert model.loss(output, torch.full((4, 4), -1.0)).isfinite()


@pytest.mark.parametrize("name", HEADS)
def test_half_precision(name: str):
    model = made(name, "clip").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout | torch.nn.MultiheadAttention):
            module.eval()
    images, losses = pixels(model), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model.loss(model(images, LABELS, TARGETS), TARGETS)
        assert loss.dtype == torch.float32
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=0.02)


def waiting(step: Callable[[], torch.Tensor]) -> set[str]:
    """Operators of a step and its gradient that ask the device for a number."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step().backward()
    return {"aten::item", "aten::nonzero", "aten::masked_select"} & {event.key for event in found.key_averages()}


@pytest.mark.parametrize("name", HEADS)
def test_nothing_waits_for_the_host(name: str):
    """No number is asked for and no shape depends on one, as a CUDA graph wants it."""
    model = made(name, "clip").train()
    d, g = model.backbone.dim, torch.Generator().manual_seed(3)
    image, regions, names = (torch.randn(shape, generator=g) for shape in ((4, d), (4, 9, d), (4, d)))

    def step() -> torch.Tensor:
        scores, _, extra = model.logits(image, regions, Labels(LABELS, names, names))
        return model.criterion(MethodOutput(scores, scores, extra=extra), TARGETS)

    assert waiting(step) == set()
    assert waiting(lambda: step() * step().item() + step()[None][TARGETS[:1, 0] > 0].sum()) == {
        "aten::item",
        "aten::nonzero",
    }
