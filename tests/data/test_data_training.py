"""Dataset, loader, decoding and sampler: shapes, seeds, and resuming exactly."""

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

from ramatch.data import (
    Annotations,
    Draw,
    ImageCache,
    ImageDataset,
    ImageLoader,
    ResumableSampler,
    decode_all,
    read_annotations,
    sample_seed,
)
from ramatch.data.augment import AugmentConfig
from ramatch.errors import RamatchError
from ramatch.modeling.preprocess import Preprocess


@pytest.fixture
def ten(tmp_path: Path) -> Annotations:
    rng = np.random.default_rng(0)
    for i in range(10):
        Image.fromarray(rng.integers(0, 255, (24, 20, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    images = [[f"{i}.png", ["even"] if i % 2 == 0 else ["odd", "third"][: 1 + (i % 3 == 0)]] for i in range(10)]
    return read_annotations(put_json(tmp_path / "x.json", {"classes": ["even", "odd", "third"], "images": images}))


# --------------------------------------------------------------------------------------------------- dataset


SMALL = Preprocess((16, 8))


def test_dataset_item(ten: Annotations) -> None:
    dataset = ImageDataset(ten.records, SMALL)
    image, index = dataset[3]
    assert image.shape == (3, 16, 8)
    assert image.dtype == torch.uint8
    assert torch.equal(image, SMALL.resize(ten.records[3].load()))
    assert index == 3
    assert len(dataset) == 10


def test_unreadable_image_is_named(ten: Annotations, tmp_path: Path) -> None:
    (tmp_path / "4.png").write_bytes(b"junk")
    with pytest.raises(RamatchError, match=r"4\.png"):
        ImageDataset(ten.records, SMALL)[4]
    for workers in (0, 1):  # also through a worker process
        loader = ImageLoader(ImageDataset(ten.records, SMALL), batch_size=10, workers=workers)
        with pytest.raises(RamatchError, match=r"4\.png.*ramatch data check") as found:
            next(iter(loader))
        assert "\n" not in str(found.value)


def test_a_whole_set_is_decoded_in_order_and_once(ten: Annotations, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.stack([SMALL.resize(r.load()) for r in ten.records])
    assert torch.equal(decode_all(ten.records, SMALL), expected)
    monkeypatch.setattr("ramatch.data.decode.FEW", 3)  # with worker processes
    assert torch.equal(decode_all(ten.records, SMALL, workers=2), expected)
    monkeypatch.setattr("ramatch.data.decode.FEW", 100)
    decoded: list[str] = []
    load = type(ten.records[0]).load
    monkeypatch.setattr(type(ten.records[0]), "load", lambda self, *a: decoded.append(self.key) or load(self, *a))
    cache = ImageCache(1)
    assert torch.equal(cache.stack(ten.records[2:5], SMALL, progress=False), expected[2:5])
    assert torch.equal(cache.stack(ten.records, SMALL, progress=False), expected)
    assert len(decoded) == len(set(decoded)) == 10
    bilinear = cache.stack(ten.records, Preprocess((16, 8), interpolation="bilinear"), progress=False)
    assert not torch.equal(bilinear, expected)


def test_pictures_are_resized_as_the_model_says(ten: Annotations) -> None:
    picture = ten.records[0].load()
    for name, resampling in (("bicubic", Image.Resampling.BICUBIC), ("bilinear", Image.Resampling.BILINEAR)):
        expected = torch.from_numpy(np.array(picture.resize((8, 16), resampling))).permute(2, 0, 1)
        assert torch.equal(decode_all(ten.records[:1], Preprocess((16, 8), interpolation=name))[0], expected)
        half = picture.resize((8, 16), resampling, (5, 0, 15, 24))
        found = Preprocess((16, 8), interpolation=name).resize(picture, (0.25, 0.0, 0.75, 1.0))
        assert torch.equal(found, torch.from_numpy(np.array(half)).permute(2, 0, 1))


def test_augmentation_depends_on_seed_epoch_and_item_only(ten: Annotations) -> None:
    dataset = ImageDataset(ten.records, SMALL, augment=AugmentConfig(), seed=5)
    torch.manual_seed(1)
    first = dataset[Draw(2, 7)][0]
    torch.rand(10)
    assert torch.equal(dataset[Draw(2, 7)][0], first)
    assert not torch.equal(dataset[Draw(2, 8)][0], first)
    other = ImageDataset(ten.records, SMALL, augment=AugmentConfig(), seed=6)
    assert not torch.equal(other[Draw(2, 7)][0], first)
    plain = ImageDataset(ten.records, SMALL, augment=AugmentConfig(crop="none"), seed=5)
    assert torch.equal(plain[Draw(2, 7)][0], plain[2][0])


def test_drawing_leaves_the_global_generator_alone(ten: Annotations) -> None:
    dataset = ImageDataset(ten.records, SMALL, augment=AugmentConfig(), seed=5)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    dataset[Draw(0, 0)]
    assert torch.equal(torch.rand(4), expected)


def run(annotations: Annotations, sampler: ResumableSampler, workers: int, batches: int) -> list[torch.Tensor]:
    """Draw batches as a training loop does, through worker processes that fetch ahead."""
    dataset = ImageDataset(annotations.records, SMALL, augment=AugmentConfig(), seed=sampler.seed)
    seen: list[torch.Tensor] = []
    while len(seen) < batches:
        for images, _ in ImageLoader(dataset, batch_sampler=sampler, workers=workers):
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


def test_rows_are_the_batches_as_tensors() -> None:
    sampler = ResumableSampler(5, batch_size=2, drop_last=False)
    sampler.advance()
    assert [rows.tolist() for rows in sampler.rows(torch.device("cpu"))] == [[d.item for d in b] for b in sampler]


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
