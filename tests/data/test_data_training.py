"""Dataset, transforms and sampler: shapes, seeds, and resuming exactly."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from data_helpers import put_json
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from ramatch.data import (
    Annotations,
    Draw,
    ImageLabelDataset,
    Normalize,
    ResumableSampler,
    eval_transform,
    read_annotations,
    sample_seed,
    train_transform,
)
from ramatch.errors import RamatchError


@pytest.fixture
def ten(tmp_path: Path) -> Annotations:
    rng = np.random.default_rng(0)
    for i in range(10):
        Image.fromarray(rng.integers(0, 255, (24, 20, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    images = [[f"{i}.png", ["even"] if i % 2 == 0 else ["odd", "third"][: 1 + (i % 3 == 0)]] for i in range(10)]
    return read_annotations(put_json(tmp_path / "x.json", {"classes": ["even", "odd", "third"], "images": images}))


# --------------------------------------------------------------------------------------------------- dataset


def test_dataset_item(ten: Annotations) -> None:
    dataset = ImageLabelDataset(ten, eval_transform((16, 8)))
    image, target, index = dataset[3]
    assert image.shape == (3, 16, 8)
    assert image.dtype == torch.float32
    assert target.tolist() == [0, 1, 1]
    assert index == 3
    assert len(dataset) == 10
    targets = torch.stack([dataset[i][1] for i in range(10)])
    assert torch.equal(targets.bool(), ten.targets())


def test_unreadable_image_is_named(ten: Annotations, tmp_path: Path) -> None:
    (tmp_path / "4.png").write_bytes(b"junk")
    with pytest.raises(RamatchError, match=r"4\.png"):
        ImageLabelDataset(ten)[4]
    loader = DataLoader(ImageLabelDataset(ten, eval_transform(8)), batch_size=10, num_workers=1)
    with pytest.raises(RamatchError, match=r"4\.png"):  # also through a worker process
        next(iter(loader))


def test_augmentation_depends_on_seed_epoch_and_item_only(ten: Annotations) -> None:
    dataset = ImageLabelDataset(ten, train_transform(16, as_uint8=True), seed=5)
    torch.manual_seed(1)
    first = dataset[Draw(2, 7)][0]
    torch.rand(10)
    assert torch.equal(dataset[Draw(2, 7)][0], first)
    assert not torch.equal(dataset[Draw(2, 8)][0], first)
    other = ImageLabelDataset(ten, train_transform(16, as_uint8=True), seed=6)
    assert not torch.equal(other[Draw(2, 7)][0], first)


def test_drawing_leaves_the_global_generator_alone(ten: Annotations) -> None:
    dataset = ImageLabelDataset(ten, train_transform(16), seed=5)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    dataset[Draw(0, 0)]
    assert torch.equal(torch.rand(4), expected)


def run(annotations: Annotations, sampler: ResumableSampler, workers: int, batches: int) -> list[torch.Tensor]:
    """Draw batches as a training loop does, through worker processes that fetch ahead."""
    dataset = ImageLabelDataset(annotations, train_transform(16, as_uint8=True), seed=sampler.seed)
    seen: list[torch.Tensor] = []
    while len(seen) < batches:
        for images, _, _ in DataLoader(dataset, batch_sampler=sampler, num_workers=workers):
            seen.append(images)
            sampler.advance()
            if len(seen) == batches:
                break
    return seen


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_resumed_run_is_bit_identical_whatever_the_workers(ten: Annotations, stop: int) -> None:
    whole = run(ten, ResumableSampler(10, seed=1, batch_size=3), workers=0, batches=8)
    sampler = ResumableSampler(10, seed=1, batch_size=3)
    before = run(ten, sampler, workers=2, batches=stop)
    state = pickle.loads(pickle.dumps(sampler.state_dict()))
    resumed = ResumableSampler(10, seed=1, batch_size=3)
    resumed.load_state_dict(state)
    after = run(ten, resumed, workers=1, batches=8 - stop)
    assert all(torch.equal(a, b) for a, b in zip(whole, before + after, strict=True))


# --------------------------------------------------------------------------------------------------- sampler


def test_every_epoch_is_another_permutation() -> None:
    sampler = ResumableSampler(20, seed=0, batch_size=4)
    epochs = []
    for epoch in range(3):
        batches = list(sampler)
        assert len(batches) == len(sampler) == sampler.batches_per_epoch == 5
        assert {d.epoch for b in batches for d in b} == {epoch}
        epochs.append([d.item for b in batches for d in b])
        assert sorted(epochs[-1]) == list(range(20))
        sampler.advance(5)
    assert len({tuple(e) for e in epochs}) == 3


def test_drop_last() -> None:
    assert [len(b) for b in ResumableSampler(10, batch_size=4, drop_last=True)] == [4, 4]
    kept = ResumableSampler(10, batch_size=4, drop_last=False)
    assert [len(b) for b in kept] == [4, 4, 2]
    kept.advance(3)
    assert (kept.epoch, kept.position) == (1, 0)


def test_without_shuffle() -> None:
    sampler = ResumableSampler(5, batch_size=2, drop_last=False, shuffle=False)
    assert [[d.item for d in b] for b in sampler] == [[0, 1], [2, 3], [4]]


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 8),
    world=st.integers(1, 4),
    skip=st.integers(0, 12),
    drop_last=st.booleans(),
)
def test_ranks_together_see_what_one_process_sees(
    length: int, batch: int, world: int, skip: int, drop_last: bool
) -> None:
    if drop_last and length < batch * world:
        return
    alone = ResumableSampler(length, 3, batch * world, drop_last=drop_last)
    ranks = [ResumableSampler(length, 3, batch, r, world, drop_last) for r in range(world)]
    for sampler in [alone, *ranks]:
        sampler.advance(skip)
    assert len({(s.epoch, s.position, len(s)) for s in [alone, *ranks]}) == 1
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert len({len(p) for p in parts}) == 1  # every rank takes part, equally
        together = [d for p in parts for d in p]
        assert together[: len(whole)] == whole
        assert len(together) - len(whole) < world


@settings(max_examples=60, deadline=None)
@given(length=st.integers(2, 40), batch=st.integers(1, 5), stop=st.integers(0, 30), drop_last=st.booleans())
def test_stopping_anywhere_changes_nothing(length: int, batch: int, stop: int, drop_last: bool) -> None:
    batch = min(batch, length)

    def stream(sampler: ResumableSampler, count: int) -> list[list[Draw]]:
        out: list[list[Draw]] = []
        while len(out) < count:
            for b in sampler:
                out.append(b)
                sampler.advance()
                if len(out) == count:
                    break
        return out

    whole = stream(ResumableSampler(length, 9, batch, drop_last=drop_last), stop + 5)
    first = ResumableSampler(length, 9, batch, drop_last=drop_last)
    begun = stream(first, stop)
    second = ResumableSampler(length, 9, batch, drop_last=drop_last)
    second.load_state_dict(first.state_dict())
    assert begun + stream(second, 5) == whole


def test_resume_with_another_world_size_continues_at_the_same_sample() -> None:
    two = ResumableSampler(40, 0, 4, rank=0, world_size=2)
    two.advance(2)
    one = ResumableSampler(40, 0, 4)
    one.load_state_dict(two.state_dict())
    rest = [d.item for b in one for d in b]
    assert sorted(rest + one.order(0)[:16].tolist()) == list(range(40))


def test_sampler_refuses_what_cannot_work() -> None:
    for wrong in ({"length": 0}, {"length": 4, "batch_size": 0}, {"length": 9, "rank": 2, "world_size": 2}):
        with pytest.raises(RamatchError):
            ResumableSampler(**wrong)
    with pytest.raises(RamatchError, match="do not fill one batch"):
        ResumableSampler(4, batch_size=8)
    other = ResumableSampler(11, seed=0, batch_size=2)
    with pytest.raises(RamatchError, match="length 10, this one 11"):
        other.load_state_dict(ResumableSampler(10, seed=0, batch_size=2).state_dict())


def test_sample_seeds_differ_and_stay() -> None:
    seeds = {sample_seed(s, e, i) for s in range(4) for e in range(4) for i in range(50)}
    assert len(seeds) == 800
    assert sample_seed(1, 2, 3) == 6520558355739401531  # must never change: resumed runs depend on it


# ------------------------------------------------------------------------------------------------ transforms


@pytest.mark.parametrize("crop", ["resized", "plain", "none"])
@pytest.mark.parametrize("size", [16, (24, 12)])
def test_train_transform_shapes(crop: str, size: int | tuple[int, int]) -> None:
    picture = Image.new("RGB", (50, 30), (255, 0, 0))
    expected = (16, 16) if size == 16 else (24, 12)
    for as_uint8 in (False, True):
        image = pickle.loads(pickle.dumps(train_transform(size, crop=crop, as_uint8=as_uint8)))(picture)
        assert image.shape == (3, *expected)
        assert image.dtype == (torch.uint8 if as_uint8 else torch.float32)


def test_uint8_and_float_variants_agree() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8))
    torch.manual_seed(4)
    floats = train_transform(16, erasing=1.0, blur=1.0)(picture)
    torch.manual_seed(4)
    bytes_ = train_transform(16, erasing=1.0, blur=1.0, as_uint8=True)(picture)
    assert torch.allclose(Normalize()(bytes_[None])[0], floats)
    assert torch.allclose(Normalize()(eval_transform(16, as_uint8=True)(picture)), eval_transform(16)(picture))


def test_each_augmentation_does_its_work() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8))
    quiet = {"crop": "none", "flip": 0.0, "blur": 0.0, "erasing": 0.0, "as_uint8": True}
    plain = train_transform(32, **quiet)(picture)
    assert torch.equal(plain, eval_transform(32, as_uint8=True)(picture))
    assert torch.equal(train_transform(32, **{**quiet, "flip": 1.0})(picture), plain.flip(-1))
    assert train_transform(32, **{**quiet, "blur": 1.0})(picture).float().std() < plain.float().std()
    erased = train_transform(32, mean=(0.5, 0.5, 0.5), **{**quiet, "erasing": 1.0})(picture)
    changed = (erased != plain).any(0)
    assert 0.01 < changed.float().mean() < 0.3
    assert erased[:, changed].unique().tolist() == [128]


def test_whole_picture_crop_equals_evaluation() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 24, 3), dtype=np.uint8))
    settings_ = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": 0.0, "blur": 0.0, "erasing": 0.0}
    assert torch.equal(train_transform(16, **settings_)(picture), eval_transform(16)(picture))


def test_crop_shows_a_part_of_the_asked_area() -> None:
    columns = np.tile(np.arange(100, dtype=np.uint8)[None, :, None], (100, 1, 3))
    transform = train_transform(32, scale=(0.25, 0.25), ratio=(1, 1), flip=0, blur=0, erasing=0, as_uint8=True)
    starts = set()
    for _ in range(20):
        row = transform(Image.fromarray(columns))[0, 0].int()
        assert 45 <= row[-1] - row[0] <= 50  # half the width
        starts.add(int(row[0]))
    assert len(starts) > 5


def test_eval_transform_aspect() -> None:
    picture = Image.new("RGB", (40, 10), (0, 0, 0))
    picture.paste((255, 255, 255), (15, 0, 25, 10))  # the middle quarter
    squashed = eval_transform(16, as_uint8=True)(picture)[0, 8]
    kept = eval_transform(16, keep_aspect=True, as_uint8=True)(picture)[0, 8]
    assert (squashed > 128).sum() == 4
    assert (kept > 128).sum() == 16
    tall = eval_transform((20, 7), keep_aspect=True)(picture)
    assert tall.shape == (3, 20, 7)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(RamatchError, match="size"):
        eval_transform((1, 2, 3))
    with pytest.raises(RamatchError, match="size"):
        eval_transform(0)
    with pytest.raises(RamatchError, match="interpolation"):
        eval_transform(8, interpolation="lanczos9")
    with pytest.raises(RamatchError, match="crop"):
        train_transform(8, crop="wild")
    with pytest.raises(RamatchError, match="scale"):
        train_transform(8, scale=(0.5, 2.0))


def test_normalize_matches_the_formula() -> None:
    image = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.3, 0.4])
    expected = (image / 255 - mean[:, None, None]) / std[:, None, None]
    assert torch.allclose(Normalize(mean.tolist(), std.tolist())(image), expected, atol=1e-6)
