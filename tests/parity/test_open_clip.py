"""Bare state dicts (OpenAI's, open_clip's ViT) and open_clip folders against open_clip's own features and token ids."""

from __future__ import annotations

import json

import pytest
import torch
from hf_models import lively, near

from ramatch.errors import RamatchError
from ramatch.modeling.backbone import Backbone
from ramatch.modeling.checkpoints.openai import from_state_dict
from ramatch.modeling.checkpoints.tokenizer import Tokenizer

open_clip = pytest.importorskip("open_clip")
from open_clip.model import CLIPTextCfg, CLIPVisionCfg  # noqa: E402

LABELS = [
    "cat",
    "Traffic Light",
    "T-SHIRT",
    "café",
    "cafe\u0301 au lait",
    "jalapeño",
    "naïve Ångström",
    "dog's bed",
    "dog\u2019s bed",
    "\u201cstop\u201d sign",
    "the dogs' beds",
    "we'll they've I'm don't he'd",
    "2 dogs, 13 cats & 1,234 mice",
    "747-400",
    "rock & roll",
    "rock &amp; roll",
    "&lt;b&gt;bold&lt;/b&gt;",
    "AT&amp;amp;T",
    "  many   spaces\tand\nlines ",
    "日本語",
    "emoji 🐶 dog",
    "a.b!c?(d)/e_f",
    "x" * 300,
    "word " * 200,
    "Ünïcödé ÀÉÎ",
    "C++ / C#",
    "50%",
    "#hashtag @user",
    "...",
    "a",
]


def small_clip(*, quick=True, custom=False, head_width=32, heads=4, **vision):
    vision_cfg = CLIPVisionCfg(layers=3, width=64, head_width=head_width, patch_size=8, image_size=32, **vision)
    text_cfg = CLIPTextCfg(context_length=77, vocab_size=49408, width=64, heads=heads, layers=2)
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    return lively(kind(embed_dim=48, vision_cfg=vision_cfg, text_cfg=text_cfg, quick_gelu=quick), 0.05)


def compare(model, ours: Backbone, size: int) -> None:
    pixels = torch.randn(2, 3, size, size)
    ids = open_clip.get_tokenizer("ViT-B-32")(LABELS)
    model.visual.output_tokens = False
    with torch.no_grad():
        near(ours.encode_image(pixels)[0], model.encode_image(pixels))
        near(ours.encode_text(LABELS), model.encode_text(ids))
    assert ours.logit_scale == pytest.approx(model.logit_scale.exp().item(), rel=1e-5)


def test_tokenizer_agrees():
    ours, expected = Tokenizer.clip(77), open_clip.get_tokenizer("ViT-B-32")(LABELS)
    ids, lengths = ours(LABELS)
    end = expected.argmax(-1)
    assert ids.shape[1] == 77  # the longest label is cut, not the others' problem
    for i, label in enumerate(LABELS):
        n = int(lengths[i])
        assert ids[i, :n].tolist() == expected[i, : end[i] + 1].tolist(), label
        assert ids[i, n - 1] == 49407, label  # the end token is kept, also where the text was cut
    short, _ = ours(["cat", "traffic light"])
    assert short.shape == (2, 4)  # cut to the longest real length


def test_tokenizer_survives_saving(tmp_path):
    ours = Tokenizer.clip(77)
    ours.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path, 77)
    for a, b in zip(ours(LABELS), again(LABELS), strict=True):
        assert torch.equal(a, b)


def test_tokenizer_refuses_what_is_not_text():
    ours = Tokenizer.clip(77)
    with pytest.raises(RamatchError, match="must be text, got 3"):
        ours(["cat", 3])
    ids, lengths = ours([])
    assert len(ids) == len(lengths) == 0


@pytest.mark.filterwarnings("ignore:.*activation")
@pytest.mark.parametrize(("quick", "act"), [(True, "quick_gelu"), (False, "gelu"), (False, None)])
def test_open_clip_state_dict(tmp_path, quick, act):
    model = small_clip(quick=quick, head_width=64, heads=1)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    ours = Backbone.from_pretrained(tmp_path / "model.pt", act=act)
    assert (ours.vision.config.act, ours.preprocess.size) == ("quick_gelu" if quick else "gelu", (32, 32))
    compare(model, ours, 32)


def test_wrong_activation_is_another_model(tmp_path):
    model = small_clip(quick=True, head_width=64, heads=1)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    ours = Backbone.from_pretrained(tmp_path / "model.pt", act="gelu")
    with pytest.raises(AssertionError, match="largest difference"):
        compare(model, ours, 32)


def test_openai_state_dict_in_half_precision(tmp_path):
    """OpenAI's archive: fp16 tensors and three numbers that tell it apart (its models use QuickGELU)."""
    model = small_clip(quick=True, head_width=64, heads=1)
    half = {k: v.half() for k, v in model.state_dict().items()}
    model.load_state_dict(half)
    sizes = {
        "input_resolution": torch.tensor(32),
        "context_length": torch.tensor(77),
        "vocab_size": torch.tensor(49408),
    }
    torch.save(half | sizes, tmp_path / "ViT.pt")
    ours = Backbone.from_pretrained(tmp_path / "ViT.pt")
    assert (ours.vision.config.act, ours.dtype) == ("quick_gelu", torch.float32)
    compare(model, ours, 32)


@pytest.mark.parametrize("wrap", ["state_dict", "module.", "text."])
def test_other_wrappings(tmp_path, wrap):
    model = small_clip(quick=False, custom=wrap == "text.", head_width=64, heads=1)
    tensors = model.state_dict()
    if wrap == "state_dict":
        tensors = {"epoch": 3, "state_dict": tensors, "optimizer": {"lr": 0.1}}
    elif wrap == "module.":
        tensors = {f"module.{k}": v for k, v in tensors.items()}
    torch.save(tensors, tmp_path / "model.pt")
    compare(model, Backbone.from_pretrained(tmp_path / "model.pt", act="gelu"), 32)


@pytest.mark.parametrize("quick", [True, False])
def test_open_clip_folder(tmp_path, quick):
    """Head widths and activation from open_clip_config.json; no pre-LN; another pixel normalisation."""
    model = small_clip(quick=quick, head_width=16, heads=4, no_ln_pre=True)
    torch.save(model.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    config = {
        "model_cfg": {"embed_dim": 48, "quick_gelu": quick, "vision_cfg": {"head_width": 16}, "text_cfg": {"heads": 4}},
        "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    ours = Backbone.from_pretrained(tmp_path)
    assert (ours.preprocess.mean, ours.preprocess.std) == ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    compare(model, ours, 32)


def test_head_widths_of_the_large_sizes():
    """A bare state dict does not tell the number of heads; open_clip's H, g and bigG do not use 64 per head."""
    for width, heads in ((768, 12), (1024, 16), (1280, 16), (1408, 16), (1664, 16)):
        vision_cfg = CLIPVisionCfg(
            layers=1, width=width, head_width=width // heads, patch_size=14, image_size=14, mlp_ratio=0.05
        )
        text_cfg = CLIPTextCfg(context_length=5, vocab_size=9, width=64, heads=1, layers=1)
        model = open_clip.CLIP(embed_dim=8, vision_cfg=vision_cfg, text_cfg=text_cfg).eval()
        ours = from_state_dict(model.state_dict(), name="x", act="gelu", tokenizer=Tokenizer.clip(5))
        pixels = torch.randn(1, 3, 14, 14)
        with torch.no_grad():
            near(ours.encode_image(pixels)[0], model.encode_image(pixels))


def test_an_unknown_activation_is_said(tmp_path):
    torch.save(small_clip(head_width=64, heads=1).state_dict(), tmp_path / "model.pt")
    with pytest.warns(UserWarning, match="activation"):
        Backbone.from_pretrained(tmp_path / "model.pt")


# wrong files


@pytest.mark.filterwarnings("ignore")
def test_torchscript_is_refused(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "ViT-B-16.pt"))
    with pytest.raises(RamatchError, match=r"TorchScript archive: save its plain state dict first"):
        Backbone.from_pretrained(tmp_path / "ViT-B-16.pt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_wrong_files_are_named(tmp_path):
    model = small_clip(head_width=64, heads=1)
    good = model.state_dict()

    def attempt(content, says: str) -> None:
        torch.save(content, tmp_path / "model.pt")
        with pytest.raises(RamatchError, match=says) as error:
            Backbone.from_pretrained(tmp_path / "model.pt", act="gelu")
        assert "model.pt" in str(error.value)

    def without(*names: str) -> dict:
        return {k: v for k, v in good.items() if k not in names}

    attempt(without("visual.transformer.resblocks.1.ln_1.bias"), r"resblocks\.1\.ln_1\.bias")
    attempt(without("visual.transformer.resblocks.1.attn.in_proj_weight"), r"resblocks\.1\.attn\.in_proj_weight")
    attempt(without("visual.proj"), "'proj' is missing")
    attempt(without("text_projection"), "'text_projection' is missing")
    attempt(good | {"visual.ln_post.weight": torch.zeros(3)}, r"norm\.weight")
    attempt(good | {"visual.transformer.resblocks.0.ls_1.gamma": torch.zeros(64)}, "LayerScale")
    attempt(good | {"visual.attn_pool.query": torch.zeros(3)}, "attention pooling")
    attempt({"layer.weight": torch.zeros(3)}, "no tensor starts with 'visual")
    attempt({"note": "hello"}, "holds no tensors")
    attempt([1, 2], "holds no tensors")
    resnet = {"visual.conv1.weight": torch.zeros(8, 3, 3, 3), "visual.layer1.0.conv1.weight": torch.zeros(8, 8, 1, 1)}
    attempt(resnet, "not a plain ViT")
    hf_text = {k: v for k, v in good.items() if k.startswith("visual.")} | {
        "text.transformer.embeddings.weight": torch.zeros(3)
    }
    attempt(hf_text, "text tower")
    (tmp_path / "model.pt").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(RamatchError, match="not a plain state dict that can be read safely"):
        Backbone.from_pretrained(tmp_path / "model.pt")


def test_pickles_run_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    torch.save({"visual.proj": Evil()}, tmp_path / "model.pt")
    with pytest.raises(RamatchError, match="read safely"):
        Backbone.from_pretrained(tmp_path / "model.pt")
    assert not (tmp_path / "owned").exists()
