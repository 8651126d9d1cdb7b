"""The parts of an alignment: losses against naive loops, towers against `transformers`, retrieval by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch
from align_helpers import WORDS
from tiny_models import backbone

from ramatch.data.splits import hold_out, stable_order
from ramatch.errors import RamatchError
from ramatch.evaluation.retrieval import retrieval
from ramatch.modeling.backbone import Backbone
from ramatch.modeling.checkpoints.folder import save_backbone
from ramatch.train.align import contrast
from ramatch.train.assemble import join_towers


def test_contrast_against_a_double_loop():
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 7, generator=g) * 3
    kind = torch.randint(3, (5, 7), generator=g)  # 0 negative, 1 positive, 2 neither
    kind[0] = 0  # a row without positives
    positive, negative = kind == 1, kind == 0
    losses = []
    for i in range(5):
        for j in range(7):
            if positive[i, j]:
                below = math.exp(scores[i, j]) + sum(math.exp(scores[i, k]) for k in range(7) if negative[i, k])
                losses.append(-math.log(math.exp(scores[i, j]) / below))
    assert contrast(scores, positive, negative).item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_contrast_without_positives_or_negatives():
    scores = torch.randn(3, 4, requires_grad=True)
    none, all_ = torch.zeros(3, 4, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool)
    assert contrast(scores, none, all_).item() == 0
    nothing_against = contrast(scores, all_, none)
    assert nothing_against.item() == pytest.approx(0, abs=1e-6)
    nothing_against.backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert contrast(torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.bool), torch.zeros(3, 0, dtype=torch.bool)) == 0


def test_joined_towers_equal_those_of_transformers(towers, tmp_path):
    from transformers import BertModel, Dinov2Model

    joined = join_towers(*towers, image_size=32, dim=20, global_pool="cls+mean").eval()
    assert joined.name == "tiny-dinov2+tiny-bert"
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        hidden = Dinov2Model.from_pretrained(towers[0])(pixels).last_hidden_state
        y = hidden @ joined.visual_projection.weight.T
        image, patches = joined.encode_image(pixels)
        torch.testing.assert_close(patches, y[:, 1:], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(image, y[:, 0] + y[:, 1:].mean(1), atol=1e-5, rtol=1e-4)
        text = "a red square at the left"
        ids, lengths = joined.tokenize([text, "a square"])
        assert ids[0].tolist() == [2, *(4 + WORDS.index(word) for word in text.split()), 3]
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        hidden = BertModel.from_pretrained(towers[1])(ids, attention_mask=mask).last_hidden_state
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        assert joined.text_projection is not None
        expected = pooled @ joined.text_projection.weight.T
        torch.testing.assert_close(joined.encode_text([text, "a square"]), expected, atol=1e-5, rtol=1e-4)
    assert joined.vision.config.image == 32
    assert len(joined.vision.positions) == 17  # stored for the size in use
    save_backbone(joined, tmp_path / "both")
    loaded = Backbone.from_pretrained(tmp_path / "both")
    torch.testing.assert_close(loaded.encode_image(pixels)[0], image)


def test_towers_that_cannot_be_joined(towers, tmp_path):
    options = {"image_size": 32, "dim": 20, "global_pool": "cls"}
    with pytest.raises(RamatchError, match="tiny-bert is a 'bert' model, which has no vision tower; give it as --text"):
        join_towers(towers[1], towers[0], **options)
    with pytest.raises(
        RamatchError, match="tiny-dinov2 is a 'dinov2' model, which has no text tower; give it as --vision"
    ):
        join_towers(towers[0], towers[0], **options)
    with pytest.raises(RamatchError, match="30 is not a multiple of the patch size 8"):
        join_towers(*towers, **(options | {"image_size": 30}))
    with pytest.raises(RamatchError, match="no such file or folder"):
        join_towers(tmp_path / "no" / "tower", towers[1], **options)


# ------------------------------------------------------------------------------------------------------ retrieval


def test_retrieval_against_a_naive_computation():
    model = backbone("dual")
    pixels = torch.randint(0, 256, (9, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    words = "cat dog red blue traffic light person riding bicycle small large old kite rain".split()
    rng = random.Random(0)
    captions = [[" ".join(rng.sample(words, 4)) for _ in range(1 + i % 3)] for i in range(9)]
    found = retrieval(model, pixels, captions, ks=(1, 3, 100))
    with torch.no_grad():
        images = model.encode_image(model.preprocess.normalize(pixels))[0]
        flat = [(i, c) for i, texts in enumerate(captions) for c in texts]
        texts = model.encode_text([c for _, c in flat])
    cosine = [[float(torch.cosine_similarity(a, b, dim=0)) for b in texts] for a in images]
    for k in (1, 3, 100):
        hits = 0
        for i in range(9):
            best = sorted(range(len(flat)), key=lambda j: -cosine[i][j])[:k]
            hits += any(flat[j][0] == i for j in best)
        assert found[f"image→text R@{k}"] == pytest.approx(100 * hits / 9, abs=1e-4)
        hits = 0
        for j, (owner, _) in enumerate(flat):
            hits += owner in sorted(range(9), key=lambda i: -cosine[i][j])[:k]
        assert found[f"text→image R@{k}"] == pytest.approx(100 * hits / len(flat), abs=1e-4)
    assert 0 < found["image→text R@3"] < 100  # so that agreement says something
    assert found["image→text R@100"] == found["text→image R@100"] == 100


def test_a_stable_order_depends_on_names_alone():
    keys = [f"images/{i}.jpg" for i in range(50)]
    order = [keys[i] for i in stable_order(keys)]
    assert sorted(order) == sorted(keys)
    assert order != keys
    mixed = random.Random(1).sample(keys, 50)
    assert [mixed[i] for i in stable_order(mixed)] == order
    some = mixed[:20]
    assert [some[i] for i in stable_order(some)] == [key for key in order if key in set(some)]
    assert [keys[i] for i in stable_order(keys, "test")] != order
    assert [keys[i] for i in hold_out(keys, 7)] == sorted(order[:7], key=keys.index)
    assert hold_out(keys, 0.14) == hold_out(keys, 7)
    assert hold_out(keys, 0) == []
    assert len(hold_out(keys, 0.001)) == 1
