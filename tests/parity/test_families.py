"""SigLIP, SigLIP 2 and open_clip's models with timm's towers and Hugging Face's text towers against those libraries:
global, patch and text features, logits, other sizes of pictures; and everything ramatch does with them."""

from __future__ import annotations

import pytest
import torch
from families import LABELS, OPEN_CLIP, SIGLIP, Family, make
from hf_models import near
from PIL import Image

from ramatch import Recognizer
from ramatch.config import preset
from ramatch.modeling.backbone import Backbone
from ramatch.modeling.checkpoints.folder import convert, load_saved_backbone, save_backbone
from ramatch.modeling.fuse import fuse
from ramatch.modeling.graph import GraphedRAM
from ramatch.modeling.ram import RAM

KINDS = tuple(dict.fromkeys((*SIGLIP, *OPEN_CLIP)))


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory) -> Family:
    if request.param in OPEN_CLIP:
        pytest.importorskip("open_clip", minversion="3.0")
        pytest.importorskip("timm", minversion="1.0.20")
    return make(request.param, tmp_path_factory.mktemp("families") / request.param)


@pytest.fixture(scope="module")
def ours(family) -> Backbone:
    return Backbone.from_pretrained(family.folder)


def images(size: tuple[int, int], batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (batch, 3, *size), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


def ids_of(ours: Backbone, texts: list[str]) -> torch.Tensor:
    """As the reference wants them: filled up to the context."""
    ids, lengths = ours.tokenize(texts)
    full = torch.zeros(len(ids), ours.tokenizer.context, dtype=torch.long)
    full[:, : ids.shape[1]] = ids
    if ours.text.config.pool == "mean":  # RoBERTa's padding, by which its mask is made
        full[torch.arange(full.shape[1]) >= lengths[:, None]] = 1
    return full


@torch.no_grad()
def compare(family: Family, ours: Backbone, size: tuple[int, int]) -> None:
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    image, patches = ours.encode_image(pixels)
    with family.at(size):
        wanted, each = family.see(pixels)
    near(image, wanted, 1e-5)
    near(patches, each, 1e-5)
    assert (image[0] - image[1]).abs().max() > 1e-2


def test_image_features(family, ours) -> None:
    assert ours.preprocess.size == family.size
    compare(family, ours, family.size)


def test_another_size(family, ours) -> None:
    compare(family, ours, family.other)
    again = Backbone.from_pretrained(family.folder, image_size=family.other)
    assert again.preprocess.size == family.other


@torch.no_grad()
def test_text_features_and_logits(family, ours) -> None:
    ids = ids_of(ours, LABELS)
    words = ours.encode_text(LABELS)
    near(words, family.read(ids), 1e-5)
    assert (words[0] - words[1]).abs().max() > 1e-2
    assert ours.logit_scale == pytest.approx(family.model.logit_scale.exp().item())
    bias = family.model.logit_bias
    assert ours.logit_bias == (None if bias is None else pytest.approx(bias.item()))
    pixels = torch.randn(2, 3, *family.size)
    image = torch.nn.functional.normalize(ours.encode_image(pixels)[0], dim=-1)
    found = ours.logit_scale * image @ torch.nn.functional.normalize(words, dim=-1).T + (ours.logit_bias or 0)
    if hasattr(family.model, "get_logits"):
        near(found, family.model.get_logits(pixels, ids)[0], 1e-5)
    elif family.kind != "naflex":
        near(found, family.model(input_ids=ids, pixel_values=pixels).logits_per_image, 1e-5)


def test_zero_shot(family, ours) -> None:
    """Predicts; a SigLIP with the probabilities of its own sigmoid."""
    picture = Image.fromarray(images(family.size)[0].permute(1, 2, 0).numpy())
    recognizer = Recognizer.from_pretrained(family.folder, device="cpu")
    recognizer.set_vocabulary(LABELS, templates=["a photo of a {}"])
    found = recognizer.predict(picture, maps=True)
    assert found.top(1)[0].label in LABELS
    assert found.similarities.shape == (25 if family.kind == "eva02-l" else 16, 4)
    assert recognizer.calibrated is (family.kind in SIGLIP)
    if family.kind in SIGLIP:
        assert "its own sigmoid" in repr(recognizer)
        pixels = ours.preprocess.normalize(recognizer.load(picture)[0][None])
        with torch.no_grad():
            seen, read = family.see(pixels)[0], family.read(ids_of(ours, [f"a photo of a {label}" for label in LABELS]))
            scale, bias = family.model.logit_scale.exp(), family.model.logit_bias
            cosine = torch.nn.functional.cosine_similarity(seen, read, dim=-1)
            near(torch.from_numpy(found.values), (scale * cosine + bias).sigmoid().double(), 1e-5)


def lively_ram(ours: Backbone, **changes) -> RAM:
    """With adapters that are all alive."""
    options = {"adapted_layers": 2, "saa_layers": 2, "prompt_layers": 1, "visual_prompts": 3, "prompt_tokens": 2}
    ram = RAM(ours, preset("ramatch", **options | changes)).eval()
    g = torch.Generator().manual_seed(1)
    for key, p in ram.named_parameters():
        if not key.startswith(("backbone.", "tau")):
            p.data.add_(torch.randn(p.shape, generator=g) * (0.5 if p.ndim < 4 else p[0].numel() ** -0.5))
    return ram


@pytest.mark.parametrize("changes", [{}, {"tss": False, "visual_prompts": 0, "saa_layers": -1}], ids=["ours", "SAA"])
@torch.no_grad()
def test_fused_is_the_same(family, ours, changes) -> None:
    ram = lively_ram(ours, **changes)
    labels, pixels = ram.encode_labels(LABELS), images(family.other)
    output = ram.recognize(ram.trunk(pixels), labels)
    fast = GraphedRAM(fuse(ram), best=True)(pixels, labels)
    assert fast.scores.shape == (2, len(LABELS))
    for found, wanted in ((fast.region, output.region), (fast.image, output.image), (fast.best, output.best)):
        near(found, wanted, 1e-5)
    near(fast.scores, ram.score(output), 1e-5)
    rough = GraphedRAM(fuse(ram, torch.bfloat16), best=True)(pixels, labels)
    assert (rough.image - output.image).abs().max() < 0.03


@torch.no_grad()
def test_saved_and_read_again(family, tmp_path) -> None:
    recognizer = Recognizer.from_pretrained(family.folder, device="cpu")
    recognizer.set_vocabulary(LABELS)
    recognizer.save_pretrained(tmp_path / "own", with_backbone=True)
    again = Recognizer.from_pretrained(tmp_path / "own", device="cpu")
    again.set_vocabulary(LABELS)
    for name, tensor in recognizer.ram.state_dict().items():
        assert torch.equal(again.ram.state_dict()[name], tensor), name
    one, two = recognizer.ram.backbone, again.ram.backbone
    assert (one.vision.config, one.text.config) == (two.vision.config, two.text.config)
    assert (one.logit_scale, one.logit_bias, one.preprocess) == (two.logit_scale, two.logit_bias, two.preprocess)
    ids = [backbone.tokenize(["A red Cat!", "dog"]) for backbone in (one, two)]
    assert all(map(torch.equal, *ids))
    picture = Image.fromarray(images(family.size)[0].permute(1, 2, 0).numpy())
    near(torch.from_numpy(recognizer.predict(picture).values), torch.from_numpy(again.predict(picture).values), 1e-6)
    assert again.calibrated is recognizer.calibrated
    assert repr(again).split(":", 1)[1] == repr(recognizer).split(":", 1)[1]


@torch.no_grad()
def test_int8(family, ours, tmp_path) -> None:
    save_backbone(ours, tmp_path / "full")
    packed = convert(tmp_path / "full", tmp_path / "packed", "int8")
    sizes = [sum(f.stat().st_size for f in folder.glob("*.safetensors")) for folder in (tmp_path / "full", packed)]
    assert sizes[1] < 0.5 * sizes[0]
    pixels, small = torch.randn(2, 3, *family.size), load_saved_backbone(packed)
    for found, wanted in (
        (small.encode_image(pixels)[0], ours.encode_image(pixels)[0]),
        (small.encode_text(LABELS), ours.encode_text(LABELS)),
    ):
        assert torch.nn.functional.cosine_similarity(found, wanted).min() > 0.99


@pytest.mark.parametrize("prompts", ["deep", "coop", "dualcoop"])
def test_a_training_step(family, ours, prompts) -> None:
    ram = lively_ram(ours, prompts=prompts).train()
    targets = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0]])
    before = ram.region_set.tss[0].back.weight.detach().clone()
    learning = [p for p in ram.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.1)
    loss = ram.loss(ram(images(family.size), LABELS, targets), targets)
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in ram.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
    assert ram.label_set.prompts.grad.abs().max() > 0
    assert ram.region_set.visual_prompts.grad.abs().max() > 0
    optimizer.step()
    assert not torch.equal(before, ram.region_set.tss[0].back.weight)
