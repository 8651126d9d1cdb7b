"""TagCLIP: its equations against a plain rewrite; a small thing that the global feature overlooks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from tiny_models import backbone

from ramatch.config import preset
from ramatch.errors import RamatchError
from ramatch.methods import build_method
from ramatch.methods.tagclip import SeenTrunk, TagCLIP, crop, refine
from ramatch.modeling.backbone import Backbone, TowerConfig
from ramatch.modeling.preprocess import Preprocess

LABELS = ["dog", "cat", "red car", "boat", "kite"]


def made(own: Backbone, name: str = "ramatch", **settings: object) -> TagCLIP:
    ram = build_method(own, preset(name), {"name": "tagclip", "settings": settings}).eval()
    assert isinstance(ram, TagCLIP)
    return ram


def images(count: int = 3, side: int = 32) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=g)


def test_refinement() -> None:
    g = torch.Generator().manual_seed(0)
    coarse = torch.rand(2, 6, 4, generator=g).double().softmax(-1)
    attention = torch.rand(2, 6, 6, generator=g).double()
    masked = attention * (attention > attention.mean())
    found = refine(coarse, masked)
    for b in range(2):
        for c in range(4):
            once = [sum(float(masked[b, i, j] * coarse[b, j, c]) for j in range(6)) for i in range(6)]
            keep = [value >= np.mean(once) for value in once]
            for i in range(6):
                expected = sum(float(masked[b, i, j] * coarse[b, j, c]) for j in range(6) if keep[j])
                assert float(found[b, i, c]) == pytest.approx(expected, abs=1e-12)


def test_attention_and_patches() -> None:
    """What the trunk keeps, layer by layer: votes over the layers' attention, patches by their own values."""
    own = backbone().double()
    ram = made(own, votes=0.4)
    with torch.no_grad():
        trunk = ram.trunk(images())
        x = own.vision.embed(ram.preprocess.normalize(images()).double())
        found = []
        for block in own.vision.blocks:
            q, k, v = (block.split(part) for part in block.qkv(block.ln1(x)).chunk(3, -1))
            attention = torch.einsum("bhid,bhjd->bhij", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
            found.append(attention.mean(1)[:, 1:, 1:].numpy())
            local = x + block.out(v.transpose(1, 2).flatten(2))
            local = local + block.fc2(block.act(block.fc1(block.ln2(local))))
            x = block(x)
    assert torch.allclose(trunk.local, local[:, 1:], atol=1e-9)
    assert torch.allclose(trunk.image, own.project(x[:, 0]), atol=1e-9)
    layers = np.stack(found[:-1])
    for b in range(3):
        for i in range(16):
            for j in range(16):
                votes = sum(bool(layer[b, i, j] > layer[b].mean()) for layer in layers)
                expected = layers[:, b, i, j].mean() if votes > 0.4 * 3 else 0.0
                assert float(trunk.affinity[b, i, j]) == pytest.approx(expected, abs=1e-6)


def test_score() -> None:
    """λ max_i P_coarse + (1 − λ) P_global, the latter of each label's own crop, by pictures cut and resized here."""
    own = backbone(text=False)
    own.given_labels = dict(zip(LABELS, F.normalize(torch.randn(5, own.dim), dim=-1), strict=True))
    ram = made(own, local=0.3, crops=2)
    labels = ram.encode_labels(LABELS)
    with torch.no_grad():
        trunk = ram.trunk(images())
        found = torch.sigmoid(ram.recognize(trunk, labels).image)
        regions = ram.features(trunk, labels)[1]
        coarse = (20 * ram.similarity(regions, labels)).softmax(-1)
        refined = refine(coarse, trunk.affinity)
        for b in range(3):
            local = coarse[b].amax(0)
            asked = set(local.topk(2).indices.tolist())
            for c in range(5):
                if c not in asked:
                    feature = trunk.image[b]
                else:
                    score = refined[b, :, c]
                    mask = (score - score.min() >= 0.5 * (score.max() - score.min())).reshape(4, 4)
                    rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
                    y, x = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
                    cut = trunk.pixels[b, :, 8 * y.start : 8 * y.stop, 8 * x.start : 8 * x.stop]
                    cut = F.interpolate(cut[None], size=(32, 32), mode="bilinear")
                    inside = F.interpolate(mask[y, x][None, None].float(), size=(4, 4), mode="nearest-exact")
                    feature = ram.encode_region(cut, inside.flatten(1) > 0.5)[0]
                share = (20 * ram.similarity(feature[None], labels)).softmax(-1)[0, c]
                assert float(found[b, c]) == pytest.approx(float(0.3 * local[c] + 0.7 * share), abs=2e-4)


def test_crop_of_a_whole_picture_is_that_picture() -> None:
    pixels = torch.rand(2, 3, 32, 32)
    same, mask = crop(pixels, torch.ones(2, 4, 4, dtype=torch.bool))
    assert torch.allclose(same, pixels, atol=1e-5)
    assert mask.all()


@pytest.mark.parametrize("kind", ["clip", "dual"])
def test_nobody_attends_to_what_is_masked(kind: str) -> None:
    own = backbone(kind)
    ram = made(own, "ramatch" if kind == "clip" else "aligned")
    mask = torch.zeros(1, 4, 4, dtype=torch.bool)
    mask[:, 1:3, 1:4] = True
    pixels = torch.randn(1, 3, 32, 32)
    outside = ~mask.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, None]
    with torch.no_grad():
        one = ram.encode_region(pixels, mask.flatten(1))
        other = ram.encode_region(torch.where(outside, 5.0, pixels), mask.flatten(1))
        whole = ram.encode_region(pixels, torch.ones(1, 16, dtype=torch.bool))
        assert torch.allclose(one, other, atol=1e-5)
        assert not torch.allclose(one, whole, atol=1e-2)
        assert torch.allclose(whole, own.encode_image(pixels)[0], atol=1e-4)
        image, _ = ram.features(ram.trunk(pixels), ram.encode_labels(LABELS))
        assert torch.allclose(image, whole, atol=1e-4)


def test_cached_features_are_not_enough() -> None:
    ram = made(backbone())
    with torch.no_grad():
        streams = ram.region_set.stem(ram.backbone, torch.randn(1, 3, 32, 32))
    with pytest.raises(RamatchError, match="attention and pixels"):
        ram.trunk(streams)


def colors() -> tuple[Backbone, dict[str, torch.Tensor]]:
    """A tower that sees colors: a patch's color is its feature, patches attend to those of their color, the class
    token to all alike."""
    side, width = 32, 8
    vision = TowerConfig(width, 3, 1, 8, patch=8, image=side)
    own = Backbone(vision, None, width, Preprocess((side, side), (0.0,) * 3, (1.0,) * 3), logit_scale=20.0)
    state = {name: torch.zeros_like(p) for name, p in own.named_parameters()}
    for name in state:
        if name.endswith(("norm.weight", "ln1.weight", "ln2.weight")):
            state[name] += 1
    eye = torch.eye(width)
    for i in range(3):
        state[f"vision.blocks.{i}.qkv.weight"] = torch.cat([2 * eye, 2 * eye, eye])
        state[f"vision.blocks.{i}.out.weight"] = eye
    for channel in range(3):
        state["vision.patch.weight"][channel, channel] = 1 / 64
    state["visual_projection.weight"] = eye
    own.load_state_dict(state)
    rgb = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "purple": (1, 0, 1), "yellow": (1, 1, 0)}
    text = torch.tensor([*rgb.values()]).float()
    own.given_labels = dict(zip(rgb, F.normalize(F.pad(text, (0, width - 3)), dim=-1), strict=True))
    return own.eval(), {name: torch.tensor(value).float() for name, value in rgb.items()}


def test_right_where_plain_cosines_are_wrong() -> None:
    """Red with a little blue is purple to the global feature."""
    own, rgb = colors()
    names, picture = list(rgb), (255 * rgb["red"])[:, None, None].expand(3, 32, 32).clone()
    picture[:, 8:24, 8:24] = (255 * rgb["blue"])[:, None, None]
    picture = picture.to(torch.uint8)[None]
    with torch.no_grad():
        plain = build_method(own, preset("ramatch"), {"name": "clip"}).eval()(picture, names)
        trunk = (ram := made(own)).trunk(picture)
        found = ram.recognize(trunk, ram.encode_labels(names))
    assert isinstance(trunk, SeenTrunk)
    ranks = {name: [names[i] for i in o.image[0].argsort(descending=True)] for name, o in (("p", plain), ("f", found))}
    assert ranks["p"].index("purple") < ranks["p"].index("blue")
    assert set(ranks["f"][:2]) == {"red", "blue"}
    blue = found.match.plan[0, :, names.index("blue")].reshape(4, 4)
    assert blue[1:3, 1:3].sum() > 0.9 * blue.sum()
