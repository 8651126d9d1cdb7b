"""Words that a model learned are told from strings that mean nothing, and from words it never met."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ramatch import Recognizer
from ramatch.assets import vocabulary
from ramatch.errors import RamatchError
from ramatch.evaluation.familiarity import known_words, meaningless
from ramatch.modeling.checkpoints.folder import load_known, save_known
from ramatch.modeling.known import Known, signs


@pytest.fixture(scope="module")
def ram():
    return Recognizer.from_pretrained("ramatch-mini", device="cpu").ram


@pytest.fixture(scope="module")
def known(ram):
    return known_words(ram, vocabulary("everyday"))


def familiarity(ram, known, names):
    with torch.no_grad():
        return known.familiarity(ram.encode_labels(names).unit[: len(names)])


def test_learned_words_are_familiar_and_nonsense_is_not(ram, known):
    assert np.median(familiarity(ram, known, vocabulary("everyday"))) > 0.95
    assert np.mean(familiarity(ram, known, ["puppies", "automobiles", "a cat", "trees", "blue shirt"])) > 0.7
    strange = familiarity(ram, known, ["xqzt", "qwe asd", "bxrtl", "vudo kepa", "59281", "%&/=", "ttoarcr"])
    assert strange.max() < 0.5
    assert ((strange >= 0) & (strange <= 1)).all()


def test_labels_carry_it_but_not_in_training(ram, known):
    own, ram.known = ram.known, None
    assert ram.encode_labels(["dog"]).familiarity is None
    ram.known = known
    try:
        labels = ram.encode_labels(["dog", "xqzt"])
        assert labels.familiarity[0] > 0.9 > 0.5 > labels.familiarity[1]
        again = ram.encode_labels(["xqzt"])
        assert again.familiarity[0] == pytest.approx(labels.familiarity[1], abs=0.02), "the same in any vocabulary"
        ram.train()
        assert ram.encode_labels(["dog"]).familiarity is None
    finally:
        ram.known = own
        ram.eval()


def test_round_trip_in_few_bytes(ram, known, tmp_path):
    dim = known.unit.shape[1]
    assert load_known(tmp_path, dim) is None
    save_known(known, tmp_path)
    names = ["dog", "violin", "xqzt", "lorry", "23"]
    again = load_known(tmp_path, dim)
    np.testing.assert_allclose(familiarity(ram, again, names), familiarity(ram, known, names), atol=0.03)
    assert (tmp_path / "known.safetensors").stat().st_size < 1.1 * known.unit.numel() + 10_000
    save_file({"rows": torch.zeros(3, 4)}, tmp_path / "known.safetensors")
    with pytest.raises(RamatchError, match=r"scale, weights missing; calibrate again"):
        load_known(tmp_path, dim)
    for sizes in ((60, dim, 60, 4), (60, 4, 60, 4), (60, dim, 3, 4), (60, dim, 60, 3)):
        rows, width, scales, weights = sizes
        tensors = {"rows": torch.ones(rows, width, dtype=torch.int8), "scale": torch.ones(scales, 1)}
        save_file(tensors | {"weights": torch.ones(weights)}, tmp_path / "known.safetensors")
        if sizes == (60, dim, 60, 4):
            assert load_known(tmp_path, dim) is not None
        else:
            with pytest.raises(RamatchError, match="sizes that do not fit"):
                load_known(tmp_path, dim)


def test_a_known_word_is_not_compared_with_itself():
    unit = torch.eye(60)
    own = signs(unit, unit, torch.arange(60))
    assert own.max() == 0
    assert signs(unit, unit)[:, 0].min() == 1
    assert signs(unit[:0], unit).shape == (0, 3)


def test_strings_without_meaning_are_many_different_and_always_the_same():
    words = ["dog", "traffic light", "umbrella"]
    found = meaningless(words, 300)
    assert len(set(found)) == len(found) == 300
    assert found == meaningless(words, 300)
    assert not set(found) & set(words)
    assert all(text.strip() for text in found)


def test_too_few_words_are_refused(ram):
    with pytest.raises(RamatchError, match="3 known words are too few"):
        known_words(ram, ["dog", "cat", "bus"])
    with pytest.raises(RamatchError, match="at least 50"):
        Known(torch.eye(10), torch.zeros(4))
