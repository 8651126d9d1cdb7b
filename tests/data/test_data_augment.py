"""The augmentation pipeline, parts cut from files or on the device, mosaics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from ramatch.data.augment import (
    AugmentConfig,
    Normalize,
    augment,
    crop_box,
    epoch_table,
    mosaics,
    resize_batch,
    with_mosaics,
)
from ramatch.errors import RamatchError
from ramatch.modeling.preprocess import Preprocess
from ramatch.train.config import CachedConfig


def pictures(n: int = 6, h: int = 24, w: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (n, 3, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


OFF = {"crop": "none", "flip": 0.0, "blur": 0.0, "erasing": 0.0}


def test_augmentation_of_an_image_depends_on_nothing_else() -> None:
    x, draws = pictures(), epoch_table(6, seed=3, epoch=2)
    whole = augment(x, draws, AugmentConfig(), (1, 2, 3), (24, 16))
    parts = torch.cat(
        [augment(x[i : i + 2], draws[i : i + 2], AugmentConfig(), (1, 2, 3), (24, 16)) for i in (0, 2, 4)]
    )
    torch.testing.assert_close(whole, parts)
    assert not torch.equal(epoch_table(6, 3, 2), epoch_table(6, 3, 3))
    assert torch.equal(epoch_table(6, 3, 2), draws)
    assert whole.shape == (6, 3, 24, 16)
    assert whole.min() >= 0
    assert whole.max() <= 255 + 1e-3


def test_each_augmentation_alone() -> None:
    x, draws = pictures(), epoch_table(6, 0, 0)
    same = augment(x, draws, AugmentConfig(**OFF), (0, 0, 0), (24, 16))
    assert torch.equal(same, x.float())
    flipped = augment(x, draws, AugmentConfig(**{**OFF, "flip": 1.0}), (0, 0, 0), (24, 16))
    assert torch.equal(flipped, x.float().flip(-1))
    whole = AugmentConfig(**{**OFF, "crop": "resized", "scale": (1.0, 1.0), "ratio": (1.0, 1.0)})
    torch.testing.assert_close(augment(x, draws, whole, (0, 0, 0), (24, 16)), x.float(), atol=1e-2, rtol=0)
    mirrored = augment(x, draws, whole.replace(flip=1.0), (0, 0, 0), (24, 16))
    torch.testing.assert_close(mirrored, x.float().flip(-1), atol=1e-2, rtol=0)
    blurred = augment(x, draws, AugmentConfig(**{**OFF, "blur": 1.0, "blur_sigma": (1.0, 1.0)}), (0, 0, 0), (24, 16))
    from torchvision.transforms.v2.functional import gaussian_blur

    torch.testing.assert_close(blurred, gaussian_blur(x.float(), [9, 9], [1.0, 1.0]), atol=1e-2, rtol=0)
    erased = augment(x, draws, AugmentConfig(**{**OFF, "erasing": 1.0}), (7.0, 8.0, 9.0), (24, 16))
    changed = (erased != x.float()).any(1)
    shares = changed.flatten(1).float().mean(1)
    assert ((shares > 0.005) & (shares < 0.3)).all()
    assert (erased.permute(0, 2, 3, 1)[changed] == torch.tensor([7.0, 8.0, 9.0])).all()


def test_a_crop_is_a_part_of_the_picture() -> None:
    """Of a ramp from left to right, a crop is a piece of the ramp: still rising evenly, with a smaller range."""
    x = torch.linspace(0, 255, 64).to(torch.uint8).expand(8, 3, 64, 64)
    config = AugmentConfig(**{**OFF, "crop": "resized", "scale": (0.25, 0.25), "ratio": (1.0, 1.0)})
    out = augment(x, epoch_table(8, 0, 0), config, (0, 0, 0), (64, 64))
    inner = out[:, 0, 32, 4:-4]
    assert (inner.diff(dim=-1) >= -0.5).all()
    span = inner[:, -1] - inner[:, 0]
    torch.testing.assert_close(span, torch.full_like(span, 255 * 0.5 * 55 / 64), atol=6, rtol=0)
    assert inner[:, 0].std() > 5, "crops lie in different places"


def test_normalize_matches_the_formula() -> None:
    image = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    expected = (image / 255 - mean[:, None, None]) / std[:, None, None]
    assert torch.allclose(Normalize(mean.tolist(), std.tolist())(image), expected, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- views


@pytest.mark.parametrize("size", [(32, 32), (20, 48), (64, 40)])
def test_a_plain_view_is_a_resize(size):
    smooth = Image.fromarray(pictures(1, 6, 5)[0].permute(1, 2, 0).numpy()).resize((40, 36), Image.Resampling.BICUBIC)
    tensor = torch.from_numpy(np.asarray(smooth).copy()).permute(2, 0, 1)[None]
    view = resize_batch(tensor, size)
    expected = torch.from_numpy(np.asarray(smooth.resize(size[::-1], Image.Resampling.BICUBIC)).copy()).permute(2, 0, 1)
    assert view.shape == (1, 3, *size)
    assert (view[0] - expected.float()).abs().max() <= 1.01  # Pillow rounds to whole numbers on the way
    assert torch.equal(resize_batch(tensor, size, flip=True), view.flip(-1))
    assert torch.equal(resize_batch(tensor, (36, 40)), tensor.float())


def test_parts_follow_their_table() -> None:
    """A picture whose red is x and whose green is y tells where a pixel came from; on the device as from the file."""
    ramp = torch.linspace(0, 255, 64)
    image = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64), torch.zeros(64, 64)]).to(torch.uint8)
    config = AugmentConfig(scale=(0.4, 1.0), ratio=(3 / 4, 4 / 3), blur=0.0, erasing=0.0)
    draws = epoch_table(40, 0, 0)
    picture, preprocess = Image.fromarray(image.permute(1, 2, 0).numpy()), Preprocess((32, 24))
    cut = torch.stack([preprocess.resize(picture, crop_box(row, config)) for row in draws])
    share, ratio, at_x, _, mirror = draws.T[:5]
    aspect, area = torch.exp((2 * ratio - 1) * np.log(4 / 3)), 0.4 + 0.6 * share
    for views in (augment(image.expand(40, -1, -1, -1), draws, config, (), (32, 24)), augment(cut, draws, config, ())):
        assert views.shape == (40, 3, 32, 24)
        assert views.min() >= 0
        assert views.max() <= 255
        flipped = views[:, 0, 16, 0] > views[:, 0, 16, -1]
        assert torch.equal(flipped, mirror < 0.5)
        assert 10 < int(flipped.sum()) < 30
        wide = (views[:, 0, 16, -1] - views[:, 0, 16, 0]).abs() / 255 * 24 / 23  # share of the width that is seen
        high = (views[:, 1, -1, 12] - views[:, 1, 0, 12]) / 255 * 32 / 31
        assert torch.allclose(wide, (area * aspect).sqrt().clamp(max=1), atol=0.03)
        assert torch.allclose(high, (area / aspect).sqrt().clamp(max=1), atol=0.03)
        center = (views[:, 0].amin((1, 2)) + views[:, 0].amax((1, 2))) / 510
        expected = 0.5 + (at_x - 0.5) * (1 - (area * aspect).sqrt().clamp(max=1))
        assert torch.allclose(center, expected, atol=0.03)
    assert crop_box(draws[0], AugmentConfig(crop="none")) is None
    left, top, right, bottom = crop_box(draws[0], AugmentConfig(crop="plain", margin=0.25))
    assert right - left == pytest.approx(0.8)
    assert bottom - top == pytest.approx(0.8)
    assert 0 <= left <= 0.2
    assert 0 <= top <= 0.2


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
        CachedConfig(mosaics=-0.5)
