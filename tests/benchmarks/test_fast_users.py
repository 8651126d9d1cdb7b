"""Where users meet FastRAM: Recognizer and scoring give the plain path's numbers, keep trunks, and know when not to use it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_models import tiny_ram

from ramatch import Recognizer
from ramatch.data.annotations import Annotations
from ramatch.evaluation.calibration import Calibrator
from ramatch.modeling.fast import FastRAM, suits
from ramatch.evaluation.models import collect_scores

LABELS = ["cat", "dog", "traffic light", "kite", "rain"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"))]


def picture(seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((48, 40), Image.Resampling.BICUBIC)


def make(fast: bool, device: str = "cpu", calibrator: Calibrator | None = None, **options: object) -> Recognizer:
    torch.manual_seed(0)  # the same weights each time
    recognizer = Recognizer(tiny_ram("ramatch").to(device), fast=fast, calibrator=calibrator, **options)  # type: ignore[arg-type]
    recognizer.set_vocabulary(LABELS)
    return recognizer


def same(ours, plain) -> None:
    for a, b in zip(ours, plain, strict=True):
        assert a.labels == b.labels
        assert a.grid == b.grid
        np.testing.assert_allclose(a.scores, b.scores, atol=1e-3)
        np.testing.assert_allclose(a.probabilities, b.probabilities, atol=1e-3)


@pytest.fixture
def engines(monkeypatch):
    """Counts batches of images that engines see."""
    seen: list[int] = []
    own = FastRAM.trunk
    monkeypatch.setattr(FastRAM, "trunk", lambda self, images: seen.append(len(images)) or own(self, images))
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("calibrated", [False, True])
def test_predictions_are_those_of_the_plain_path(device, calibrated, engines):
    calibrator = None
    if calibrated:  # of all three features
        none = torch.zeros(0)
        calibrator = Calibrator(
            torch.tensor([3.0, 2.0, 1.0]), torch.tensor(-1.0), torch.zeros(3), torch.ones(3), none, none, none
        )
    fast, plain = make(True, device, calibrator), make(False, device, calibrator)
    pictures = [picture(i) for i in range(7)]
    for _ in range(3):  # on a GPU a graph takes over
        same(fast.predict(pictures, batch_size=3), plain.predict(pictures, batch_size=3))
    assert engines == [3, 3, 1]  # kept trunks do the rest
    fresh = [picture(i) for i in range(20, 25)]
    same(fast.predict([pictures[0], *fresh]), plain.predict([pictures[0], *fresh]))
    assert engines[3:] == [5]
    other = fast.encode_vocabulary(["rain", "kite", "cat"])
    same(fast.predict(pictures, vocabulary=other), plain.predict(pictures, vocabulary=other))
    same(fast.predict(pictures), plain.predict(pictures))
    assert engines[4:] == []


def test_maps_and_other_matchers_take_the_plain_path(engines):
    fast, plain = make(True), make(False)
    shown = fast.predict(picture(0), maps=True)
    np.testing.assert_allclose(shown.plan, plain.predict(picture(0), maps=True).plan)
    np.testing.assert_allclose(
        fast.predict(picture(0), matcher="average").scores, plain.predict(picture(0), matcher="average").scores
    )
    assert engines == []
    fast.predict(picture(0), matcher=fast.ram.config.matcher)
    assert engines == [1]


def test_when_it_suits():
    ram = tiny_ram("ramatch")
    assert suits(ram, True)
    assert not suits(ram, False)
    assert suits(ram) == (ram.backbone.device.type == "cuda")
    ram.config = ram.config.replace(matcher="average")
    assert not suits(ram, True)
    assert not suits(tiny_ram("reference"), True)  # stops a batch together


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


@pytest.mark.parametrize("device", DEVICES)
def test_threads_with_vocabularies_of_their_own(device):
    """The engine holds one vocabulary at a time; callers do not notice."""
    fast, plain = make(True, device), make(False, device)
    words = [fast.encode_vocabulary(names) for names in (LABELS, LABELS[::-1], LABELS[1:])]
    wanted = [plain.predict([picture(i) for i in range(3)], vocabulary=w) for w in words]
    with ThreadPoolExecutor(6) as pool:
        found = list(
            pool.map(lambda i: fast.predict([picture(j) for j in range(3)], vocabulary=words[i % 3]), range(30))
        )
    for i, predictions in enumerate(found):
        same(predictions, wanted[i % 3])
