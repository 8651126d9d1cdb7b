"""The `reference` preset against the authors' program, as re-written in `authors_program.py`, by `import_authors`."""

from __future__ import annotations

import json
from pathlib import Path

import authors_program as theirs
import pytest
import torch

from ramatch.errors import RamatchError
from ramatch.modeling.checkpoints.authors import import_authors, ram_from_authors
from ramatch.modeling.checkpoints.folder import load_ram
from ramatch.modeling.ram import RAM

pytest.importorskip("open_clip", reason="CLIP's vocabulary comes from the open_clip package")

NAMES = ["cat", "traffic light", "person riding a bicycle", "café", "T-shirt", "dog's bed", "kite"]
TARGETS = torch.tensor([[1, 0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 0, 0]])


@pytest.fixture(scope="module")
def checkpoint() -> dict:
    return theirs.make_checkpoint()


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("authors")
    nested = {"epoch": 6, "model": {f"module.{k}": v for k, v in checkpoint.items()}}
    torch.save(nested, root / "last.pth")
    import_authors(root / "last.pth", root / "ours")
    return root / "ours"


@pytest.fixture
def ram(folder) -> RAM:
    return load_ram(folder)


@pytest.fixture
def pixels() -> torch.Tensor:
    return torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(3))


def full_ids(ram: RAM) -> torch.Tensor:
    """Token ids padded with zeros to the whole context, as the authors' program has them."""
    ids, lengths = ram.backbone.tokenize([f"A photo of a {name}." for name in NAMES])
    out = torch.zeros(len(NAMES), 77, dtype=torch.long)
    for i, n in enumerate(lengths):
        out[i, :n] = ids[i, :n]
    return out


def assert_near(ours: torch.Tensor, oracle: torch.Tensor, what: str, tolerance: float = 1e-4) -> None:
    scale = oracle.abs().max().clamp(min=1e-12)
    gap = (ours - oracle).abs().max() / scale
    assert gap < tolerance, f"{what}: relative difference {gap:.2e}"


def ours_for(name: str, ram: RAM) -> torch.Tensor:
    """Gradient of our parameter that holds the checkpoint's tensor `name`."""
    top = {"temperature": ram.tau_global, "temperature_loc": ram.tau_region}
    if name in top:
        return top[name].grad
    parts = name.split(".")
    layer = int(parts[parts.index("resblocks") + 1])
    if name.endswith("deep_embeds"):
        return ram.label_set.prompts.grad[layer - ram.label_set.start]
    j = layer - ram.region_set.start
    if name.endswith("adapt_embeds"):
        return ram.region_set.visual_prompts.grad[j]
    tss = ram.region_set.tss[j]
    modules = {
        "conv_adapter_layers1.0": tss.point[0],
        "conv_adapter_layers1.1": tss.point[1],
        "conv_adapter_layers2.0": tss.area[0],
        "conv_adapter_layers2.1": tss.area[1],
        "conv_adapter_layers": tss.mask,
        "conv_adapter_final": tss.back,
        "adapter_norm_q1": tss.norm_point,
        "adapter_norm_q2": tss.norm_area,
        "adapter_norm_kv": tss.norm_labels,
    }
    module, leaf = name.split("conv_adapter.", 1)[1].rsplit(".", 1)
    return getattr(modules[module], leaf).grad


def compare(ram: RAM, oracle: dict, pixels: torch.Tensor, targets: torch.Tensor | None):
    output = ram(pixels, NAMES, targets)
    labels = ram.encode_labels(NAMES)
    assert_near(ram.label_set(ram.backbone, NAMES), oracle["labels"], "label features")
    trunk = ram.trunk(pixels)
    assert_near(trunk.image, oracle["image"], "global feature")
    assert_near(ram.region_set.regions(ram.backbone, trunk, labels.tss), oracle["regions"], "regions")
    found = {"sim": output.sim, "plan": output.match.plan, "u": output.match.marginal, "score": ram.score(output)}
    for name, value in {**found, "s_G": output.image, "s_R": output.region}.items():
        assert_near(value, oracle[name], name)
    return output


def test_evaluation_agrees(ram, checkpoint, pixels):
    oracle = theirs.forward(checkpoint, pixels, full_ids(ram))
    with torch.no_grad():
        compare(ram, oracle, pixels, None)
    assert oracle["regions"].std(1).mean() > 0.1  # the regions differ, so agreement says something


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_training_step_agrees(ram, checkpoint, pixels, train):
    sd = {k: v.clone() for k, v in checkpoint.items()}
    names = theirs.learned(sd)
    for name in names:
        sd[name].requires_grad_()
    oracle = theirs.forward(sd, pixels, full_ids(ram), TARGETS, train)
    oracle["loss"].backward()

    ram.train(train)
    output = compare(ram, oracle, pixels, TARGETS)
    loss = ram.loss(output, TARGETS)
    assert_near(loss, oracle["loss"], "loss")
    loss.backward()
    assert len(names) == 2 * (1 + 2 * 3 + 2 + 6) + 2 + 2
    for name in names:
        assert sd[name].grad.abs().max() > 0, name
        assert_near(ours_for(name, ram), sd[name].grad, f"gradient of {name}")
    assert all(p.grad is None for p in ram.backbone.parameters())


def test_teacher_and_batch_matter(checkpoint, pixels, ram):
    """Sensitivity of the oracle itself: the plan with targets is another plan, and so are those of other batches."""
    ids = full_ids(ram)
    free = theirs.forward(checkpoint, pixels, ids)["plan"]
    guided = theirs.forward(checkpoint, pixels, ids, TARGETS)["plan"]
    assert (guided - free).abs().max() > 0.05 * free.max()


def test_random_batches_agree(pixels):
    """Other sizes: one adapted layer, six prompt layers of six, a 7×7 mask, NUS's temperature, one image, one label."""
    sd = theirs.make_checkpoint(
        layers=3, text_layers=6, adapted=1, prompted=6, kernel=7, visual_prompts=3, prompts=2, seed=5, tau_loc=2e-4
    )
    ram = ram_from_authors(sd)
    c = ram.config
    assert (c.adapted_layers, c.prompt_layers, c.mask_kernel, c.visual_prompts, c.prompt_tokens) == (1, 6, 7, 3, 2)
    assert (c.saa_layers, c.combine, c.mask_conv, c.stop, c.pixels) == (-1, "sum", "full", "scaling", "half")
    assert c.resize == "bilinear"
    oracle = theirs.forward(sd, pixels[:1], full_ids(ram))
    with torch.no_grad():
        compare(ram, oracle, pixels[:1], None)
        one = ram(pixels[:1], NAMES[:1])
    assert_near(one.region, theirs.forward(sd, pixels[:1], full_ids(ram)[:1])["s_R"], "one label")


def test_round_trip_keeps_every_tensor(checkpoint, folder, ram):
    direct = ram_from_authors(checkpoint)
    for (name, a), (other, b) in zip(direct.state_dict().items(), ram.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b), name
    assert ram.config == direct.config
    assert ram.tau_global.item() == pytest.approx(0.05)
    assert ram.tau_region.item() == pytest.approx(2e-3)
    assert ram.backbone.vision.config.act == "quick_gelu"
    assert json.loads((folder / "config.json").read_text())["ram"]["teacher"] == "regions"


@pytest.mark.parametrize("key", [None, "model", "state_dict", "net"])
def test_nesting_and_prefixes(tmp_path, key, monkeypatch):
    sd = _bare(theirs.make_checkpoint(vocab=8, width=64, layers=2, adapted=1))
    torch.save(sd if key is None else {key: sd, "optimizer": {"lr": 0.1}}, tmp_path / "x.pth")
    notes = import_authors(tmp_path / "x.pth", tmp_path / "out", templates=["a drawing of {}"])
    assert load_ram(tmp_path / "out").config.templates == ("a drawing of {}",)
    assert any("equals the student's" in note for note in notes)


def _bare(sd: dict) -> dict:
    """Without the text tower: the setting with given label features."""
    return {k: v for k, v in sd.items() if ".visual." in k or "temperature" in k or "logit_scale" in k}


def test_vision_alone_and_flat_names():
    sd = _bare(theirs.make_checkpoint(vocab=8, width=64, layers=2, adapted=1))
    flat = {k.replace(".conv_adapter.", "."): v for k, v in sd.items()}
    a, b = ram_from_authors(sd), ram_from_authors(flat)
    assert a.backbone.text is None
    assert a.config.prompts == "none"
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_other_teacher_is_noted(tmp_path):
    sd = _bare(theirs.make_checkpoint(vocab=8, width=64, layers=2, adapted=1))
    sd["clip_model_teacher.visual.proj"] = sd["clip_model_teacher.visual.proj"] + 1
    sd["criterion.weight"] = torch.ones(3)
    sd["clip_model.visual.transformer.resblocks.1.conv_adapter.conv_adapter_layers1.0.bias"] = torch.ones(3)
    torch.save(sd, tmp_path / "x.pth")
    notes = " ".join(import_authors(tmp_path / "x.pth", tmp_path / "out"))
    assert "clip_model_teacher.visual.proj" in notes
    assert "2 tensors have no place here and are left out: criterion.weight, clip_model.visual" in notes


BLOCK = "clip_model.visual.transformer.resblocks.1."


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({BLOCK + "conv_adapter.conv_adapter_final.weight": torch.zeros(3, 3, 1, 1)}, "conv_adapter_final.weight"),
        ({BLOCK + "conv_adapter.conv_adapter_layers.weight": torch.zeros(3, 2, 3, 3)}, "conv_adapter_layers.weight"),
        ({BLOCK + "conv_adapter.adapter_norm_q1.bias": None}, "conv_adapter.adapter_norm_q1.bias' is missing"),
        ({BLOCK + "adapt_embeds": torch.zeros(8, 3)}, "adapt_embeds' is (8, 3), expected (8, 64)"),
        ({"clip_model.visual.transformer.resblocks.0.adapt_embeds": None, BLOCK + "attn.qkv.weight": None}, "missing"),
        ({BLOCK + "attn.qkv.weight": torch.zeros(3, 3)}, "qkv.weight"),
        ({"temperature_loc": None}, "'temperature_loc' is missing"),
        ({"temperature": torch.ones(2)}, "'temperature' is (2,)"),
        ({"clip_model.visual.proj": None}, "proj"),
    ],
)
def test_damaged_checkpoints_are_named(change, says):
    sd = _bare(theirs.make_checkpoint(vocab=8, width=64, layers=2, adapted=1))
    for name, value in change.items():
        sd.pop(name, None)
        if value is not None:
            sd[name] = value
    with pytest.raises(RamatchError) as error:
        ram_from_authors(sd, name="last.pth")
    assert says in str(error.value)
    assert "last.pth" in str(error.value)


def test_gaps_and_strangers_are_refused(tmp_path):
    sd = _bare(theirs.make_checkpoint(vocab=8, width=64, layers=3, adapted=1))
    moved = {k.replace("resblocks.2.adapt", "resblocks.0.adapt"): v for k, v in sd.items()}
    with pytest.raises(RamatchError, match="without a gap"):
        ram_from_authors(moved)
    with pytest.raises(RamatchError, match=r"no tensor starts with 'clip_model\.'"):
        ram_from_authors({"visual.proj": torch.zeros(1)})
    with pytest.raises(RamatchError, match="no such checkpoint"):
        import_authors(tmp_path / "none.pth", tmp_path)
    torch.save({"model": sd, "args": Path("settings")}, tmp_path / "objects.pth")
    with pytest.raises(RamatchError, match=r"objects\.pth: .*may hold Python objects beside tensors"):
        import_authors(tmp_path / "objects.pth", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"saa_layers": 2}, "sim"),
        ({"combine": "mean"}, "sim"),
        ({"tss_input": "before"}, "sim"),
        ({"tau_u": None}, "plan"),
        ({"teacher": "labels"}, "plan"),
        ({"tkt": False}, "plan"),
        ({"lambda2": 0.01}, "plan"),
        ({"plan_scale": "labels"}, "s_R"),
        ({"score": "joint"}, "score"),
    ],
    ids=str,
)
def test_each_reference_setting_is_seen(ram, checkpoint, pixels, change, part):
    """The comparison can fail: with any one setting changed, the results are no longer the authors'."""
    other = RAM(ram.backbone, ram.config.replace(**change))
    other.load_state_dict(ram.state_dict())
    other.eval()
    with torch.no_grad():
        oracle = theirs.forward(checkpoint, pixels, full_ids(ram), TARGETS)
        output = other(pixels, NAMES, TARGETS)
    found = {"sim": output.sim, "plan": output.match.plan, "s_R": output.region, "score": other.score(output)}
    with pytest.raises(AssertionError, match="relative difference"):
        assert_near(found[part], oracle[part], part, 1e-2)


@pytest.mark.parametrize("part", ["deep_embeds", "adapt_embeds", "conv_adapter"])
def test_checkpoints_without_a_part(checkpoint, pixels, part):
    """Ablated models: no label prompts, no visual prompts, or no TSS; still the authors' numbers."""
    sd = {k: v for k, v in checkpoint.items() if part not in k}
    ram = ram_from_authors(sd)
    found = {
        "deep_embeds": ram.config.prompts,
        "adapt_embeds": ram.config.visual_prompts,
        "conv_adapter": ram.config.tss,
    }
    assert found[part] in ("none", 0, False)
    for targets in (None, TARGETS):
        oracle = theirs.forward(sd, pixels, full_ids(ram), targets)
        with torch.no_grad():
            compare(ram, oracle, pixels, targets)
