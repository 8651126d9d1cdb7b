"""Label set: prompts against a naive loop over full-length sequences, and what is not computed twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import TEXT, backbone, close, counted, tiny_ram

from ramatch.config import preset
from ramatch.errors import RamatchError
from ramatch.modeling import text as label_set
from ramatch.modeling.ram import RAM
from ramatch.modeling.text import LabelSet, clean_labels

LABELS = ["cat", "very old red traffic light", "person riding a small bicycle in the rain", "kite"]


def attention(block, x, allowed):
    """Plain multi-head attention with an explicit mask, projections taken apart."""
    n, t, w = x.shape
    source = x if block.post else block.ln1(x)
    weights, biases = block.qkv.weight.chunk(3), block.qkv.bias.chunk(3)
    q, k, v = (
        (source @ a.T + b).reshape(n, t, block.heads, -1).transpose(1, 2) for a, b in zip(weights, biases, strict=True)
    )
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
    return block.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, w))


def layer(block, x, allowed):
    if block.post:
        x = block.ln1(x + attention(block, x, allowed))
        return block.ln2(x + block.fc2(block.act(block.fc1(x))))
    x = x + attention(block, x, allowed)
    return x + block.fc2(block.act(block.fc1(block.ln2(x))))


def naive(model, sentences, prompts, start):
    """Every sentence at the full context (77 for CLIP), prompts put in and taken out at each layer from `start`."""
    text, out = model.text, []
    for sentence in sentences:
        ids, lengths = model.tokenizer([sentence])
        n, context = int(lengths), text.config.context
        padded = torch.zeros(1, context, dtype=torch.long)
        padded[0, :n] = ids[0]
        x = text.tokens(padded) + text.positions
        if text.types is not None:
            x = text.stem(x + text.types)
        for i, block in enumerate(text.blocks):
            r = prompts.shape[1] if i >= start else 0
            if r:
                x = torch.cat([x[:, :1], prompts[i - start][None], x[:, 1:]], dim=1)
            size = x.shape[1]
            if text.config.causal:
                allowed = torch.ones(size, size).tril().bool()
            else:
                allowed = (torch.arange(size) < n + r).expand(size, size)
            x = layer(block, x, allowed)
            if r:
                x = torch.cat([x[:, :1], x[:, 1 + r :]], dim=1)
        pooled = text.norm(x[:, n - 1]) if text.config.pool == "eot" else x[:, :n].mean(1)
        out.append(pooled @ model.text_projection.weight.T)
    return torch.cat(out)


@pytest.mark.parametrize("kind", ["clip", "dual"])
@pytest.mark.parametrize("layers", [0, 1, 2, 4])
def test_deep_prompts_equal_full_length_loop(kind, layers):
    """Cutting to the real length is exact: the naive loop pads to the whole context and masks explicitly."""
    ram = tiny_ram(kind=kind, prompt_layers=layers)
    sentences = [f"A photo of a {label}." for label in LABELS]
    with torch.no_grad():
        expected = naive(ram.backbone, sentences, ram.label_set.prompts, 4 - layers)
        found = ram.label_set(ram.backbone, LABELS)
        close(found, expected)
        for i, label in enumerate(LABELS):  # and no label sees its neighbours' padding
            close(ram.label_set(ram.backbone, [label]), expected[i : i + 1])
        frozen = naive(ram.backbone, sentences, ram.label_set.prompts, 4)
        close(ram.label_set.frozen(ram.backbone, LABELS), frozen)
        close(ram.backbone.encode_text(sentences), frozen)
    if layers:
        assert (found - frozen).abs().max() > 0.05


def test_prompts_learn_and_the_backbone_does_not():
    ram = tiny_ram()
    ram.label_set(ram.backbone, LABELS).square().sum().backward()
    assert (ram.label_set.prompts.grad.abs().amax((1, 2)) > 0).all()
    assert all(p.grad is None and not p.requires_grad for p in ram.backbone.parameters())


def test_frozen_layers_run_once_for_a_thousand_labels():
    """Re-encoding after an optimiser step runs the prompted layers only, whatever the order or subset of labels."""
    ram = tiny_ram()
    labels = [
        f"{a} {b} {c}" for a in "cat dog kite person light".split() for b in ["red", "blue"] * 10 for c in range(10)
    ]
    labels = [f"{label} {i}" for i, label in enumerate(labels)]
    assert len(labels) == 1000
    optimiser = torch.optim.SGD(ram.label_set.parameters(), lr=0.1)
    with counted(ram.backbone.text.blocks) as calls:
        before = ram.label_set(ram.backbone, labels)
        assert calls == {0: 1, 1: 1, 2: 1, 3: 1}
        before.square().mean().backward()
        optimiser.step()
        calls.clear()
        after = ram.label_set(ram.backbone, labels)
        assert calls == {2: 1, 3: 1}
        calls.clear()
        part = ram.label_set(ram.backbone, labels[700:300:-1])
        ram.label_set.frozen(ram.backbone, labels)
        assert (calls[0], calls[1]) == (0, 0)
    assert (after - before).abs().max() > 1e-4
    close(part, after[301:701].flip(0))


def test_teacher_labels_are_encoded_once():
    """The teacher's label features never change, so a training step must not pay for them again."""
    ram = tiny_ram()
    with counted(ram.backbone.text.blocks) as calls:
        first = ram.label_set.frozen(ram.backbone, LABELS)
        calls.clear()
        again = ram.label_set.frozen(ram.backbone, LABELS)
        assert not calls
    close(again, first, 0)


def test_kept_prefixes_follow_the_backbone():
    ram = tiny_ram()
    with torch.no_grad():
        single = ram.label_set(ram.backbone, LABELS)
        ram.double()
        assert ram.label_set(ram.backbone, LABELS).dtype == torch.float64
        close(ram.label_set(ram.backbone, LABELS).float(), single)
        assert ram.label_set.frozen(ram.backbone, LABELS).dtype == torch.float64
        ram.backbone.text.tokens.weight.mul_(2)
        ram.label_set.forget()
        assert (ram.label_set(ram.backbone, LABELS).float() - single).abs().max() > 1e-3


def test_kept_prefixes_are_exact_under_autocast():
    ram, other = tiny_ram(), tiny_ram()
    other.load_state_dict(ram.state_dict())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ram.label_set(ram.backbone, LABELS)
        guide = ram.label_set.frozen(ram.backbone, LABELS)
    with torch.no_grad():
        close(ram.label_set(ram.backbone, LABELS), other.label_set(other.backbone, LABELS), 0)
        close(guide, other.label_set.frozen(other.backbone, LABELS), 0)


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(label_set, "KEEP", 3)
    monkeypatch.setattr(label_set, "CHUNK", 2)
    ram = tiny_ram()
    with torch.no_grad():
        expected = torch.cat([ram.label_set(ram.backbone, [label]) for label in LABELS])
        close(ram.label_set(ram.backbone, LABELS), expected)
        close(ram.label_set(ram.backbone, LABELS[::-1]), expected.flip(0))
    assert len(ram.label_set._kept) <= 3 + len(LABELS)


def test_tagging_then_training():
    """Prefixes kept while tagging (inference mode) serve training afterwards."""
    ram = tiny_ram()
    with torch.inference_mode():
        ram.encode_labels(LABELS)
        ram.label_set.frozen(ram.backbone, LABELS)
    ram.encode_labels(LABELS).unit.sum().backward()
    assert ram.label_set.prompts.grad.abs().max() > 0


def test_several_templates_are_a_mean_of_unit_features():
    templates = ("A photo of a {}.", "the {} in the rain")
    ram = tiny_ram(templates=templates)
    ones = [tiny_ram(templates=(t,)) for t in templates]
    for one in ones:
        one.load_state_dict(ram.state_dict())
    with torch.no_grad():
        found = ram.label_set(ram.backbone, LABELS)
        each = [F.normalize(one.label_set(one.backbone, LABELS), dim=-1) for one in ones]
        close(found, (each[0] + each[1]) / 2)
        each = [F.normalize(one.label_set.frozen(one.backbone, LABELS), dim=-1) for one in ones]
        close(ram.label_set.frozen(ram.backbone, LABELS), (each[0] + each[1]) / 2)


def test_braces_in_templates_and_labels_are_text():
    ram = tiny_ram(templates=("A {photo} of {}",), prompts="none", prompt_layers=0)
    with torch.no_grad():
        close(ram.label_set(ram.backbone, ["{cat}"]), ram.backbone.encode_text(["A {photo} of {cat}"]))


def coop_naive(model, label, context):
    """The learned words stand between the first token and the label's own, from the first layer on."""
    text = model.text
    ids, _ = model.tokenizer([f"{label}."])
    words = text.tokens(ids)
    x = torch.cat([words[:, :1], context[None], words[:, 1:]], dim=1)
    t = x.shape[1]
    x = x + text.positions[:t]
    if text.types is not None:
        x = text.stem(x + text.types)
    allowed = torch.ones(t, t).tril().bool() if text.config.causal else torch.ones(t, t).bool()
    for block in text.blocks:
        x = layer(block, x, allowed)
    pooled = text.norm(x[:, -1]) if text.config.pool == "eot" else x.mean(1)
    return pooled @ model.text_projection.weight.T


@pytest.mark.parametrize("kind", ["clip", "dual"])
def test_coop_and_dualcoop(kind):
    ram, dual = tiny_ram(kind=kind, prompts="coop"), tiny_ram(kind=kind, prompts="dualcoop", prompt_tokens=5)
    assert ram.label_set.prompts.shape == (1, 4, 48)
    assert dual.label_set.prompts.shape == (2, 5, 48)
    with torch.no_grad():
        found = ram.label_set(ram.backbone, LABELS)
        close(found, torch.cat([coop_naive(ram.backbone, label, ram.label_set.prompts[0]) for label in LABELS]))
        both = dual.label_set(dual.backbone, LABELS)
        assert both.shape == (2, len(LABELS), 32)
        for found, context in zip(both, dual.label_set.prompts, strict=True):
            close(found, torch.cat([coop_naive(dual.backbone, label, context) for label in LABELS]))
    for model in (ram, dual):
        labels = model.encode_labels(LABELS)
        (labels.unit.sum() + (0 if labels.negative is None else labels.negative.square()[:, 0].sum())).backward()
        assert (model.label_set.prompts.grad.abs().amax((1, 2)) > 0).all()
        assert all(p.grad is None for p in model.backbone.parameters())


def test_dualcoop_scores_are_differences():
    dual = tiny_ram(prompts="dualcoop")
    labels = dual.encode_labels(LABELS)
    features = torch.randn(3, 32)
    unit = F.normalize(features, dim=-1)
    close(dual.similarity(features, labels), unit @ labels.unit.T - unit @ labels.negative.T)


def test_coop_context_must_fit():
    ram = tiny_ram(prompts="coop", prompt_tokens=20)
    with pytest.raises(RamatchError, match="exceeds 77 tokens"):
        ram.label_set(ram.backbone, ["cat " * 70])


def test_long_labels_keep_their_end_token():
    model = backbone()
    ids, lengths = model.tokenize(["cat " * 200, "dog"])
    assert ids.shape == (2, TEXT.context)
    assert ids[0, -1] == ids[1, 2] == 79
    assert lengths.tolist() == [77, 3]


def test_text_tower_limits():
    with pytest.raises(RamatchError, match="prompt_layers is 9, but 'tiny-clip' has 4 text layers"):
        LabelSet(backbone(), preset("paper", prompt_layers=9))
    alone = backbone(text=False)
    ram = RAM(alone, preset("paper", adapted_layers=1, saa_layers=1))
    with pytest.raises(RamatchError, match="is a vision tower alone; give label features"):
        ram.encode_labels(["cat"])


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ("cat", "not one string"),
        ([], "no labels"),
        (["a", ""], "non-empty"),
        (["a", 3], "non-empty"),
        (["a ", "a"], "given twice"),
    ],
)
def test_clean_labels(labels, says):
    with pytest.raises(RamatchError, match=says):
        clean_labels(labels)
    assert clean_labels([" cat ", "Cat"]) == ("cat", "Cat")


def test_given_features_are_kept_for_steps_that_learn():
    """What evaluation looked up is used by the next training step: on the same device, and not an inference tensor."""
    model = RAM(backbone(), preset("ramatch"))
    model.backbone.text, names = None, ["cat", "kite"]
    model.backbone.given_labels = {name: torch.randn(model.backbone.dim) for name in names}
    with torch.inference_mode():
        first = model.label_set.frozen(model.backbone, names)
    again = model.label_set.frozen(model.backbone, names)
    assert again is first
    assert not again.is_inference()
    assert model.label_set.constants()[1][1] is again
    close(again, torch.stack(list(model.backbone.given_labels.values())))
