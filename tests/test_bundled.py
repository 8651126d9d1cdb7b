"""The model that ships: small enough, sees what anyone sees, and means what it says for any size of vocabulary."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ramatch import Recognizer
from ramatch.assets import photo_paths, vocabulary
from ramatch.modeling.checkpoints.loading import bundled_model

PHOTOS = {path.stem: path for path in photo_paths()}


@pytest.fixture(scope="module")
def mini() -> Recognizer:
    return Recognizer.from_pretrained("ramatch-mini", device="cpu")


def test_size():
    files = [f for f in bundled_model("ramatch-mini").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 56e6
    assert max(f.stat().st_size for f in files) < 30e6


@pytest.mark.parametrize(
    ("photo", "there", "absent"),
    [
        ("coffee", ["cup", "coffee", "plate"], ["dog", "car", "airplane", "giraffe"]),
        ("street", ["person", "street", "building", "walking"], ["boat", "pizza", "horse", "toilet"]),
        ("boats", ["boat", "lake", "sunset", "mountain"], ["dog", "pizza", "laptop", "elephant"]),
        ("plants", ["table", "vase", "flower"], ["car", "dog", "kite", "train"]),
        ("astronaut", ["flag", "jacket", "hair"], ["horse", "toilet", "banana"]),
        ("barn", ["field", "grass", "house"], ["laptop", "kite", "train"]),
    ],
)
def test_it_sees(mini, photo, there, absent):
    mini.set_vocabulary(there + absent)
    probability = {tag.label: tag.probability for tag in mini.predict(PHOTOS[photo]).tags()}
    assert min(probability[label] for label in there) > 0.5
    assert max(probability[label] for label in absent) < 0.2


def test_one_label_or_hundreds(mini):
    """The odds of a label hardly depend on what else is asked: the background competes either way."""
    mini.set_vocabulary(["cup"])
    alone = mini.predict(PHOTOS["coffee"]).top(1)[0].probability
    mini.set_vocabulary(vocabulary("everyday"))
    among = {tag.label: tag.probability for tag in mini.predict(PHOTOS["coffee"]).tags()}["cup"]
    assert alone == pytest.approx(among, abs=0.1)


def places(heat) -> tuple[float, float]:
    """Where most of a map lies, as shares of the picture's width and height."""
    return tuple((heat.sum(axis).argmax() + 0.5) / heat.shape[1 - axis] for axis in (0, 1))


@pytest.mark.parametrize(
    ("photo", "label", "across", "down"),
    [
        ("astronaut", "flag", (0, 0.29), (0, 1)),  # it hangs at the left edge
        ("tourist", "building", (0, 0.6), (0, 0.71)),
        ("tourist", "person", (0.25, 1), (0.36, 1)),  # her arm reaches to the left
        ("boats", "sunset", (0, 1), (0, 0.42)),
        ("street", "person", (0.29, 0.64), (0.57, 0.93)),
    ],
)
def test_it_points_at_things(mini, photo, label, across, down):
    mini.set_vocabulary(["flag", "building", "person", "boat", "sunset"])
    x, y = places(mini.predict(PHOTOS[photo], maps=True).heatmap(label))
    assert across[0] <= x < across[1]
    assert down[0] <= y < down[1]


@pytest.mark.parametrize(
    ("photo", "labels", "across", "down"),
    [
        ("boats", ["boat", "lake", "sunset", "mountain"], (0.29, 0.79), (0.36, 0.79)),
        ("plants", ["vase", "table", "flower"], (0.43, 0.79), (0.29, 0.86)),
    ],
)
def test_the_plan_points_where_an_outlier_at_the_edge_misleads_similarities(mini, photo, labels, across, down):
    mini.set_vocabulary(labels)
    x, y = places(mini.predict(PHOTOS[photo], plan=True).heatmap(labels[0], kind="plan"))
    assert across[0] <= x < across[1]
    assert down[0] <= y < down[1]


SLOW = ("torch._dynamo", "sympy", "torchvision", "transformers", "scipy", "matplotlib", "onnx", "onnxruntime")


def test_the_first_answer_waits_for_torch_alone():
    loaded = f"', '.join({{*{SLOW}}} & {{*sys.modules}})"
    code = f"import sys; from ramatch.cli import main; main(sys.argv[1:]); sys.exit({loaded} or 0)"
    arguments = ["tag", str(PHOTOS["coffee"]), "--labels", "cup, dog", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert "cup" in done.stdout
    assert done.returncode == 0, f"imported, for tenths of a second each: {done.stderr}"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_never_holds_the_weights_twice():
    """In bfloat16 the model is 100 MB; its int8 weights as float32 all at once would be 200 MB more."""
    code = """
import torch
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1000
import ramatch.recognizer
before = peak()
ramatch.recognizer.Recognizer.from_pretrained(device="cpu", dtype=torch.bfloat16)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 220, "MB more at the peak"
