"""Vision towers of every shape that `TowerConfig` tells: the pass, folding, graphs, and gradients, with random weights.
That they are those of their families is shown in tests/parity/."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from tiny_models import DIM, TEXT, VISION, close, word_tokenizer
from torch._subclasses.fake_tensor import FakeTensorMode

from ramatch.config import preset
from ramatch.methods import METHODS, build_method
from ramatch.modeling.backbone import Backbone
from ramatch.modeling.fuse import fuse
from ramatch.modeling.graph import GraphedRAM
from ramatch.modeling.preprocess import Preprocess
from ramatch.modeling.ram import RAM
from ramatch.modeling.towers import TowerConfig
from ramatch.modeling.vision_parts import Rope
from ramatch.train.features import Stem, Views, cache_features
from ramatch.train.teachers import look, plain_regions

LABELS = ["cat", "red traffic light", "kite"]
PLAIN = replace(VISION, act="gelu", stem_norm=False, patch_bias=True)
ROPE = {"rope_base": 100.0, "rope_span": 4.0, "rope_start": 1.0}
SHAPES: dict[str, TowerConfig] = {
    "registers": replace(PLAIN, registers=3, layer_scale=True),
    "rotary": replace(VISION, **ROPE),
    "dinov3": replace(PLAIN, **ROPE, registers=2, layer_scale=True, learned_positions=False, rope_zero=0.5),
    "eva02": replace(PLAIN, **ROPE, gated=True, sub_norm=True, act="silu", head_bias=True),
    "siglip": replace(PLAIN, class_token=False, pool_heads=4, pool_mlp=80),
    "pe": replace(VISION, **ROPE, pool_heads=8, pool_mlp=80, head_bias=True),
    "mobileclip": replace(PLAIN, conv_stem=True, patch=16, image=64, head_bias=True),
}


def tower(shape: str, words: TowerConfig = TEXT) -> Backbone:
    config = SHAPES[shape]
    model = Backbone(config, words, DIM, Preprocess((config.image, config.image)), word_tokenizer(words.context))
    g = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        one = "norm" in name or "scale" in name or name.endswith(("ln1.weight", "ln2.weight"))
        std = 0.15 if p.ndim < 2 else p[0].numel() ** -0.5
        p.data.copy_(torch.randn(p.shape, generator=g) * std + float(one and p.ndim == 1 and "bias" not in name))
    return model.eval()


def ram_of(shape: str, **changes) -> RAM:
    options = {"adapted_layers": 2, "saa_layers": 2, "prompt_layers": 2, "visual_prompts": 3} | changes
    ram = RAM(tower(shape), preset("ramatch", **options)).eval()
    g = torch.Generator().manual_seed(1)
    for key, p in ram.named_parameters():
        if not key.startswith(("backbone.", "tau")):
            p.data.add_(torch.randn(p.shape, generator=g) * (0.5 if p.ndim < 4 else p[0].numel() ** -0.5))
    return ram


def images(ram: RAM, batch: int = 3, taller: int = 0) -> torch.Tensor:
    height, width = ram.preprocess.size
    g = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (batch, 3, height + taller, width), generator=g, dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_layers_one_by_one_are_the_whole(shape) -> None:
    """What RAM collects along the way, without any adapter, is what the tower itself gives."""
    ram = ram_of(shape, tss=False, visual_prompts=0, adapted_layers=0, saa_layers=0)
    pixels = torch.randn(2, 3, *ram.preprocess.size)
    image, patches = ram.backbone.encode_image(pixels)
    trunk = ram.trunk(pixels)
    close(trunk.image, image)
    close(ram.backbone.project(trunk.local), patches)
    seen, regions = look(ram.backbone, plain_regions(ram.backbone, 0), ram.region_set.stem(ram.backbone, pixels))
    close(seen, torch.nn.functional.normalize(image, dim=-1))
    close(regions, torch.nn.functional.normalize(patches, dim=-1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("changes", [{}, {"tss_input": "before"}, {"saa_layers": 0}], ids=["ours", "before", "no SAA"])
@torch.no_grad()
def test_fused_is_the_same(shape, changes) -> None:
    ram = ram_of(shape, **changes)
    labels, pixels = ram.encode_labels(LABELS), images(ram, taller=SHAPES[shape].patch)
    output = ram.recognize(ram.trunk(pixels), labels)
    fast = GraphedRAM(fuse(ram), best=True)(pixels, labels)
    for found, wanted in ((fast.region, output.region), (fast.image, output.image), (fast.best, output.best)):
        close(found, wanted)
    close(fast.scores, ram.score(output))


@pytest.mark.parametrize("shape", SHAPES)
def test_cached_features_train_the_same(shape) -> None:
    """A step from kept features has the gradients of one from pixels."""
    ram = ram_of(shape).train()
    pixels, targets = images(ram), torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 1]])

    def gradient(seen) -> torch.Tensor:
        ram.zero_grad()
        ram.loss(ram(seen, LABELS, targets), targets).backward()
        return torch.cat([p.grad.flatten() for p in ram.region_set.parameters()])

    stem = Stem(lambda x: ram.region_set.stem(ram.backbone, x), ram.preprocess, pixels.device, torch.float32)
    cache = cache_features(stem, pixels, Views(1))
    close(gradient(cache.pick(torch.zeros(3, dtype=torch.long), torch.arange(3))), gradient(pixels), 1e-4)


def test_saa_asks_patches_and_looks_at_the_towers_own_tokens() -> None:
    """Eq. 3 with registers: the class token and they are among the values, and only patches get an answer."""
    ram = ram_of("registers", tss=False, visual_prompts=0, adapted_layers=1, saa_layers=1)
    backbone, pixels = ram.backbone, torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        x = backbone.vision.embed(pixels)
        assert x.shape[1] == 1 + 3 + 16
        for block in backbone.vision.blocks[:-1]:
            x = block(x)
        last = backbone.vision.blocks[-1]
        v = last.project(x)[2]
        weights = (v @ v.transpose(-1, -2) * v.shape[-1] ** -0.5).softmax(-1)
        wanted = x[:, 4:] + last.merge(weights @ v)[:, 4:]
        close(ram.trunk(pixels).local, wanted)


def test_attention_pooling_of_one_token_is_that_token_alone() -> None:
    pool = tower("siglip").vision.pool
    tokens = torch.randn(5, 7, 64)
    with torch.no_grad():
        close(pool(tokens.flatten(0, 1)[:, None]).view(5, 7, 64), pool.alone(tokens))
        assert (pool(tokens) - pool.alone(tokens).mean(1)).abs().max() > 1e-3


def test_rotary_positions_depend_on_distances_alone() -> None:
    rope = Rope.of_grid((3, 4), torch.tensor([1.0, 0.3]), span=3.0, start=0.0, zero=0.0, first=2)
    assert rope.cos.shape == (12, 4)
    q, k = torch.randn(2, 1, 1, 1, 8)
    turned = [rope.turn(x.expand(1, 1, 15, 8)) for x in (q, k)]  # 2 before the patches and one after
    for x, whole in zip((q, k), turned, strict=True):
        assert torch.equal(whole[:, :, :2], x.expand(1, 1, 2, 8))
        assert torch.equal(whole[:, :, 14:], x)
        close(whole.norm(dim=-1), x.norm(dim=-1).expand(1, 1, 15))
    q, k = (whole[0, 0, 2:14].view(3, 4, 8) for whole in turned)
    close(q[0, 0] @ k[1, 2], q[1, 1] @ k[2, 3])  # one row down and two columns to the right
    assert (q[0, 0] @ k[1, 2] - q[0, 0] @ k[2, 1]).abs() > 1e-3
    assert torch.equal(rope.turn(torch.ones(1, 1, 1, 8)), torch.ones(1, 1, 1, 8))  # the class token alone


@torch.no_grad()
def test_attention_pooling_of_some_tokens() -> None:
    pool, tokens = tower("siglip").vision.pool, torch.randn(2, 7, 64)
    close(pool(tokens, torch.arange(7).expand(2, 7) < 4), pool(tokens[:, :4]))


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_waits_for_the_device(shape) -> None:
    """Tensors without content stand in for those of a GPU: a step that asks for a number could not be recorded."""
    ram = ram_of(shape)
    pixels, labels = torch.randn(2, 3, *ram.preprocess.size), ram.encode_labels(LABELS)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        trunk = ram.trunk(mode.from_tensor(pixels))
        regions = ram.region_set.regions(ram.backbone, trunk, labels.map(mode.from_tensor).tss)
        assert (trunk.image.shape, regions.shape) == ((2, DIM), (2, 16, DIM))


WALKING = ("tagclip", "dualcoop")  # compared systems that run the tower's layers themselves
PAIRS = [*product(WALKING, SHAPES), *((name, "pe") for name in METHODS if name not in WALKING)]


@pytest.mark.parametrize(("name", "shape"), PAIRS)
@torch.no_grad()
def test_compared_systems(name, shape) -> None:
    torch.manual_seed(0)
    ram = build_method(tower(shape), preset("ramatch", adapted_layers=2, saa_layers=2), {"name": name}).eval()
    pixels = images(ram)
    if METHODS[name].needs_images:
        ram.prepare([ram.trunk(pixels)], LABELS)
    output = ram.recognize(ram.trunk(pixels), ram.encode_labels(LABELS))
    assert output.image.shape == (3, 3)
    assert torch.isfinite(output.image).all()
    assert (output.image[0] - output.image[1]).abs().max() > 0


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_region_of_everything_is_the_whole(shape) -> None:
    """TagCLIP's second look, with no patch left out, gives the image's own feature."""
    ram = build_method(tower(shape), preset("ramatch", adapted_layers=2, saa_layers=2), {"name": "tagclip"}).eval()
    pixels = torch.randn(2, 3, *ram.preprocess.size)
    trunk = ram.trunk(pixels)
    close(trunk.image, ram.backbone.encode_image(pixels)[0])
    close(ram.encode_region(pixels, torch.ones(2, 16, dtype=torch.bool)), trunk.image)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_on_the_gpu(shape) -> None:
    ram = ram_of(shape)
    labels, pixels = ram.encode_labels(LABELS), images(ram, 5)
    with torch.no_grad():
        wanted = ram.recognize(ram.trunk(pixels), labels)
    ram.cuda()
    labels = ram.encode_labels(LABELS)
    engine = GraphedRAM(fuse(ram), batch_size=4, best=True)
    for _ in range(2):
        found = engine(pixels, labels)
        assert (found.image.cpu() - wanted.image).abs().max() < 1e-4
        assert (found.region.cpu() - wanted.region).abs().max() < 1e-4
    assert engine.why_eager is None
    rough = GraphedRAM(fuse(ram, torch.bfloat16), batch_size=4, best=True)(pixels, labels)
    assert (rough.image.cpu() - wanted.image).abs().max() < 0.03
