"""The model that ships: small enough, sees what anyone sees, and means what it says for any size of vocabulary."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("photo", "label", "columns", "rows"),
    [
        ("astronaut", "flag", (0, 4), (0, 14)),  # it hangs at the left edge
        ("tourist", "building", (0, 7), (0, 10)),
        ("tourist", "person", (8, 14), (5, 14)),
        ("boats", "sunset", (0, 14), (0, 5)),
        ("street", "person", (4, 9), (8, 13)),
    ],
)
def test_it_points_at_things(mini, photo, label, columns, rows):
    mini.set_vocabulary(["flag", "building", "person", "boat", "sunset"])
    found = mini.predict(PHOTOS[photo], maps=True).heatmap(label)
    assert columns[0] <= found.sum(0).argmax() < columns[1]
    assert rows[0] <= found.sum(1).argmax() < rows[1]


@pytest.mark.parametrize(
    ("photo", "labels", "columns", "rows"),
    [
        ("boats", ["boat", "lake", "sunset", "mountain"], (4, 11), (5, 11)),
        ("plants", ["vase", "table", "flower"], (6, 11), (4, 12)),
    ],
)
def test_the_plan_points_where_an_outlier_at_the_edge_misleads_similarities(mini, photo, labels, columns, rows):
    mini.set_vocabulary(labels)
    found = mini.predict(PHOTOS[photo], plan=True).heatmap(labels[0], kind="plan")
    assert columns[0] <= found.sum(0).argmax() < columns[1]
    assert rows[0] <= found.sum(1).argmax() < rows[1]
