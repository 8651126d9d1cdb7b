"""ZSL and GZSL reports, and their tables."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ramatch.errors import RamatchError
from ramatch.evaluation import Report, evaluate_scores, metrics

CLASSES = ["a", "b", "c", "d", "e"]
SEEN, UNSEEN = ["a", "b", "c"], ["e", "d"]


@pytest.fixture
def problem():
    rng = np.random.default_rng(1)
    targets = rng.random((60, 5)) < 0.3
    return targets * 0.4 + rng.random((60, 5)), targets


def test_gzsl_is_in_percent_with_seen_and_unseen(problem):
    scores, targets = problem
    report = evaluate_scores(scores, targets, CLASSES, SEEN, UNSEEN)
    assert report["mAP"] == pytest.approx(100 * metrics.mean_ap(scores, targets))
    assert report["F1@3"] == pytest.approx(100 * metrics.at_k(scores, targets, 3).f1)
    assert report["P@5"] == pytest.approx(100 * targets.mean())
    assert report["mAP_seen"] == pytest.approx(100 * metrics.mean_ap(scores[:, :3], targets[:, :3]))
    assert report["mAP_unseen"] == pytest.approx(100 * metrics.mean_ap(scores[:, 3:], targets[:, 3:]))
    assert report["mAP_H"] == pytest.approx(2 / (1 / report["mAP_seen"] + 1 / report["mAP_unseen"]))
    tagged = targets.any(1)
    assert report["F1@3_tagged"] == pytest.approx(100 * metrics.at_k(scores[tagged], targets[tagged], 3).f1)
    assert report["mAP_tagged"] == pytest.approx(100 * metrics.mean_aps(scores, targets)["mAP_tagged"])
    assert not targets.any(1).all()  # so the two lines above look at fewer images
    assert (report.images, report.labels, report.positives) == (60, 5, targets.sum())


def test_zsl_ranks_the_unseen_labels_alone(problem):
    scores, targets = problem
    report = evaluate_scores(scores, targets, CLASSES, unseen=UNSEEN, ks=(1,), protocol="zsl")
    columns = [4, 3]
    assert report["P@1"] == pytest.approx(100 * metrics.at_k(scores[:, columns], targets[:, columns], 1).precision)
    assert list(report.average_precisions) == UNSEEN
    assert "mAP_H" not in report.values


def test_a_label_without_positives_is_null_in_json_and_not_in_map(problem):
    scores, targets = problem
    targets[:, 2] = False
    report = evaluate_scores(scores, targets, CLASSES, threshold=0.5)
    loaded = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert loaded["average_precision"]["c"] is None
    assert loaded["labels_without_positives"] == ["c"]
    assert loaded["mAP"] == pytest.approx(100 * metrics.mean_ap(scores[:, [0, 1, 3, 4]], targets[:, [0, 1, 3, 4]]))
    assert loaded["mAP_empty_zero"] == pytest.approx(loaded["mAP"] * 4 / 5)
    assert {"P@3", "R@3", "F1@3", "P@5", "R@5", "F1@5", "CF1", "OF1"} <= set(loaded)
    assert "1 without positives" in report.to_table()


def test_no_positive_at_all_gives_zeros_not_nan():
    report = evaluate_scores(np.zeros((3, 5)), np.zeros((3, 5)), CLASSES, SEEN, UNSEEN, threshold=0.5)
    assert set(report.values.values()) == {0.0}
    json.loads(json.dumps(report.to_dict(), allow_nan=False))


def test_tables():
    report = Report({"P@3": 26.54, "P@3_tagged": 30.0, "mAP": 83.0}, images=2000, labels=5, positives=7, protocol="zsl")
    assert report.to_table(name="RAM").splitlines() == [
        "Method   P@3   mAP",
        "------------------",
        "RAM     26.5  83.0",
        "",
        "ZSL: 2,000 images, 5 labels, 7 positives",
    ]
    assert report.to_table(name="a|b", markdown=True).splitlines()[:3] == [
        "| Method | P@3 | mAP |",
        "| :--- | ---: | ---: |",
        "| a\\|b | 26.5 | 83.0 |",
    ]
    assert report.to_table(markdown=True).splitlines()[0] == "| P@3 | mAP |"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"classes": ["a"]}, "5 columns"),
        ({"classes": CLASSES, "protocol": "zsl"}, "needs the unseen"),
        ({"classes": CLASSES, "seen": ["a"], "unseen": ["zebra"]}, "zebra"),
        ({"classes": CLASSES, "protocol": "both"}, "'zsl' or 'gzsl'"),
    ],
)
def test_bad_calls_are_named(problem, kwargs, message):
    with pytest.raises(RamatchError, match=message):
        evaluate_scores(*problem, **kwargs)
