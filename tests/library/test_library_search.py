"""Answers of a library beside those of the model itself, and the order of hits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ramatch.errors import RamatchError
from ramatch.evaluation.calibration import Calibrator
from ramatch.library import Library
from ramatch.library.features import winners
from ramatch.library.search import Query, rank
from ramatch.library.vectors import Labels, quantize
from ramatch.recognizer import Recognizer

WORDS = ("cat", "dog", "kite", "red", "person")


@pytest.fixture(scope="module")
def calibrated(recognizer: Recognizer) -> Recognizer:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 4, 3, generator=generator) * 0.1 + torch.tensor([0.2, 0.4, 0.4])
    fitted = Calibrator.fit(features, features.mean(-1) + 0.1 * torch.randn(50, 4, generator=generator) > 0.33)
    return Recognizer(recognizer.ram, calibrator=fitted, cache=0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, calibrated: Recognizer) -> Library:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(12):
        noise = np.random.default_rng(i).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((48 + i, 40)).save(folder / f"{i}.png")
    library = Library.open(folder / ".ramatch", create=True)
    library.update(folder, calibrated)
    return library


def test_tags_are_those_of_the_model_but_for_the_plan(library: Library, calibrated: Recognizer) -> None:
    answers = list(library.tag(WORDS, calibrated))
    assert [Path(a.source or "").name for a in answers] == [f"{i}.png" for i in range(12)]
    calibrated.set_vocabulary(WORDS)
    for answer, fresh in zip(answers, calibrated.predict([a.source for a in answers], maps=True), strict=True):
        # a tiny grid is kept whole, so only TSS, the plan and rounding to 8 bits differ
        assert np.abs(answer.probabilities - fresh.probabilities).max() < 0.1
        assert answer.labels == fresh.labels
        assert answer.size == fresh.size
        assert answer.calibrated
    close = np.corrcoef(
        np.stack([a.scores for a in answers]).ravel(),
        np.stack([p.scores for p in calibrated.predict([a.source for a in answers])]).ravel(),
    )[0, 1]
    assert close > 0.95


def test_without_calibration_scores_are_relative(library: Library, recognizer: Recognizer) -> None:
    for answer in library.tag(WORDS, recognizer):
        assert answer.values.sum() == pytest.approx(1, abs=1e-5)
        assert not answer.calibrated
    assert len(library.search("dog -cat", recognizer, top=3)) == 3


@settings(max_examples=25, deadline=None)
@given(st.sets(st.sampled_from(WORDS)), st.sets(st.sampled_from(WORDS)), st.randoms())
def test_search_is_the_product_of_its_labels(
    library: Library, calibrated: Recognizer, wanted, unwanted, random
) -> None:
    unwanted -= wanted
    if not wanted | unwanted:
        return
    parts = [*wanted, *(f"-{word}" for word in unwanted)]
    random.shuffle(parts)
    hits = library.search(" ".join(parts), calibrated, top=None)
    assert len(hits) == 12
    tags = {
        Path(a.source or ""): dict(zip(WORDS, a.probabilities, strict=True)) for a in library.tag(WORDS, calibrated)
    }
    for hit in hits:
        expected = np.prod([tags[hit.path][w] for w in wanted]) * np.prod([1 - tags[hit.path][w] for w in unwanted])
        assert hit.probability == pytest.approx(expected, abs=1e-5)
    assert [h.probability for h in hits] == sorted((h.probability for h in hits), reverse=True)
    more = library.search([*parts, "-blue"] if len(parts) > 1 else f"{parts[0]} -blue", calibrated, top=None)
    before = {hit.path: hit.probability for hit in hits}
    assert all(hit.probability <= before[hit.path] for hit in more)  # one wish more is never more probable


def test_threshold_top_and_sort(library: Library, calibrated: Recognizer) -> None:
    every = library.search("dog", calibrated, top=None)
    limit = every[4].probability
    assert library.search("dog", calibrated, top=None, threshold=limit) == every[:5]
    assert library.search("dog", calibrated, top=2, threshold=limit) == every[:2]
    by_name = library.search("dog", calibrated, top=5, sort="name")
    assert sorted(int(h.path.stem) for h in every[:5]) == [int(h.path.stem) for h in by_name]
    sizes = [hit.size for hit in library.search("dog", calibrated, sort="size")]
    assert sizes == sorted(sizes)
    with pytest.raises(RamatchError, match="cannot sort by 'beauty'"):
        library.search("dog", calibrated, sort="beauty")
    with pytest.raises(RamatchError, match="nothing to search for"):
        library.search("", calibrated)


def test_date_is_the_cameras_where_it_says_one(tmp_path: Path, calibrated: Recognizer) -> None:
    import time

    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x9003] = "2001:02:03 04:05:06"
    Image.new("RGB", (20, 20), "red").save(tmp_path / "old.jpg", exif=exif)
    Image.new("RGB", (20, 20), "blue").save(tmp_path / "today.jpg")
    library = Library.open(tmp_path / ".ramatch", create=True)
    library.update(tmp_path, calibrated)
    hits = library.search("dog", calibrated, sort="date")
    assert [hit.path.name for hit in hits] == ["old.jpg", "today.jpg"]
    assert time.localtime(hits[0].date)[:6] == (2001, 2, 3, 4, 5, 6)


def test_like_finds_the_photo_itself_first(library: Library, calibrated: Recognizer) -> None:
    for i in (0, 7):
        photo = library.path.parent / f"{i}.png"
        hits = library.search("", calibrated, like=photo, top=3)
        assert hits[0].path == photo
        assert hits[0].similarity == pytest.approx(1, abs=0.01)
        both = library.search("dog", calibrated, like=photo, top=None)
        for hit in both:
            assert hit.similarity is not None
            assert hit.probability == pytest.approx(hit.labels["dog"] * max(hit.similarity, 0), abs=1e-6)


def test_few_candidates_are_the_most_promising(library: Library, calibrated: Recognizer) -> None:
    view, query = library.snapshot(calibrated), Query(("dog",), ("cat",))
    whole, some = rank(view, query, calibrated, room=None), rank(view, query, calibrated, room=5)
    assert len(whole.rows) == 12
    assert len(some.rows) == 5
    values = dict(zip(whole.rows.tolist(), whole.probability.tolist(), strict=True))
    for row, value in zip(some.rows.tolist(), some.probability.tolist(), strict=True):
        assert value == pytest.approx(values[row], rel=1e-5)


@pytest.mark.parametrize("integers", [True, False])
def test_products_of_bytes_are_close_to_those_of_floats(integers: bool) -> None:
    generator = np.random.default_rng(0)
    image, regions, labels = (
        generator.standard_normal(shape).astype(np.float32) for shape in ((70, 64), (70, 5, 64), (9, 64))
    )
    image, regions, labels = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (image, regions, labels))
    arrays, encoded = quantize(image, regions), Labels(torch.from_numpy(labels))
    encoded.integers = integers
    rows = np.array([0, 1, 2, 40, 41, 69, *range(3, 39)])
    assert np.abs(encoded.image(arrays, rows).numpy() - (image @ labels.T)[rows]).max() < 0.01
    blocks = list(encoded.best(arrays, rows))
    assert np.concatenate([block for block, _ in blocks]).tolist() == rows.tolist()
    best = torch.cat([found for _, found in blocks]).numpy()
    assert np.abs(best - (regions @ labels.T).max(1)[rows]).max() < 0.01


def test_winners_are_chosen_one_by_one() -> None:
    sim = torch.rand(3, 30, 8, generator=torch.Generator().manual_seed(0))
    chosen = winners(sim, 4)
    for i, picture in enumerate(sim):
        best = picture.mean(0)
        for index in chosen[i]:
            gains = torch.stack([torch.maximum(best, region).sum() for region in picture])
            assert gains[index] == pytest.approx(gains.max().item(), abs=1e-6)
            best = torch.maximum(best, picture[index])
    every = winners(sim, 99)
    assert every.shape == (3, 30)
    assert torch.equal(sim.take_along_dim(every[..., None], 1).amax(1), sim.amax(1))


def test_a_search_looks_for_kinds_too(library: Library, calibrated: Recognizer) -> None:
    asked = calibrated.sought(["animal", "kite"])
    assert "dog" in asked.words
    alone = Recognizer(calibrated.ram, calibrator=calibrated.calibrator, cache=0, kinds=False)
    each = {answer.source: answer.probabilities for answer in library.tag(asked.words, alone)}
    both = {answer.source: answer.probabilities for answer in library.tag(["animal", "kite"], calibrated)}
    hits = library.search("animal, kite", calibrated, top=None)
    assert len(hits) == len(both) == 12
    for hit in hits:
        expected = asked.combine(each[str(hit.path)])
        np.testing.assert_allclose(both[str(hit.path)], expected, atol=1e-6)
        np.testing.assert_allclose([hit.labels["animal"], hit.labels["kite"]], expected, atol=1e-6)
    few = rank(library.snapshot(calibrated), Query(("animal",), ("kite",)), calibrated, room=4)
    assert len(few.rows) == 4
