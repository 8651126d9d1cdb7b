"""Calibrators: recover what made the data, carry over to labels not met, survive bad days and a round trip."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from ramatch.errors import RamatchError
from ramatch.evaluation import CalibrationSettings, Calibrator, reliability
from ramatch.evaluation.reliability import calibration_table


def make(n=800, labels=20, weights=(9.0, 5.0, 0.0), bias=-4.0, spread=0.0, seed=0):
    """Cosine-like features (n, N, 3) and targets drawn from a logistic with a random bias per label."""
    g = torch.Generator().manual_seed(seed)
    x = 0.2 + 0.15 * torch.randn(n, labels, len(weights), generator=g, dtype=torch.float64)
    label_bias = spread * torch.randn(labels, generator=g, dtype=torch.float64)
    p = torch.sigmoid(x @ torch.tensor(weights, dtype=torch.float64) + bias + label_bias)
    return x, torch.rand(n, labels, generator=g, dtype=torch.float64) < p, p, label_bias


def names(count, start=0):
    return [f"label {i}" for i in range(start, start + count)]


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
    ours = Calibrator.fit(x, t, settings=CalibrationSettings(l2=2.0))
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
    calibrator = Calibrator.fit(x, t, names(12), settings=CalibrationSettings(per_label=True))
    whole = calibrator(x, names(12))
    torch.testing.assert_close(calibrator(x[:, 4:5], names(1, 4)), whole[:, 4:5])


def test_label_biases_are_found_and_shrunk():
    x, t, p, true = make(n=600, labels=30, spread=1.2, seed=1)
    settings = CalibrationSettings(per_label=True)
    calibrator = Calibrator.fit(x, t, names(30), settings=settings)
    assert calibrator.spread == pytest.approx(1.2, rel=0.35)
    centred = true - true.mean()
    assert np.corrcoef(calibrator.label_bias, centred)[0, 1] > 0.98
    few = Calibrator.fit(x[:20], t[:20], names(30), settings=settings)  # fewer images: drawn more to the common bias
    assert few.label_variance[0] > 3 * calibrator.label_variance[0]
    assert (calibrator(x, names(30)) - p).abs().mean() < (Calibrator.fit(x, t)(x) - p).abs().mean() / 3


def test_carries_over_to_labels_held_out():
    x, t, _, _ = make(n=700, labels=60, spread=0.8, seed=4)
    classes, seen = names(60), torch.arange(60) < 40
    for settings in (CalibrationSettings(), CalibrationSettings(per_label=True)):
        calibrator = Calibrator.fit(x[:400, seen], t[:400, seen], classes[:40], settings=settings)
        report = calibrator.report(x[400:], t[400:], seen, classes=classes)
        assert report["labels"] == {"all": 60, "seen": 40, "unseen": 20}
        assert report["after"]["unseen"]["ECE"] < 0.06 < report["before"]["unseen"]["ECE"]
        assert report["after"]["unseen"]["F1@0.5"] > report["before"]["unseen"]["F1@0.5"]
        assert report["after"]["unseen"]["log_loss"] < report["before"]["unseen"]["log_loss"]
    assert report["after"]["seen"]["classwise_ECE"] < 0.6 * report["before"]["seen"]["classwise_ECE"]
    json.dumps(report, allow_nan=False)
    assert calibration_table(report).count("after") == 4  # three rows and the note on thresholds
    assert calibration_table(report, markdown=True).count("\n") == 7


@pytest.mark.parametrize("per_label", [False, True])
def test_round_trip(per_label):
    x, t, _, _ = make(n=100, labels=6, spread=0.5)
    settings = CalibrationSettings(per_label=per_label, l2=0.5)
    calibrator = Calibrator.fit(x, t, names(6), settings=settings, feature_names=["global", "matched", "max"])
    again = Calibrator.from_dict(json.loads(json.dumps(calibrator.to_dict())))
    asked = [*names(3), "never met", *names(2, 3)]
    assert torch.equal(again(x, asked), calibrator(x, asked))
    assert torch.equal(again(x.float()), calibrator(x.float()))
    assert again.to_dict() == calibrator.to_dict()
    assert (again.settings, again.feature_names) == (settings, ("global", "matched", "max"))


def test_files_of_earlier_versions():
    """They carry settings of maps that are gone: read where those were off, refused where one was on."""
    x, t, _, _ = make(n=100)
    calibrator = Calibrator.fit(x, t)
    old = calibrator.to_dict()
    old["ramatch_calibrator"]["settings"] |= {"monotone": False, "variant": "none", "completeness": 1.0, "smooth": True}
    old["tensors"]["curve"] = []
    assert torch.equal(Calibrator.from_dict(old)(x), calibrator(x))
    old["tensors"]["curve"] = [1.0, 1.0, 0.0]
    with pytest.raises(RamatchError, match="run ramatch calibrate again"):
        Calibrator.from_dict(old)


def test_a_label_not_met_gets_the_common_bias_and_less_certainty():
    x, t, _, _ = make(n=500, labels=30, spread=1.5)
    calibrator = Calibrator.fit(x, t, names(30), settings=CalibrationSettings(per_label=True))
    one = x[:, :1]
    bare = torch.sigmoid((one - calibrator.mean) / calibrator.scale @ calibrator.weights + calibrator.bias)
    unmet = calibrator(one, ["never met"])
    assert ((unmet - 0.5).abs() <= (bare - 0.5).abs()).all()
    assert ((unmet > 0.5) == (bare > 0.5)).all()
    torch.testing.assert_close(unmet, calibrator(one))
    assert not torch.allclose(unmet, calibrator(one, ["label 0"]), atol=1e-3)


@pytest.mark.parametrize("per_label", [False, True])
@pytest.mark.parametrize("case", ["no positives", "all positive", "one label", "constant", "separable", "one pair"])
def test_degenerate_data_gives_probabilities(case, per_label):
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
    settings = CalibrationSettings(per_label=per_label)
    calibrator = Calibrator.fit(x, t, names(x.shape[1]), settings=settings)
    far = torch.cat([x, x * 1e4, -x * 1e4])
    p = calibrator(far, names(x.shape[1]))
    assert torch.isfinite(p).all()
    assert ((p >= 0) & (p <= 1)).all()
    if case == "no positives":
        assert calibrator(x).max() < 0.3
    if case == "constant" and not per_label:
        assert calibrator(x).mean().item() == pytest.approx(t.double().mean().item(), abs=0.02)
    if case == "separable":
        assert ((calibrator(x, names(3)) > calibrator.threshold) == t).double().mean() > 0.9
    json.dumps(calibrator.report(x, t), allow_nan=False)


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
        (lambda x, t: Calibrator.fit(x, t, ["a"]), "1 classes"),
        (lambda x, t: Calibrator.fit(x, t, settings=CalibrationSettings(per_label=True)), "names of the labels"),
        (lambda x, t: Calibrator.fit(x, t)(x[..., :2]), "3 features a pair, got 2"),
        (lambda x, t: CalibrationSettings(l2=-1), "l2"),
        (lambda x, t: Calibrator.fit(x, t).report(x, t, [True]), "one flag per label"),
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
        {"label_bias": [1.0]},
        {"threshold": "a"},
        {"spread": float("nan")},
        {"labels": 3},
        {"settings": 4},
    ],
)
def test_a_hostile_file_is_refused(wrong: dict) -> None:
    fitted = Calibrator.fit(torch.randn(30, 2, 3), torch.rand(30, 2) > 0.5).to_dict()
    Calibrator.from_dict(fitted)
    for part in ("tensors", "ramatch_calibrator"):
        fitted[part] |= {name: value for name, value in wrong.items() if name in fitted[part]}
    with pytest.raises(RamatchError, match="not a calibrator"):
        Calibrator.from_dict(fitted)
