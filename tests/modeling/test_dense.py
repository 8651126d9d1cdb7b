"""Fine maps: correspondence, resizing, what is taken off, and that tagging does not notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_models import tiny_ram

from ramatch.errors import RamatchError
from ramatch.masks import FineScores
from ramatch.modeling.dense import SURROUNDINGS, DenseConfig, DenseMaps, correspond, resized
from ramatch.recognizer import Recognizer

NAMES = ["cat", "dog", "kite"]


def noise(seed: int = 0, size: tuple[int, int] = (60, 40)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size)


@pytest.fixture
def recognizer() -> Recognizer:
    torch.manual_seed(0)
    found = Recognizer(tiny_ram())
    found.set_vocabulary(NAMES)
    return found


def test_regions_get_the_mean_of_those_that_look_like_them():
    torch.manual_seed(0)
    kinds = torch.randn(2, 16)
    local = (kinds[[0, 0, 1, 1, 1]] + 0.01 * torch.randn(5, 16))[None]
    weights = correspond(local, DenseConfig())
    assert weights.shape == (1, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 5))
    assert weights[0, :2, 2:].max() < 1e-6
    assert weights[0, 2:, 2:].min() > 0.3
    torch.testing.assert_close(correspond(local, DenseConfig(sharpness=0))[0], torch.eye(5))
    far = correspond(local, DenseConfig(reach=100))  # nothing is alike enough: each stays itself
    torch.testing.assert_close(far[0], torch.eye(5))


def test_resizing_keeps_places():
    regions = torch.arange(4.0).view(1, 4, 1)
    torch.testing.assert_close(resized(regions, (2, 2), (2, 2)), regions)
    big = resized(regions, (2, 2), (4, 4)).view(4, 4)
    assert big[0, 0] == 0
    assert big[0, 3] == 1
    assert big[3, 0] == 2


@torch.inference_mode()
@pytest.mark.parametrize("names", [NAMES, ["cat", *SURROUNDINGS[1:]]])
def test_without_any_setting_the_maps_are_the_cosines(recognizer, names):
    plain = DenseConfig(finer=1, typical=0, sharpness=0, whole=0)
    ram, engine = recognizer.ram, recognizer.engine
    recognizer.set_vocabulary(names)
    labels = recognizer.vocabulary.encoded
    maps = DenseMaps(ram, engine, [recognizer.load(noise(7))[0]], plain)
    trunk = engine.trunk(recognizer.load(noise())[0][None])
    found = maps(trunk, maps.pixels([noise()]), labels)
    cosines = recognizer.predict(noise(), maps=True).similarities
    np.testing.assert_allclose(found.scores[0].flatten(0, 1).numpy(), cosines, atol=1e-5)
    regions = F.normalize(ram.region_set.regions(ram.backbone, trunk, labels.tss), dim=-1)
    others = SURROUNDINGS if names == NAMES else SURROUNDINGS[:1]  # a word that is asked for is no surrounding
    expected = (regions @ ram.encode_labels(others).unit.T)[0].amax(-1)
    np.testing.assert_allclose(found.rest[0].flatten().numpy(), expected.numpy(), atol=1e-5)


def test_the_second_look_is_finer_and_masks_do_not_change_tagging(recognizer):
    tagged = recognizer.predict([noise(1), noise(2)], maps=True)
    masked = recognizer.predict([noise(1), noise(2)], maps=True, masks=True)
    for a, b in zip(tagged, masked, strict=True):
        assert np.array_equal(a.values, b.values)
        assert np.array_equal(a.scores, b.scores)
        assert np.array_equal(a.plan, b.plan)
        assert b.fine.scores.shape[0] > a.grid[0]
        assert b.fine.scores.shape[2] == len(NAMES)
        assert b.fine.rest.shape == b.fine.scores.shape[:2]
    alone = recognizer.predict(noise(2), masks=True)
    np.testing.assert_allclose(alone.fine.scores, masked[1].fine.scores, atol=1e-4)
    assert alone.heatmap("cat", kind="fine").max() == 1
    assert alone.heatmap("cat", kind="fine", size=(60, 40)).shape == (40, 60)


def test_masks_of_a_prediction(recognizer):
    prediction = recognizer.predict(noise(), masks=True)
    everything = prediction.masks(0, background=False)
    assert everything.ids.shape == (40, 60)
    assert sum(mask.sum() for mask in everything.values()) == 40 * 60
    assert set(prediction.masks(labels=["dog"])) <= {"dog"}
    assert prediction.masks(labels=["dog"], background=False)["dog"].all()
    assert len(prediction.masks(1.0)) == 0
    assert len(prediction.masks(1.0, background=False)) == 1
    assert not prediction.calibrated
    many = replace(prediction, values=np.array([0.01, 0.02, 0.0001]))  # relative scores of a long vocabulary
    assert set(many.masks(background=False)) <= {"cat", "dog"}
    assert np.array_equal(many.masks(background=False).ids, many.masks(0.002, background=False).ids)
    assert len(many.masks(0.1, background=True)) == 0
    assert prediction.masks(size=(6, 4)).ids.shape == (4, 6)
    with pytest.raises(RamatchError, match="'bear'"):
        prediction.masks(labels=["bear"])
    with pytest.raises(RamatchError, match="masks=True"):
        recognizer.predict(noise()).masks()
    with pytest.raises(RamatchError, match="masks=True"):
        recognizer.predict(noise(), maps=True).heatmap("cat", kind="fine")


def test_improbable_labels_must_look_better():
    scores = np.zeros((2, 2, 2), dtype=np.float32)
    scores[..., 0], scores[0, :, 1] = 0.5, 0.55
    fine = FineScores(scores, np.full((2, 2), -1, dtype=np.float32))
    names, places = ("cat", "dog"), [0, 1]
    sure = fine.masks(names, np.array([0.9, 0.9]), places, (2, 2))
    assert sure["dog"].tolist() == [[True, True], [False, False]]
    doubtful = fine.masks(names, np.array([0.9, 0.1]), places, (2, 2))
    assert list(doubtful) == ["cat"]
    told = fine.masks(names, np.array([0.9, 0.1]), places, (2, 2), doubted=False)
    assert told["dog"].sum() == 2
    assert fine.masks(names, np.array([0.9, 0.1]), [], (4, 3)).ids.shape == (3, 4)


def test_without_words_for_surroundings_the_best_label_ends_at_its_own_middle():
    scores = np.array([[[0.0], [0.1], [0.9], [1.0]]], dtype=np.float32)
    found = FineScores(scores).masks(("cat",), np.array([0.9]), [0], (4, 1))
    assert found["cat"].tolist() == [[False, False, True, True]]
    high = FineScores(scores, np.full((1, 4), 9, dtype=np.float32)).masks(("cat",), np.array([0.9]), [0], (4, 1))
    assert len(high) == 0


def test_cells_that_look_alike_share_their_label():
    scores = np.array([[[0.0, 0.1], [0.1, 0.0], [0.0, 0.1]]], dtype=np.float32)
    alone = FineScores(scores).masks(("cat", "dog"), np.ones(2), [0, 1], (3, 1), background=False)
    assert alone.ids.tolist() == [[2, 1, 2]]
    together = FineScores(scores, alike=np.full((3, 3), 1 / 3, dtype=np.float32))
    assert together.masks(("cat", "dog"), np.ones(2), [0, 1], (3, 1), background=False).ids.tolist() == [[1, 1, 1]]
    assert list(together.masks(("cat", "dog"), np.ones(2), [0, 1], (3, 1), background=False)) == ["dog"]
