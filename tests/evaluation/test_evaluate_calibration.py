"""Calibrators: recover what made the data, carry over to labels not met, survive bad days and a round trip."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from ramatch.errors import RamatchError
from ramatch.evaluation import Calibrator, reliability
from ramatch.evaluation.calibration import Evidence, Words
from ramatch.evaluation.reliability import calibration_report, calibration_table


def make(n=800, labels=20, weights=(9.0, 5.0, 0.0), bias=-4.0, spread=0.0, seed=0):
    """Cosine-like features (n, N, 3) and targets drawn from a logistic with a random bias per label."""
    g = torch.Generator().manual_seed(seed)
    x = 0.2 + 0.15 * torch.randn(n, labels, len(weights), generator=g, dtype=torch.float64)
    label_bias = spread * torch.randn(labels, generator=g, dtype=torch.float64)
    p = torch.sigmoid(x @ torch.tensor(weights, dtype=torch.float64) + bias + label_bias)
    return x, torch.rand(n, labels, generator=g, dtype=torch.float64) < p, p, label_bias


def words(count, seed=0, familiarity=None):
    """Unit features of so many labels in 16 dimensions."""
    unit = torch.nn.functional.normalize(torch.randn(count, 16, generator=torch.Generator().manual_seed(seed)), dim=1)
    return Words(unit, familiarity)


def test_recovers_a_known_logistic():
    x, t, p, _ = make(n=4000)
    calibrator = Calibrator.fit(x, t)
    slope = (calibrator.weights / calibrator.scale).tolist()
    assert slope == pytest.approx([9.0, 5.0, 0.0], abs=0.35)
    assert (calibrator(x) - p).abs().max() < 0.03
    assert reliability.ece(calibrator(x), t) < 0.005
    assert calibrator.base_rate == pytest.approx(t.double().mean().item())


def test_equals_scikit_learn_with_the_same_prior():
    x, t, _, _ = make(n=60, labels=4)
    ours = Calibrator.fit(x, t, l2=2.0)
    z = ((x - x.mean((0, 1))) / x.std((0, 1), correction=0)).reshape(-1, 3).numpy()
    t = t.flatten().numpy()
    # Platt's targets as weights: each pair counts as present and as absent, in shares
    soft = np.where(t, (t.sum() + 1) / (t.sum() + 2), 1 / (len(t) - t.sum() + 2))
    both, truth = np.concatenate([z, z]), np.repeat([True, False], len(t))
    theirs = LogisticRegression(C=1 / 2.0, tol=1e-10, max_iter=1000)
    theirs.fit(both, truth, sample_weight=np.concatenate([soft, 1 - soft]))
    np.testing.assert_allclose(ours.weights, theirs.coef_[0], atol=1e-5)
    np.testing.assert_allclose(ours(x).flatten(), theirs.predict_proba(z)[:, 1], atol=1e-5)


def test_a_label_has_the_same_probability_in_any_vocabulary():
    x, t, _, _ = make(labels=12)
    w = words(12, familiarity=torch.linspace(0, 1, 12))
    calibrator = Calibrator.fit(x, t).with_doubt([Evidence(x, t, w)])
    one = Words(w.unit[4:5], w.familiarity[4:5])
    torch.testing.assert_close(calibrator(x[:, 4:5], one), calibrator(x, w)[:, 4:5])


def test_doubt_is_learned_where_probabilities_are_off_and_carries_over_to_like_words():
    """Labels on one side of the text space are far more often there than their numbers say."""
    x, t, _, _ = make(n=500, labels=40)
    plain = Calibrator.fit(x, t)
    others, more = words(60, seed=1), words(60, seed=2)
    g = torch.Generator().manual_seed(5)

    def truth(w, z):
        right = plain(z)
        odd = w.unit[:, 0] > 0.15
        return torch.rand(right.shape, generator=g) < torch.where(odd, 0.5 + 0 * right, right), odd

    z = torch.cat([x, x], dim=1)[:, :60]
    wrong, _ = truth(others, z)
    near = words(40, seed=3)
    near = Words(near.unit - (near.unit[:, :1] + 0.2).clamp(min=0) * torch.eye(16)[0])  # the other side
    doubtful = plain.with_doubt([Evidence(x, t, near), Evidence(z, wrong, others)])
    assert reliability.ece(doubtful(x, near), t) < 0.05, "what it was calibrated on stays"
    fresh, far = truth(more, z)
    assert (
        reliability.ece(doubtful(z, more)[:, far], fresh[:, far]) < reliability.ece(plain(z)[:, far], fresh[:, far]) / 2
    )
    drawn = (doubtful(z, more) - 0.5).abs() <= (plain(z) - 0.5).abs() + 1e-9
    assert drawn.all(), "towards even odds, never past them"
    assert ((doubtful(z, more) > 0.5) == (plain(z) > 0.5)).all()
    trust = doubtful.trust(more)
    assert np.median(trust[far]) < 0.5 < trust[~far].mean()
    assert doubtful.trust(Words(more.unit, torch.full((60,), 0.01))).max() < 0.011
    with pytest.raises(RamatchError, match="looks at the labels' words"):
        doubtful(x)


def test_a_word_is_as_improbable_as_it_is_strange():
    x, t, _, _ = make(labels=3)
    calibrator = Calibrator.fit(x, t)
    known = torch.tensor([1.0, 0.5, 0.0])
    torch.testing.assert_close(calibrator(x, words(3, familiarity=known)), calibrator(x) * known)
    torch.testing.assert_close(calibrator(x, words(3)), calibrator(x))  # it is not known which words are known


def test_carries_over_to_labels_held_out():
    x, t, _, _ = make(n=700, labels=60, spread=0.8, seed=4)
    seen = torch.arange(60) < 40
    calibrator = Calibrator.fit(x[:400, seen], t[:400, seen])
    x, t = x[400:], t[400:]
    report = calibration_report(x[..., 0].clamp(0, 1), calibrator(x), t, seen=seen, threshold=calibrator.threshold)
    assert report["labels"] == {"all": 60, "seen": 40, "unseen": 20}
    assert report["after"]["unseen"]["ECE"] < 0.06 < report["before"]["unseen"]["ECE"]
    assert report["after"]["unseen"]["F1@0.5"] > report["before"]["unseen"]["F1@0.5"]
    assert report["after"]["unseen"]["log_loss"] < report["before"]["unseen"]["log_loss"]
    json.dumps(report, allow_nan=False)
    assert calibration_table(report).count("after") == 4  # three rows and the note on thresholds
    assert calibration_table(report, markdown=True).count("\n") == 7


@pytest.mark.parametrize("doubt", [False, True])
def test_round_trip(doubt):
    x, t, _, _ = make(n=100, labels=6, spread=0.5)
    calibrator = Calibrator.fit(x, t, names=["global", "matched", "max"])
    if doubt:
        calibrator = calibrator.with_doubt([Evidence(x, t, words(6)), Evidence(x, ~t, words(6, seed=1))])
    again = Calibrator.from_dict(json.loads(json.dumps(calibrator.to_dict())))
    asked = words(6, seed=2)
    assert torch.equal(again(x, asked), calibrator(x, asked))
    assert torch.equal(again(x.float(), asked), calibrator(x.float(), asked))
    assert again.to_dict() == calibrator.to_dict()
    assert again.feature_names == ("global", "matched", "max")


def test_files_of_earlier_versions():
    """They carry settings of maps that are gone: read where those were off, refused where one was on."""
    x, t, _, _ = make(n=100)
    calibrator = Calibrator.fit(x, t)
    old = calibrator.to_dict()
    settings = {
        "l2": 1.0,
        "monotone": False,
        "per_label": False,
        "variant": "none",
        "completeness": 1.0,
        "smooth": True,
    }
    old["ramatch_calibrator"] |= {"labels": [], "spread": 0.0, "settings": settings}
    old["tensors"] |= {"label_bias": [], "label_variance": [], "curve": []}
    assert torch.equal(Calibrator.from_dict(old)(x), calibrator(x))
    for name in ("curve", "label_bias"):
        with pytest.raises(RamatchError, match="run ramatch calibrate again"):
            Calibrator.from_dict({**old, "tensors": {**old["tensors"], name: [1.0, 1.0, 0.0]}})


@pytest.mark.parametrize("doubt", [False, True])
@pytest.mark.parametrize("case", ["no positives", "all positive", "one label", "constant", "separable", "one pair"])
def test_degenerate_data_gives_probabilities(case, doubt):
    x, t, _, _ = make(n=40, labels=3)
    if case == "no positives":
        t = torch.zeros_like(t)
    elif case == "all positive":
        t = torch.ones_like(t)
    elif case == "one label":
        x, t = x[:, :1], t[:, :1]
    elif case == "constant":
        x = torch.full_like(x, 0.3)
    elif case == "separable":
        t = x[..., 0] > 0.2
    else:
        x, t = x[:1, :1], t[:1, :1]
    calibrator, w = Calibrator.fit(x, t), words(x.shape[1])
    if doubt:
        calibrator = calibrator.with_doubt([Evidence(x, t, w)])
    far = torch.cat([x, x * 1e4, -x * 1e4])
    p = calibrator(far, w)
    assert torch.isfinite(p).all()
    assert ((p >= 0) & (p <= 1)).all()
    if case == "no positives":
        assert calibrator(x, w).max() < 0.3
    if case == "constant":
        assert calibrator(x, w).mean().item() == pytest.approx(t.double().mean().item(), abs=0.02)
    if case == "separable":
        assert ((calibrator(x, w) > calibrator.threshold) == t).double().mean() > 0.9
    report = calibration_report(x[..., 0].clamp(0, 1), calibrator(x, w), t, threshold=calibrator.threshold)
    json.dumps(report, allow_nan=False)


def test_arrays_and_half_precision():
    x, t, _, _ = make(n=50)
    calibrator = Calibrator.fit(x.numpy(), t.numpy())
    got = calibrator(x.numpy())
    assert isinstance(got, np.ndarray)
    np.testing.assert_allclose(got, calibrator(x).numpy())
    half = calibrator(x.bfloat16())
    assert half.dtype == torch.float32
    assert (half - calibrator(x)).abs().max() < 0.05


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, t: Calibrator.fit(x[0], t), "must be"),
        (lambda x, t: Calibrator.fit(x / 0, t), "NaN or infinite"),
        (lambda x, t: Calibrator.fit(x, t, words(1)), "1 labels"),
        (lambda x, t: Calibrator.fit(x, t, names=["a"]), "1 feature names"),
        (lambda x, t: Calibrator.fit(x, t)(x[..., :2]), "3 features a pair, got 2"),
        (lambda x, t: Calibrator.fit(x, t, l2=-1), "l2"),
        (lambda x, t: calibration_report(x[..., 0].clamp(0, 1), t, t, seen=[True]), "one flag per label"),
        (lambda x, t: Calibrator.from_dict({}), "are expected"),
        (lambda x, t: Calibrator.from_dict({"ramatch_calibrator": {}, "tensors": {}}), "missing"),
        (lambda x, t: Calibrator.fit(x, t.int() - 1), "0 or 1"),
    ],
)
def test_bad_calls_are_named(call, message):
    x, t, _, _ = make(n=10)
    with pytest.raises(RamatchError, match=message):
        call(x, t)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bias": float("inf")},
        {"weights": [1e308, 1.0, 1.0]},
        {"weights": "x"},
        {"weights": None},
        {"scale": [0.0, 0.0, 0.0]},
        {"mean": [[1.0]]},
        {"doubt": [[1.0]]},
        {"doubt": [float("nan")]},
        {"doubt": "x"},
        {"threshold": "a"},
        {"base_rate": float("nan")},
        {"feature_names": 3},
    ],
)
def test_a_hostile_file_is_refused(wrong: dict) -> None:
    fitted = Calibrator.fit(torch.randn(30, 2, 3), torch.rand(30, 2) > 0.5).to_dict()
    fitted["tensors"]["doubt"] = [0.5, 1.0]
    Calibrator.from_dict(fitted)
    for part in ("tensors", "ramatch_calibrator"):
        fitted[part] |= {name: value for name, value in wrong.items() if name in fitted[part]}
    for hostile in (fitted, {**fitted, "tensors": wrong}, {**fitted, "ramatch_calibrator": 3}, 3):
        with pytest.raises(RamatchError, match="not a calibrator"):
            Calibrator.from_dict(hostile)


def test_doubt_of_another_model_is_named() -> None:
    x, t, _, _ = make(labels=12)
    calibrator = Calibrator.fit(x, t).with_doubt([Evidence(x, t, words(12))])
    shorter = Words(words(12).unit[:, :5])
    for ask in (lambda: calibrator(x, shorter), lambda: calibrator.trust(shorter)):
        with pytest.raises(RamatchError, match="text features of 16 numbers, here are 5"):
            ask()
