"""Training from kept stems equals training on pixels; views; mosaics."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from align_helpers import put_squares
from tiny_models import close, tiny_ram
from train_tiny import LABELS, TARGETS, pictures

from ramatch.config import preset
from ramatch.data import read_annotations
from ramatch.data.views import mosaics, plain_views, random_views
from ramatch.errors import RamatchError
from ramatch.modeling.ram import RAM
from ramatch.train.adapt import ADAPT, settings_from
from ramatch.train.align_run import load_pixels
from ramatch.train.kept import FitConfig, collect, fit, keep, with_mosaics

# (which parts learn decides where the stem ends)
VARIANTS = {
    "ramatch": {}, "no visual prompts": {"visual_prompts": 0}, "no tss": {"tss": False}, "final patches": {"saa_layers": 0},
    "taps before": {"tss_input": "before", "visual_prompts": 0}, "all layers": {"saa_layers": 4, "adapted_layers": 4},
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- kept stems


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
def test_collect_equals_recognising_the_pixels(name):
    ram, pixels = tiny_ram(name), pictures(7)
    for background in ((), ("red", "blue")):
        ram.background = background
        features = collect(ram, keep(ram, pixels, batch=3), LABELS, batch=2)
        with torch.no_grad():
            output = ram(ram.preprocess.normalize(pixels), LABELS)
        assert features.shape == (7, 4, 3)
        region = output.region * ((4 + len(background)) if name == "paper" else 1)  # always with a column mass of 1
        close(features, torch.stack([output.image, region, output.best], -1))


def test_views_are_the_image_its_mirror_and_crops():
    ram, pixels = tiny_ram(visual_prompts=0, adapted_layers=1), pictures()
    kept = keep(ram, pixels, 4, seed=3, crop=0.7)
    assert len(kept) == 5
    assert kept.x.shape == (4, 5, 17, 64)
    with torch.no_grad():
        mirrored = ram.region_set.stem(ram.backbone, ram.preprocess.normalize(pixels.flip(-1)))
        crops = random_views(pixels, (32, 32), torch.Generator().manual_seed(3), crop=0.7)
        cropped = ram.region_set.stem(ram.backbone, ram.preprocess.normalize(crops))
    close(kept.x[1], mirrored.x)
    close(kept.x[2], cropped.x)
    assert (kept.x[2] - kept.x[3]).abs().max() > 0.01
    again = keep(ram, pixels, 4, seed=3, crop=0.7, batch=2)
    close(again.x[:2], kept.x[:2])
    some = kept.subset(torch.tensor([3, 1]))
    assert torch.equal(some.x, kept.x[:, [3, 1]])
    assert torch.equal(some.taps[0], kept.taps[0][:, [3, 1]])
    picked = kept.pick(torch.tensor([2, 0]), torch.tensor([4, 4]))
    assert torch.equal(picked.x, torch.stack([kept.x[2, 4], kept.x[0, 4]]))


def test_taps_keep_their_order_beyond_ten_layers():
    from ramatch.modeling.backbone import Backbone, TowerConfig
    from ramatch.modeling.preprocess import Preprocess

    vision = TowerConfig(16, 12, 2, 16, patch=8, image=16, stem_norm=True)
    ram = RAM(Backbone(vision, None, 8, Preprocess((16, 16))), preset("ramatch", adapted_layers=12, visual_prompts=0))
    pixels = pictures(2, 16, 16)
    taps = ram.region_set.stem(ram.backbone, ram.preprocess.normalize(pixels)).taps
    kept = keep(ram, pixels).taps
    assert len(kept) == 12
    for ours, theirs in zip(kept, taps, strict=True):
        close(ours[0], theirs)
    assert (taps[2] - taps[10]).abs().max() > 0.01


def test_fit_learns_and_repeats_itself():
    pixels, targets = pictures(16), torch.eye(4).repeat(4, 1)
    config = FitConfig(epochs=30, batch_size=8, lr=3e-3, lr_prompts=0.02, lr_tau=1e-3)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(5)
        ram = tiny_ram()
        frozen = {n: p.clone() for n, p in ram.backbone.named_parameters()}
        kept = keep(ram, pixels, 2)
        first = ram.loss(ram(kept.pick(0, slice(None)), LABELS, targets), targets).item()
        log = fit(ram, kept, targets, LABELS, config, seed)
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
        learning = [p for p in ram.parameters() if p.requires_grad]
        trace, inner = [], ram.loss

        def loss(*arguments):
            trace.append(torch.cat([p.detach().flatten().clone() for p in learning]))
            return inner(*arguments)

        ram.loss = loss  # type: ignore[method-assign]
        fit(ram, keep(ram, pixels), targets, LABELS, FitConfig(epochs=6, batch_size=4, lr=1e-3, ema=ema), 0)
        return [*trace, torch.cat([p.detach().flatten() for p in learning])]

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
    found = collect(ram, kept, LABELS)[..., :2].mean(-1)
    easy = (found == found.amax(-1, keepdim=True)).float()  # the sharper the better
    config = FitConfig(epochs=2, batch_size=5, lr=0.0, lr_prompts=0.0, lr_tau=1.0, loss="sigmoid")
    assert min(fit(ram, kept, easy, LABELS, config, 0)["tau"]) == pytest.approx(0.05)  # a tenth of where it started


def test_settings_of_a_fit_are_checked():
    for wrong in ({"epochs": 0}, {"batch_size": 0}, {"lr": -1.0}, {"ema": 1.0}, {"loss": "hinge"}, {"focus": -1.0}):
        with pytest.raises(RamatchError, match=next(iter(wrong))):
            FitConfig(**wrong)
    ram = tiny_ram()
    with pytest.raises(RamatchError, match="1 views were kept"):
        fit(ram, keep(ram, pictures()), TARGETS, LABELS, FitConfig(views=(1,)), 0)
    config, ram_config = settings_from(
        ["epochs=4", "lr=1e-4", "views=[0, 1]", "tss=false", "tau_u=none", 'templates=["{}"]']
    )
    assert config == replace(ADAPT, epochs=4, lr=1e-4, views=(0, 1))
    assert ram_config == preset("aligned", tss=False, tau_u=None, templates=("{}",))
    assert settings_from(["saa_layers=2"], "paper")[1] == preset("paper", saa_layers=2)
    for wrong_text in ("epochs", "speed=3", "epochs=many", "tss=perhaps", "matcher=magic"):
        with pytest.raises(RamatchError, match=wrong_text.split("=")[0]):
            settings_from([wrong_text])


def test_pixels_of_annotations(tmp_path):
    data = put_squares(tmp_path / "data", 6)
    annotations = read_annotations(data / "labels.json")
    pixels = load_pixels(annotations.records, (32, 32))
    assert pixels.shape == (3, 3, 32, 32)
    assert pixels.dtype == torch.uint8
    expected = np.stack([np.asarray(Image.open(data / "images" / f"{i:03}.png")) for i in (0, 2, 4)])
    assert torch.equal(pixels, torch.from_numpy(expected).permute(0, 3, 1, 2))


# ---------------------------------------------------------------------------------------------------------- views


@pytest.mark.parametrize("size", [(32, 32), (20, 48), (64, 40)])
def test_a_plain_view_is_a_resize(size):
    smooth = Image.fromarray(pictures(1, 6, 5)[0].permute(1, 2, 0).numpy()).resize((40, 36), Image.Resampling.BICUBIC)
    tensor = torch.from_numpy(np.asarray(smooth).copy()).permute(2, 0, 1)[None]
    view = plain_views(tensor, size)
    expected = torch.from_numpy(np.asarray(smooth.resize(size[::-1], Image.Resampling.BICUBIC)).copy()).permute(2, 0, 1)
    assert view.shape == (1, 3, *size)
    assert (view[0] - expected.float()).abs().max() <= 1.01  # Pillow rounds to whole numbers on the way
    assert torch.equal(plain_views(tensor, size, flip=True), view.flip(-1))
    assert torch.equal(plain_views(tensor, (36, 40)), tensor.float())


def test_random_views_follow_their_generator():
    """A picture whose red is x and whose green is y tells where each pixel of a view came from."""
    ramp = torch.linspace(0, 255, 64)
    image = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64), torch.zeros(64, 64)]).to(torch.uint8)
    images = image.expand(40, -1, -1, -1)
    views = random_views(images, (32, 24), torch.Generator().manual_seed(0), crop=0.4)
    assert views.shape == (40, 3, 32, 24)
    assert views.min() >= 0
    assert views.max() <= 255
    assert torch.equal(views, random_views(images, (32, 24), torch.Generator().manual_seed(0), crop=0.4))
    share, ratio, at_x, _, mirror = torch.rand(5, 40, generator=torch.Generator().manual_seed(0))
    flipped = views[:, 0, 16, 0] > views[:, 0, 16, -1]
    assert torch.equal(flipped, mirror < 0.5)
    assert 10 < int(flipped.sum()) < 30
    wide = (views[:, 0, 16, -1] - views[:, 0, 16, 0]).abs() / 255 * 24 / 23  # share of the width that is seen
    high = (views[:, 1, -1, 12] - views[:, 1, 0, 12]) / 255 * 32 / 31
    aspect = torch.exp((2 * ratio - 1) * np.log(4 / 3))
    area = 0.4 + 0.6 * share
    assert torch.allclose(wide, (area * aspect).sqrt().clamp(max=1), atol=0.03)
    assert torch.allclose(high, (area / aspect).sqrt().clamp(max=1), atol=0.03)
    centre = (views[:, 0].amin((1, 2)) + views[:, 0].amax((1, 2))) / 510
    expected = 0.5 + (at_x - 0.5) * (1 - (area * aspect).sqrt().clamp(max=1))
    assert torch.allclose(centre, expected, atol=0.03)
    whole = random_views(images[:4], (64, 64), torch.Generator().manual_seed(1), crop=1.0)
    assert (whole[:, 1, -1, 0] - whole[:, 1, 0, 0] > 255 * 0.8).all()


def test_the_last_input_of_tss_is_not_kept_twice():
    ram, pixels = tiny_ram("ramatch", visual_prompts=0, saa_layers=0), pictures()
    kept = keep(ram, pixels, views=2)
    assert kept.taps[-1].data_ptr() == kept.x[:, :, 1:].data_ptr()
    assert len({tap.untyped_storage().data_ptr() for tap in kept.taps}) == len(kept.taps) == 2
    before = keep(tiny_ram("ramatch", visual_prompts=0, tss_input="before"), pixels)
    assert all(tap.untyped_storage().data_ptr() != before.x.untyped_storage().data_ptr() for tap in before.taps)


# ------------------------------------------------------------------------------------------------------- mosaics


def test_a_mosaic_shows_its_four_images_in_its_quarters():
    flat = torch.arange(0, 250, 10, dtype=torch.uint8)[:, None, None, None].expand(25, 3, 20, 30).contiguous()
    shown, sources = mosaics(flat, 300, (16, 13), torch.Generator().manual_seed(0))
    assert shown.shape == (300, 3, 16, 13)
    assert sources.shape == (300, 4)
    assert len(set(sources.flatten().tolist())) == 25
    for place, quarter in enumerate((shown[..., :8, :6], shown[..., :8, 6:], shown[..., 8:, :6], shown[..., 8:, 6:])):
        assert torch.equal(quarter, (10 * sources[:, place]).to(torch.uint8)[:, None, None, None].expand_as(quarter))
    again, same = mosaics(flat, 300, (16, 13), torch.Generator().manual_seed(0))
    assert torch.equal(again, shown)
    assert torch.equal(same, sources)


def test_what_a_mosaic_is_known_to_show():
    """Present if one of the four shows it, absent only if all four are known not to."""
    pixels, rows = pictures(40, 16, 16), torch.tensor([[1, 0, -1], [0, 0, 0], [0, -1, 0], [0, 0, -1]]).repeat(10, 1)
    joined, targets = with_mosaics(pixels, rows.float(), 1.5, (16, 16), seed=3)
    assert (len(joined), targets.dtype) == (100, torch.float32)
    assert torch.equal(joined[:40], pixels)
    assert torch.equal(targets[:40], rows.float())
    _, sources = mosaics(pixels, 60, (16, 16), torch.Generator().manual_seed(3))
    for found, four in zip(targets[40:].tolist(), sources.tolist(), strict=True):
        known = [[int(rows[i, label]) for i in four] for label in range(3)]
        assert found == [1 if 1 in values else -1 if -1 in values else 0 for values in known]
    assert {value for row in targets[40:].tolist() for value in row} == {1.0, 0.0, -1.0}
    assert with_mosaics(pixels, rows, 0.0, (16, 16)) == (pixels, rows)
    resized, _ = with_mosaics(pixels, rows, 0.1, (8, 8))
    assert resized.shape == (44, 3, 8, 8)
    with pytest.raises(RamatchError, match="'mosaics' must not be negative"):
        FitConfig(mosaics=-0.5)
