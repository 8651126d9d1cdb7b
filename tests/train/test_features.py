"""Training from cached features equals training on pixels; views; when a cache is made anew."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import close, tiny_ram
from train_tiny import LABELS, TARGETS, pictures

from ramatch.config import preset
from ramatch.data.augment import AugmentConfig, augment, epoch_table
from ramatch.errors import RamatchError
from ramatch.modeling.ram import RAM
from ramatch.train import features as module
from ramatch.train.adapt import AdaptConfig, settings_from
from ramatch.train.cached import CachedTask, collect_cached, fit_cached, ram_stem
from ramatch.train.config import CachedConfig
from ramatch.train.features import FeatureCache, FeatureStore, Views, cache_features

ONE = Views()


def keep(ram: RAM, pixels: torch.Tensor, views: int = 1, **options) -> FeatureCache:
    return cache_features(ram_stem(ram), pixels, Views(views, **options))


def fast(**changes) -> CachedConfig:
    """`optim__lr` stands for optim.lr."""
    return CachedConfig().replace(**{name.replace("__", "."): value for name, value in changes.items()})


# (which parts learn decides where the stem ends)
VARIANTS = {
    "ramatch": {},
    "no visual prompts": {"visual_prompts": 0},
    "no tss": {"tss": False},
    "final patches": {"saa_layers": 0},
    "taps before": {"tss_input": "before", "visual_prompts": 0},
    "all layers": {"saa_layers": 4, "adapted_layers": 4},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_loss_and_gradients_equal_those_on_pixels(changes):
    ram, pixels = tiny_ram("ramatch", **changes).train(), pictures()
    found = []
    for source in (ram.preprocess.normalize(pixels), keep(ram, pixels).pick(0, torch.arange(5))):
        ram.zero_grad()
        loss = ram.loss(ram(source, LABELS, TARGETS), TARGETS)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in ram.named_parameters() if p.grad is not None}
        found.append((loss.detach(), gradients))
    (loss, on_pixels), (kept_loss, on_kept) = found
    close(kept_loss, loss)
    assert on_pixels.keys() == on_kept.keys()
    assert len(on_pixels) > 2
    assert not any(name.startswith("backbone.") for name in on_pixels)
    for name, gradient in on_pixels.items():
        close(on_kept[name], gradient, 1e-4)


@pytest.mark.parametrize("name", ["ramatch", "paper"])
def test_collecting_equals_recognizing_the_pixels(name):
    ram, pixels = tiny_ram(name), pictures(7)
    for background in ((), ("red", "blue")):
        ram.background = background
        features = collect_cached(ram, keep(ram, pixels), LABELS, batch=2)
        with torch.no_grad():
            output = ram(ram.preprocess.normalize(pixels), LABELS)
        assert features.shape == (7, 4, 3)
        region = output.region * ((4 + len(background)) if name == "paper" else 1)  # always with a column mass of 1
        close(features, torch.stack([output.image, region, output.best], -1))


def test_views_are_the_image_its_mirror_and_parts():
    ram, pixels = tiny_ram(visual_prompts=0, adapted_layers=1), pictures()
    cache = keep(ram, pixels, 4, seed=3, crop=0.7)
    assert len(cache) == 5
    assert cache.views == 4
    x = cache.streams.x
    assert x.shape == (4, 5, 17, 64)
    config = AugmentConfig(scale=(0.7, 1.0), ratio=(3 / 4, 4 / 3), blur=0.0, erasing=0.0)
    with torch.no_grad():
        mirrored = ram.region_set.stem(ram.backbone, ram.preprocess.normalize(pixels.flip(-1)))
        crops = augment(pixels, epoch_table(5, 3, 2), config, (), (32, 32))
        cropped = ram.region_set.stem(ram.backbone, ram.preprocess.normalize(crops))
    close(x[1], mirrored.x)
    close(x[2], cropped.x)
    assert (x[2] - x[3]).abs().max() > 0.01
    picked = cache.pick(torch.tensor([2, 0]), torch.tensor([4, 4]))
    assert torch.equal(picked.x, torch.stack([x[2, 4], x[0, 4]]))


def test_a_cache_is_made_anew_when_what_shaped_it_changes(monkeypatch: pytest.MonkeyPatch):
    """Not for settings further up, nor for other weights there."""
    made: list[int] = []
    monkeypatch.setattr(module, "cache_features", lambda *a: made.append(1) or cache_features(*a))
    store, shown = FeatureStore(), pictures()

    def get(ram: RAM, shown: torch.Tensor = shown, views: Views = ONE) -> int:
        made.clear()
        store.get("x", ram_stem(ram), shown, views)
        return len(made)

    assert get(tiny_ram()) == 1
    assert get(tiny_ram()) == get(tiny_ram(matcher="average", tau_region=0.5, prompts="none")) == 0
    for changes in (
        {"adapted_layers": 1},
        {"saa_layers": 1},
        {"tss": False},
        {"tss_input": "before"},
        {"pixels": "half"},
    ):
        assert get(tiny_ram(**changes, visual_prompts=0)) == 1, changes
    assert get(tiny_ram()) == 1
    assert get(tiny_ram(), views=Views(2)) == 1
    assert get(tiny_ram(), views=Views(2, seed=1)) == 1
    assert tiny_ram(resize="bilinear").preprocess.interpolation == "bilinear"
    assert get(tiny_ram(resize="bilinear")) == 1
    assert get(tiny_ram()) == 1
    assert get(tiny_ram(), shown.flip(-1)) == 1
    other = tiny_ram()
    with torch.no_grad():
        other.backbone.vision.blocks[0].fc1.weight.add_(0.01)
    assert get(tiny_ram()) == get(other) == 1


def test_taps_keep_their_order_beyond_ten_layers():
    from ramatch.modeling.backbone import Backbone, TowerConfig
    from ramatch.modeling.preprocess import Preprocess

    vision = TowerConfig(16, 12, 2, 16, patch=8, image=16, stem_norm=True)
    ram = RAM(Backbone(vision, None, 8, Preprocess((16, 16))), preset("ramatch", adapted_layers=12, visual_prompts=0))
    pixels = pictures(2, 16, 16)
    taps = ram.region_set.stem(ram.backbone, ram.preprocess.normalize(pixels)).taps
    kept = keep(ram, pixels).streams.taps
    assert len(kept) == 12
    for ours, theirs in zip(kept, taps, strict=True):
        close(ours[0], theirs)
    assert (taps[2] - taps[10]).abs().max() > 0.01


def test_fit_learns_and_repeats_itself():
    pixels, targets = pictures(16), torch.eye(4).repeat(4, 1)
    config = fast(epochs=30, batch_size=8, optim__lr=3e-3, optim__prompt_lr=0.02, optim__temperature_lr=1e-3)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(5)
        ram = tiny_ram()
        frozen = {n: p.clone() for n, p in ram.backbone.named_parameters()}
        kept = keep(ram, pixels, 2)
        first = ram.loss(ram(kept.pick(0, slice(None)), LABELS, targets), targets).item()
        log = fit_cached(CachedTask(ram, kept, targets, LABELS, config.replace(seed=seed)))
        last = ram.loss(ram(kept.pick(0, slice(None)), LABELS, targets), targets).item()
        assert last < 0.8 * first
        assert log["loss"][-1] < first
        assert log["tau"] == [ram.tau_global.item(), ram.tau_region.item()]
        assert all(torch.equal(p, frozen[n]) for n, p in ram.backbone.named_parameters())
        found.append(ram.adapters())
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])
    assert not all(torch.equal(found[0][n], found[2][n]) for n in found[0])


def test_the_weights_end_as_their_average():
    pixels, targets = pictures(8), torch.eye(4).repeat(2, 1)

    def run(ema: float) -> list[torch.Tensor]:
        """What learns, before each step and at the end."""
        torch.manual_seed(5)
        ram = tiny_ram()
        learning = [t for t in ram.adapters().values() if t.is_floating_point()]  # BatchNorm's statistics too
        trace: list[torch.Tensor] = []
        ram.register_forward_pre_hook(lambda *_: trace.append(torch.cat([t.flatten().clone() for t in learning])))
        config = fast(epochs=6, batch_size=4, optim__lr=1e-3, optim__ema_decay=ema)
        fit_cached(CachedTask(ram, keep(ram, pixels), targets, LABELS, config))
        return [*trace, torch.cat([t.flatten() for t in learning])]

    start, *steps = run(0.0)
    mean = start
    for step, now in enumerate(steps, start=1):
        decay = min(0.5, (1 + step) / (10 + step))  # the average starts short
        mean = decay * mean + (1 - decay) * now
    found = run(0.5)[-1]
    close(found, mean)
    assert (found - steps[-1]).abs().max() > 1e-4


def test_temperatures_stay_positive():
    """A plan as it is starts at a small temperature: steps that lead below nought would turn the scores round."""
    ram = tiny_ram(matcher="average", plan_scale="one", best_share=0.0, max_weight=0.0, tau_global=0.5, tau_region=0.5)
    kept = keep(ram, pictures())
    found = collect_cached(ram, kept, LABELS)[..., :2].mean(-1)
    easy = (found == found.amax(-1, keepdim=True)).float()  # the sharper the better
    rates = {"optim__lr": 0.0, "optim__prompt_lr": 0.0, "optim__temperature_lr": 1.0}
    config = fast(epochs=2, batch_size=5, loss="sigmoid", **rates)
    assert min(fit_cached(CachedTask(ram, kept, easy, LABELS, config))["tau"]) == pytest.approx(
        0.05
    )  # a tenth of where it started


def test_settings_are_checked():
    wrong = ({"epochs": 0}, {"batch_size": 0}, {"optim.lr": -1.0}, {"optim.ema_decay": 1.0}, {"loss": "hinge"})
    for change in (*wrong, {"focus": -1.0}, {"views": 0}):
        with pytest.raises(RamatchError, match=next(iter(change))):
            CachedConfig().replace(**change)
    config, ram_config = settings_from(
        ["epochs=4", "optim.lr=1e-4", "views=2", "tss=false", "tau_u=none", 'templates=["{}"]']
    )
    assert config == AdaptConfig().replace(epochs=4, views=2, **{"optim.lr": 1e-4})
    assert ram_config == preset("aligned-best", tss=False, tau_u=None, templates=("{}",))
    assert settings_from(["saa_layers=2"], "paper")[1] == preset("paper", saa_layers=2)
    for wrong_text in ("epochs", "speed=3", "epochs=many", "tss=perhaps", "matcher=magic"):
        with pytest.raises(RamatchError, match=wrong_text.split("=")[0]):
            settings_from([wrong_text])


def test_a_random_view_of_each_image_the_same_for_a_seed():
    ram, config = tiny_ram(), fast(batch_size=4)
    task = CachedTask(ram, keep(ram, pictures(10), 3), torch.zeros(10, 4), LABELS, config)
    first = [torch.stack(batch) for batch in task.batches()]
    assert [b.shape for b in first] == [(2, 4)] * 2
    assert all(torch.equal(a, torch.stack(b)) for a, b in zip(first, task.batches(), strict=True))
    views, rows = torch.cat(first, 1)
    assert len(set(rows.tolist())) == 8
    assert set(views.tolist()) == {0, 1, 2}
    task.sampler.advance(2)
    assert not torch.equal(first[0], torch.stack(next(iter(task.batches()))))


def test_the_last_input_of_tss_is_not_kept_twice():
    ram, pixels = tiny_ram("ramatch", visual_prompts=0, saa_layers=0), pictures()
    kept = keep(ram, pixels, views=2).streams
    assert kept.taps[-1].data_ptr() == kept.x[:, :, 1:].data_ptr()
    assert len({tap.untyped_storage().data_ptr() for tap in kept.taps}) == len(kept.taps) == 2
    before = keep(tiny_ram("ramatch", visual_prompts=0, tss_input="before"), pixels).streams
    assert all(tap.untyped_storage().data_ptr() != before.x.untyped_storage().data_ptr() for tap in before.taps)
