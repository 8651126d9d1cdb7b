"""Region set: SAA, TSS and the ladder against naive versions; the split in two; what runs how often."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import backbone, close, counted, pixels, tiny_ram

from ramatch.config import PRESETS, preset
from ramatch.errors import RamatchError
from ramatch.modeling.ram import RAM, TSS, Trunk

LABELS = ["cat", "red traffic light", "kite"]


def heads_of(block, x, part):
    """Head by head: one of query, key, value (0, 1, 2) of x (T, W) as a list of (T, W/heads)."""
    w = x.shape[-1]
    rows = slice(part * w, (part + 1) * w)
    y = block.ln1(x) @ block.qkv.weight[rows].T + block.qkv.bias[rows]
    return y.split(w // block.heads, dim=-1)


def out_of(block, heads):
    y = torch.cat(heads, dim=-1) @ block.out.weight.T + block.out.bias
    return y if block.scale1 is None else y * block.scale1


def naive_saa(block, x):
    """softmax(V Vᵀ d^-½) V for each head of one image's class token and patches (1+M, W)."""
    found = []
    for v in heads_of(block, x, 2):
        found.append(torch.softmax(v @ v.T * v.shape[-1] ** -0.5, dim=-1) @ v)
    return out_of(block, found)


def naive_block(block, x, extra=None):
    """The frozen layer on one image (1+M, W), with visual prompts appended and dropped."""
    y = x if extra is None else torch.cat([x, extra])
    q, k, v = (heads_of(block, y, part) for part in range(3))
    found = [torch.softmax(a @ b.T * a.shape[-1] ** -0.5, dim=-1) @ c for a, b, c in zip(q, k, v, strict=True)]
    y = y + out_of(block, found)
    z = block.fc2(block.act(block.fc1(block.ln2(y))))
    return (y + (z if block.scale2 is None else z * block.scale2))[: len(x)]


def naive_tss(tss, patches, grid, labels):
    """TSS on one batch (B, M, W), with loops over images and positions where that is plainer."""
    b, _, w = patches.shape
    rows, columns = grid
    image = patches.reshape(b, rows, columns, w).permute(0, 3, 1, 2)
    keys = F.layer_norm(labels, labels.shape[-1:], tss.norm_labels.weight, tss.norm_labels.bias)
    streams = []
    for stream, norm, padding in ((tss.point, tss.norm_point, 0), (tss.area, tss.norm_area, 1)):
        y = F.conv2d(image, stream[0].weight, padding=padding)
        bn = stream[1]
        y = F.batch_norm(y, bn.running_mean.clone(), bn.running_var.clone(), bn.weight, bn.bias, training=tss.training)
        y = F.gelu(y)
        looked = torch.empty_like(y)
        for i in range(b):
            for r in range(rows):
                for c in range(columns):
                    query = F.layer_norm(y[i, :, r, c], (y.shape[1],), norm.weight, norm.bias)
                    weights = torch.softmax(keys @ query * len(query) ** -0.5, dim=0)
                    looked[i, :, r, c] = y[i, :, r, c] + weights @ keys
        streams.append(looked)
    both = torch.cat(streams, dim=1)
    pooled = torch.stack([both.mean(1), both.max(1).values], dim=1)
    kernel = tss.mask.weight
    masks = torch.sigmoid(F.conv2d(pooled, kernel, padding=kernel.shape[-1] // 2, groups=tss.mask.groups))
    chosen = streams[0] * masks[:, 0:1] + streams[1] * masks[:, 1:2]
    return F.conv2d(chosen, tss.back.weight).flatten(2).transpose(1, 2)


def naive_regions(ram, images, labels, *, prompts=True):
    """One straight pass over all layers with both streams side by side: global, regions. Eq. 5 as the preset reads
    it."""
    model, region_set, c = ram.backbone, ram.region_set, ram.config
    tower, layers = model.vision, len(model.vision.blocks)
    saa_from = 0 if c.saa_layers == -1 else layers - c.saa_layers
    grid = (images.shape[-2] // 8, images.shape[-1] // 8)
    x = tower.embed(images)
    local, chosen = None, 0
    for i, block in enumerate(tower.blocks):
        before, j = x, i - (layers - c.adapted_layers)
        extra = region_set.visual_prompts[j] if prompts and j >= 0 and c.visual_prompts else None
        x = torch.stack([naive_block(block, one, extra) for one in before])
        half = 0.5 if c.combine == "mean" and c.tss and j >= 0 else 1.0
        if j >= 0 and c.tss:
            added = naive_tss(region_set.tss[j], (before if c.tss_input == "before" else x)[:, 1:], grid, labels)
            chosen = chosen + half * c.tss_share * added
        if i >= saa_from:
            local = before[:, 1:] if local is None else local
            local = local + half * torch.stack([naive_saa(block, one)[1:] for one in before])
    local = local + chosen
    image = tower.norm(x[:, 0]) @ model.visual_projection.weight.T
    if model.global_pool == "cls+mean":
        image = image + (tower.norm(x[:, 1:]) @ model.visual_projection.weight.T).mean(1)
    return image, tower.norm(local) @ model.visual_projection.weight.T


@pytest.mark.parametrize("kind", ["clip", "dual"])
def test_saa_is_value_attention_per_head(kind):
    """Every row of softmax(V Vᵀ d^-½) V through the frozen output projection; the class token takes part."""
    model = backbone(kind)
    block = model.vision.blocks[2]
    x = torch.randn(2, 17, 64)
    expected = torch.stack([naive_saa(block, one) for one in x])
    close(block.self_aware(block.project(x)[2]), expected)
    close(block.self_aware(block.project(x)[2], slice(1, None)), expected[:, 1:])
    without = torch.stack([naive_saa(block, one[1:]) for one in x])
    assert (without - expected[:, 1:]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["clip", "dual"])
@pytest.mark.parametrize("name", ["paper", "reference", "ramatch"])
@pytest.mark.parametrize("size", [(32, 32), (64, 24)])
def test_regions_equal_one_naive_pass(name, kind, size):
    """trunk + regions against a single pass; the visual prompts act on the main stream and stay out of SAA."""
    ram, images = tiny_ram(name, kind), pixels(2, *size)
    with torch.no_grad():
        labels = ram.encode_labels(LABELS).tss
        image, expected = naive_regions(ram, images, labels)
        trunk, teacher = ram.region_set.trunk(ram.backbone, images, teacher=True)
        assert trunk.grid == (size[0] // 8, size[1] // 8)
        close(trunk.image, image)
        close(ram.region_set.regions(ram.backbone, trunk, labels), expected)
        silent = RAM(ram.backbone, ram.config.replace(tss=False, visual_prompts=0))
        close(teacher, naive_regions(silent, images, labels)[1])
    assert (teacher - expected).abs().max() > 0.05


@pytest.mark.parametrize(
    "change", [{"saa_layers": 3}, {"saa_layers": 1}, {"adapted_layers": 4}, {"tss": False}, {"mask_kernel": 5}], ids=str
)
def test_other_ladders(change):
    ram, images = tiny_ram("paper", **change), pixels()
    with torch.no_grad():
        labels = ram.encode_labels(LABELS).tss
        _, expected = naive_regions(ram, images, labels)
        close(ram.region_set.regions(ram.backbone, ram.trunk(images), labels), expected)


def test_no_local_stream_is_the_main_streams_patches():
    ram = tiny_ram("paper", saa_layers=0, tss=False, visual_prompts=0)
    with torch.no_grad():
        image, patches = ram.backbone.encode_image(pixels())
        trunk, teacher = ram.region_set.trunk(ram.backbone, pixels(), teacher=True)
        close(ram.region_set.regions(ram.backbone, trunk, torch.zeros(1, 32)), patches)
        close(teacher, patches)
        close(trunk.image, image)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("conv", ["full", "depthwise"])
@pytest.mark.parametrize("grid", [(4, 4), (8, 3), (1, 1)])
def test_tss_against_loops(mode, conv, grid):
    tss = TSS(48, 24, preset("paper", mask_conv=conv)).train(mode == "train")
    for p in tss.parameters():
        p.data.add_(torch.randn_like(p) * 0.3)
    for bn in (tss.point[1], tss.area[1]):
        bn.running_mean.normal_()
        bn.running_var.uniform_(0.5, 2)
    patches, labels = torch.randn(2, grid[0] * grid[1], 48), torch.randn(5, 24)
    expected = naive_tss(tss, patches, grid, labels)
    close(tss(*tss.streams(patches, grid), grid, labels), expected)
    assert tss.mask.weight.shape == ((2, 2, 3, 3) if conv == "full" else (2, 1, 3, 3))


def test_zero_start_leaves_the_frozen_regions():
    """`tss_init="zero"`: before training, TSS adds nothing, whatever the labels."""
    ram = RAM(backbone(), preset("ramatch", adapted_layers=2, saa_layers=2, prompt_layers=2)).eval()
    images = pixels()
    with torch.no_grad():
        trunk = ram.trunk(images)
        labels = ram.encode_labels(LABELS).tss
        expected = ram.backbone.visual_projection(ram.backbone.vision.norm(trunk.local))
        close(ram.region_set.regions(ram.backbone, trunk, labels), expected, 0)


def test_part_of_what_tss_learned_outside_training():
    ram = tiny_ram("ramatch", "dual", tss_init="default")
    labels = F.normalize(torch.randn(4, ram.backbone.dim), dim=-1)
    unprojected = SimpleNamespace(project=lambda x: x)  # so shares add up

    def regions(share: float, training: bool = False) -> torch.Tensor:
        part = RAM(ram.backbone, ram.config.replace(tss_share=share))
        part.load_state_dict(ram.state_dict())
        for module in part.modules():
            module.training = training and not isinstance(module, torch.nn.BatchNorm2d)
        with torch.no_grad():
            return part.region_set.regions(unprojected, part.trunk(pixels()), labels)

    none, some, full = regions(0.0), regions(0.7), regions(1.0)
    assert not torch.allclose(none, full)
    close(some, torch.lerp(none, full, 0.7))
    close(regions(0.7, training=True), full)


def test_visual_prompts_touch_the_global_feature_only_through_attention():
    ram, images = tiny_ram("paper", tss=False, adapted_layers=1, saa_layers=1), pixels()
    with torch.no_grad():
        before = ram.trunk(images)
        ram.region_set.visual_prompts.mul_(-2)
        after = ram.trunk(images)
    close(after.local, before.local, 0)  # SAA of the last layer reads what came before the prompts
    assert (after.image - before.image).abs().max() > 1e-3


def test_trunk_rows_and_concatenation():
    ram, images = tiny_ram(), pixels(3)
    with torch.no_grad():
        whole = ram.trunk(images)
        parts = Trunk.cat([ram.trunk(images[:1]), ram.trunk(images[1:])])
        labels = ram.encode_labels(LABELS)
        assert len(whole) == len(parts) == 3
        close(ram.recognize(parts, labels).region, ram.recognize(whole, labels).region)
        close(ram.recognize(whole[1:2], labels).region, ram.recognize(whole, labels).region[1:2])


def test_pedestrian_crops():
    """256×128 pixels: a 2:1 grid, from one forward call."""
    ram = tiny_ram("reference")
    output = ram(pixels(2, 256, 128), LABELS, torch.tensor([[1, 0, 0], [0, 1, 1]]))
    assert output.grid == (32, 16)
    assert output.sim.shape == (2, 512, 3)
    assert torch.isfinite(ram.loss(output, torch.tensor([[1, 0, 0], [0, 1, 1]])))


@pytest.mark.parametrize("name", ["paper", "reference", "ramatch"])
def test_frozen_layers_run_once_a_step(name):
    """Student and teacher share the layers before the first learnable token; only the last ones run for each."""
    ram = tiny_ram(name).train()
    targets = torch.tensor([[1, 0, 0], [0, 1, 1]])
    ram.encode_labels(LABELS)
    with counted(ram.backbone.vision.blocks) as calls, counted(ram.backbone.text.blocks) as read:
        ram.loss(ram(pixels(), LABELS, targets), targets).backward()
        assert calls == {0: 1, 1: 1, 2: 2, 3: 2}
        assert read[0] == read[1] == 0  # kept
        calls.clear()
        with torch.no_grad():
            ram(pixels(), LABELS)
        assert calls == {0: 1, 1: 1, 2: 1, 3: 1}
    assert all(p.grad is None for p in ram.backbone.parameters())
    silent = [
        k for k, p in ram.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.abs().max() > 0)
    ]
    assert not silent


def test_without_visual_prompts_the_whole_tower_is_shared():
    ram = tiny_ram("paper", visual_prompts=0).train()
    targets = torch.tensor([[1, 0, 0], [0, 1, 1]])
    with counted(ram.backbone.vision.blocks) as calls:
        ram.loss(ram(pixels(), LABELS, targets), targets).backward()
        assert calls == {0: 1, 1: 1, 2: 1, 3: 1}
    assert ram.region_set.tss[0].back.weight.grad.abs().max() > 0


def test_new_vocabulary_runs_no_layer():
    ram = tiny_ram()
    with torch.no_grad():
        trunk = ram.trunk(pixels())
        labels = ram.encode_labels(["dog", "bicycle"])
        with counted(ram.backbone.vision.blocks) as calls:
            ram.recognize(trunk, labels)
            assert not calls


def test_training_mode_leaves_the_backbone_alone():
    ram = tiny_ram().train()
    assert ram.training
    assert ram.region_set.tss[0].training
    assert not ram.backbone.training
    before = ram.region_set.tss[0].point[1].running_mean.clone()
    ram(pixels(), LABELS)
    assert not torch.equal(ram.region_set.tss[0].point[1].running_mean, before)


@pytest.mark.parametrize("setting", ["adapted_layers", "saa_layers"])
def test_more_layers_than_there_are(setting):
    with pytest.raises(RamatchError, match=f"{setting} is 9, but 'tiny-clip' has 4 layers"):
        RAM(backbone(), PRESETS["paper"].replace(prompt_layers=1, **{"adapted_layers": 1, "saa_layers": 1, setting: 9}))
