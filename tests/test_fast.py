"""Where users meet the fused copy: Recognizer and scoring give the plain modules' numbers, and keep trunks."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent / "modeling"))

from tiny_models import tiny_ram

from ramatch import Recognizer
from ramatch.data.annotations import Annotations
from ramatch.evaluation.calibration import Calibrator
from ramatch.evaluation.models import collect_scores
from ramatch.modeling.graph import GraphedRAM

LABELS = ["cat", "dog", "traffic light", "kite", "rain"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"))]


def picture(seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((48, 40), Image.Resampling.BICUBIC)


def make(fast: bool, device: str = "cpu", calibrator: Calibrator | None = None, **options: object) -> Recognizer:
    torch.manual_seed(0)  # the same weights each time
    options |= {"fast": fast, "calibrator": calibrator}
    recognizer = Recognizer(tiny_ram("ramatch").to(device), **options)  # type: ignore[arg-type]
    recognizer.set_vocabulary(LABELS)
    return recognizer


def same(ours, plain) -> None:
    for a, b in zip(ours, plain, strict=True):
        assert a.labels == b.labels
        assert a.grid == b.grid
        np.testing.assert_allclose(a.scores, b.scores, atol=1e-3)
        np.testing.assert_allclose(a.values, b.values, atol=1e-3)


@pytest.fixture
def engines(monkeypatch):
    """Counts batches of images that engines see."""
    seen: list[int] = []
    own = GraphedRAM.trunk
    monkeypatch.setattr(GraphedRAM, "trunk", lambda self, images: seen.append(len(images)) or own(self, images))
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("calibrated", [False, True])
def test_predictions_are_those_of_the_plain_path(device, calibrated, engines):
    calibrator = None
    if calibrated:  # of all three features
        calibrator = Calibrator(torch.tensor([3.0, 2.0, 1.0]), torch.tensor(-1.0), torch.zeros(3), torch.ones(3))
    fast, plain = make(True, device, calibrator), make(False, device, calibrator)
    pictures = [picture(i) for i in range(7)]
    wanted = plain.predict(pictures, batch_size=3)
    engines.clear()
    for _ in range(3):  # on a GPU a graph takes over
        same(fast.predict(pictures, batch_size=3), wanted)
    assert engines == [3, 3, 1]  # kept trunks do the rest
    fresh = [picture(i) for i in range(20, 25)]
    same(fast.predict([pictures[0], *fresh]), [wanted[0], *plain.predict(fresh)])
    assert engines[3:] == [5, 5]  # one of them the plain one's
    other = fast.encode_vocabulary(["rain", "kite", "cat"])
    same(fast.predict(pictures, vocabulary=other), plain.predict(pictures, vocabulary=other))
    same(fast.predict(pictures), wanted)
    assert engines[5:] == []


def test_maps_and_other_matchers(engines):
    fast, plain = make(True), make(False)
    shown, wanted = (r.predict(picture(0), maps=True) for r in (fast, plain))
    np.testing.assert_allclose(shown.plan, wanted.plan, atol=1e-5)
    np.testing.assert_allclose(shown.similarities, wanted.similarities, atol=1e-5)
    for matcher in (None, "average", "reweight", "ot", fast.ram.config.matcher):
        same([fast.predict(picture(0), matcher=matcher)], [plain.predict(picture(0), matcher=matcher)])
    assert engines == [1, 1]  # one trunk for each of the two, whatever was asked for


def test_by_default_on_a_gpu():
    assert not Recognizer(tiny_ram("ramatch")).fast
    if torch.cuda.is_available():
        assert Recognizer(tiny_ram("ramatch").cuda()).fast


@pytest.mark.parametrize("device", DEVICES)
def test_collected_scores_agree(device, tmp_path):
    for i in range(5):
        picture(i).save(tmp_path / f"{i}.png")
    data = annotations(tmp_path)
    ram = make(False, device).ram
    found = [collect_scores(ram, data, batch_size=2, workers=0, progress=False, fast=fast) for fast in (True, False)]
    np.testing.assert_allclose(found[0].scores, found[1].scores, atol=1e-3)
    np.testing.assert_allclose(found[0].features, found[1].features, atol=1e-3)


def annotations(folder) -> Annotations:
    from ramatch.data.records import read_annotations

    lines = ["image,labels", *(f"{i}.png,{LABELS[i]}" for i in range(5))]
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return read_annotations(folder / "labels.csv")


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_eight_threads_with_matchers_and_vocabularies_of_their_own(device, fast):
    """All share one recognizer, and each gets the answers of one thread alone, probabilities, plan and all."""
    shared, alone = make(fast, device, cache=2), make(fast, device, cache=0)
    names = (LABELS, LABELS[::-1], LABELS[1:], ["rain", "old kite"])
    matchers = (None, "ot", "average", "reweight", "kcot")
    cases = [(n, m, maps) for n in names for m in matchers for maps in (False, True)]

    def ask(recognizer, case):
        labels, matcher, maps = case
        templates = ["A {}.", "the {} in the rain"] if maps else None
        words = recognizer.encode_vocabulary(labels, templates=templates)
        return recognizer.predict([picture(j) for j in range(3)], vocabulary=words, matcher=matcher, maps=maps)

    wanted = [ask(alone, case) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: ask(shared, case), cases * 3))
    for i, predictions in enumerate(found):
        expected = wanted[i % len(cases)]
        for ours, one in zip(predictions, expected, strict=True):
            assert ours.labels == one.labels
            np.testing.assert_allclose(ours.scores, one.scores, atol=1e-5)
            np.testing.assert_allclose(ours.values, one.values, atol=1e-5)
            assert (ours.plan is None) == (one.plan is None)
            if one.plan is not None:
                np.testing.assert_allclose(ours.plan, one.plan, atol=1e-5)
