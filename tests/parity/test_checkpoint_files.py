"""What the new families look like on disk: bare files, timm's folders, wrappings; and what is refused, and why."""

from __future__ import annotations

import json
import re
import string
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from families import LABELS, SIZES, config_of, make, put_siglip_tokenizer, trunk
from hf_models import lively, near
from safetensors.torch import save_file
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers

from ramatch import Recognizer
from ramatch.config import preset
from ramatch.errors import RamatchError
from ramatch.evaluation.calibration import Calibrator
from ramatch.modeling import text as label_set
from ramatch.modeling.backbone import Backbone
from ramatch.modeling.checkpoints import timm as reader
from ramatch.modeling.checkpoints.loading import read_tower
from ramatch.modeling.checkpoints.tokenizer import Tokenizer
from ramatch.modeling.preprocess import CLIP_MEAN, HALF
from ramatch.modeling.ram import RAM

open_clip = pytest.importorskip("open_clip", minversion="3.0")
timm = pytest.importorskip("timm", minversion="1.0.20")
from open_clip.model import CLIPTextCfg, CLIPVisionCfg  # noqa: E402
from open_clip.tokenizer import canonicalize_text  # noqa: E402

CLIP_WORDS = {"context_length": 12, "vocab_size": 49408, "width": 64, "heads": 1, "layers": 2}
TIMM = {"eva02": (CLIP_MEAN, 0.0), "pe": (HALF, 1.0), "pe-g": (HALF, 0.0), "mobileclip": ((0.0, 0.0, 0.0), 0.0)}


@pytest.mark.parametrize("kind", TIMM)
@torch.no_grad()
def test_bare_files(kind, tmp_path) -> None:
    """Without a config: shapes, rotary positions and pixels are known all the same."""
    model = lively(open_clip.CustomTextCLIP(**config_of(kind) | {"text_cfg": CLIP_WORDS}), 0.05)
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}}, tmp_path / "model.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is guessed about the activation
        ours = Backbone.from_pretrained(tmp_path / "model.pt")
    mean, start = TIMM[kind]
    assert (ours.preprocess.mean, ours.preprocess.size, ours.vision.config.rope_start) == (mean, (64, 64), start)
    pixels, ids = torch.randn(2, 3, 64, 64), open_clip.get_tokenizer("ViT-B-32", context_length=12)(LABELS)
    near(ours.encode_image(pixels)[0], model.encode_image(pixels), 1e-5)
    near(ours.encode_text(LABELS), model.encode_text(ids), 1e-5)


@pytest.mark.parametrize("wrap", ["bare", "module.", "state_dict", "both"])
@pytest.mark.parametrize("act", ["quick_gelu", "gelu"])
@torch.no_grad()
def test_remote_sensing_files(wrap, act, tmp_path) -> None:
    """RemoteCLIP and GeoRSCLIP: open_clip's names of a ViT-B/32, -L/14 or -H/14, as they are trained and saved."""
    sees = CLIPVisionCfg(layers=3, width=64, head_width=64, patch_size=16, image_size=64)
    model = lively(open_clip.CLIP(48, sees, CLIPTextCfg(**CLIP_WORDS), quick_gelu=act == "quick_gelu"), 0.05)
    tensors = {f"module.{k}" if wrap in ("module.", "both") else k: v for k, v in model.state_dict().items()}
    torch.save({"epoch": 5, "state_dict": tensors} if wrap in ("state_dict", "both") else tensors, tmp_path / "a.pt")
    ours = Backbone.from_pretrained(tmp_path / "a.pt", act=act)
    ids = open_clip.get_tokenizer("ViT-B-32", context_length=12)(LABELS)
    pixels = torch.randn(2, 3, 64, 64)
    near(ours.encode_image(pixels)[0], model.encode_image(pixels), 1e-5)
    near(ours.encode_text(LABELS), model.encode_text(ids), 1e-5)
    out = model.visual.forward_intermediates(pixels, indices=1, normalize_intermediates=True, output_fmt="NLC")
    near(ours.encode_image(pixels)[1], out["image_intermediates"][0] @ model.visual.proj, 1e-5)


@pytest.mark.parametrize("kind", ["eva02", "pe", "timm-siglip", "timm-clip"])
@torch.no_grad()
def test_folders_of_timm(kind, tmp_path) -> None:
    """A vision tower alone, for given label features or for `align`."""
    tower = lively(trunk(kind, num_classes=0 if kind == "timm-siglip" else 24, global_pool=POOLS[kind]), 0.05)
    save_file(tower.state_dict(), tmp_path / "model.safetensors")
    name = "vit_so400m_patch16_siglip_tiny" if kind == "timm-siglip" else kind
    own = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]} if kind == "pe" else {}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name, "pretrained_cfg": own}))
    ours, pixels = Backbone.from_pretrained(tmp_path), torch.randn(2, 3, 64, 64)
    near(ours.encode_image(pixels)[0], tower(pixels), 1e-5)
    wanted = (0.1, 0.2, 0.3) if own else HALF if kind == "timm-siglip" else CLIP_MEAN
    assert ours.preprocess.mean == wanted
    found = read_tower(tmp_path, "vision")
    assert found.config == ours.vision.config
    assert all(torch.equal(found.state[key], value) for key, value in ours.vision.state_dict().items())
    if kind == "eva02":  # without its head it is still a tower for `align`
        save_file({k: v for k, v in tower.state_dict().items() if "head" not in k}, tmp_path / "model.safetensors")
        assert read_tower(tmp_path, "vision").config.width == 128
        with pytest.raises(RamatchError, match="has no head"):
            Backbone.from_pretrained(tmp_path)


@torch.no_grad()
def test_a_folder_of_several_libraries(tmp_path) -> None:
    """As many repositories are: open_clip's model, and its vision tower as timm has it."""
    made = make("eva02", tmp_path / "model")
    save_file({"norm.weight": torch.zeros(3)}, made.folder / "model.safetensors")
    (made.folder / "config.json").write_text(json.dumps({"architecture": "eva02_base_patch16_clip_224"}))
    ours, pixels = Backbone.from_pretrained(made.folder), torch.randn(2, 3, 64, 64)
    near(ours.encode_image(pixels)[0], made.see(pixels)[0], 1e-5)
    assert read_tower(made.folder, "vision").config == ours.vision.config


POOLS = {"eva02": "token", "pe": "map", "timm-siglip": "map", "timm-clip": "token"}


def test_activations_of_timm() -> None:
    """Which SigLIPs of timm's approximate GELU is read off their names; all of them are asked here."""
    names = [name for name in timm.list_models("vit_*siglip*") if "gap" not in name and "siglip_tiny" not in name]
    assert len(names) > 10
    for name in names:
        with torch.device("meta"):
            act = timm.create_model(name, depth=1).blocks[0].mlp.act
        assert ("Tanh" in type(act).__name__ or getattr(act, "approximate", "") == "tanh") is bool(
            reader.TANH.match(name)
        ), name


def test_head_widths_of_timm() -> None:
    """Names on disk do not tell how many heads there are: every size that is read has those assumed."""
    sizes = timm.list_models(
        ["vit_pe_core*", "vit_*_siglip*", "eva02_*_clip_*", "vit_base_mci*", "vit_*_patch*_clip_*"]
    )
    unread = ("enormous", "gap", "siglip_tiny")  # the last is of these tests
    for name in [name for name in sizes if not any(word in name for word in unread)]:
        with torch.device("meta"):
            tower = timm.create_model(name, depth=1, **({"global_pool": "map"} if "pe_core" in name else {}))
        width = tower.embed_dim
        assert tower.blocks[0].attn.num_heads == width // reader.HEAD_WIDTHS.get(width, 64), name
        if "pe_core" in name:
            assert (tower.attn_pool.num_heads, tower.attn_pool.mlp.fc1.out_features) == (8, 4 * width), name
        elif "siglip" in name:
            assert tower.attn_pool.num_heads == tower.blocks[0].attn.num_heads, name


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"stages.0.blocks.0.mlp.fc1.weight"}, "not a plain ViT .FastViT as in MobileCLIP's S sizes"),
        ({"patch_embed.backbone.stages.0.0.weight"}, "not a plain ViT"),
        ({"blocks.0.attn.q_bias", "cls_token"}, "EVA01, or an EVA02-E, which normalizes after"),
        ({"blocks.0.ls1.gamma", "cls_token"}, "has LayerScale"),
        ({"reg_token", "cls_token"}, "registers"),
        ({"blocks.0.attn.qkv.weight"}, "averages its patches"),
    ],
)
def test_towers_of_timm_that_are_not_read(tensors, says, tmp_path) -> None:
    torch.save({f"visual.trunk.{name}": torch.zeros(3) for name in tensors}, tmp_path / "model.pt")
    with pytest.raises(RamatchError, match=rf"model\.pt: this vision tower of timm's .*{says}"):
        Backbone.from_pretrained(tmp_path / "model.pt")


def test_a_mean_of_patches_is_refused_and_other_words_have_no_clip_tokens(tmp_path) -> None:
    """CLIPA, and what would be read with the words of another model."""
    sees = {"layers": 1, "width": 64, "patch_size": 16, "image_size": 64}
    model = open_clip.CLIP(48, CLIPVisionCfg(**sees), CLIPTextCfg(**CLIP_WORDS | {"vocab_size": 50}))
    torch.save(model.state_dict(), tmp_path / "open_clip_pytorch_model.bin")
    config = {"embed_dim": 48, "vision_cfg": sees, "text_cfg": {"hf_tokenizer_name": "somebody/words"}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    with pytest.raises(RamatchError, match=r"no tokenizer files; put tokenizer\.json beside"):
        Backbone.from_pretrained(tmp_path).encode_text(["cat"])
    config["vision_cfg"] = sees | {"pool_type": "avg", "final_ln_after_pool": True}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    with pytest.raises(RamatchError, match=r"averages its patches \(CLIPA\)"):
        Backbone.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def siglip(tmp_path_factory) -> Path:
    return make("siglip", tmp_path_factory.mktemp("siglip") / "model").folder


def test_siglips_that_are_not_read(tmp_path) -> None:
    sight = transformers.SiglipVisionConfig(**SIZES, image_size=64, patch_size=16, vision_use_head=False)
    transformers.SiglipVisionModel(sight).save_pretrained(tmp_path / "headless")
    with pytest.raises(RamatchError, match="no pooling head"):
        Backbone.from_pretrained(tmp_path / "headless")
    sees = CLIPVisionCfg(layers=1, width=64, patch_size=16, image_size=64)
    model = open_clip.CLIP(48, sees, CLIPTextCfg(**CLIP_WORDS))
    torch.save(model.state_dict() | {"logit_bias": torch.zeros(1)}, tmp_path / "bare.pt")
    with pytest.raises(RamatchError, match=r"bare\.pt is a SigLIP without its config"):
        Backbone.from_pretrained(tmp_path / "bare.pt", act="gelu")


@torch.no_grad()
def test_a_bare_file_must_tell_how_it_reads(tmp_path) -> None:
    model = open_clip.CustomTextCLIP(**config_of("mobileclip2-l"))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(RamatchError, match=r"model\.pt does not tell how it reads texts; give its folder"):
        Backbone.from_pretrained(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"hf_model_name": "facebook/nllb-200", "hf_pooler_type": "cls_pooler"}, "Hugging Face's 'facebook/nllb-200'"),
    ],
)
def test_text_towers_of_open_clip_that_are_not_read(words, says, tmp_path) -> None:
    model = open_clip.CustomTextCLIP(**config_of("timm-clip"))
    tensors = model.state_dict()
    if "hf_model_name" in words:
        tensors = {k.replace("text.", "text.transformer."): v for k, v in tensors.items()}
    torch.save(tensors, tmp_path / "open_clip_pytorch_model.bin")
    config = config_of("timm-clip") | {"text_cfg": words}
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    with pytest.raises(RamatchError, match=says):
        Backbone.from_pretrained(tmp_path)


# words and probabilities of SigLIP


def letters(folder: Path) -> Tokenizer:
    """Every character a token, so that ids show what was read."""
    inner = Inner(models.WordLevel({c: i for i, c in enumerate("?" + string.printable + "é→")}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder, 200)


def test_texts_are_read_as_siglip_learned_to(tmp_path) -> None:
    plain, ours = letters(tmp_path), letters(tmp_path).for_siglip(tmp_path, 1)
    assert ours.pad == 1
    texts = ["A photo of a DOG.", "  it's   a_b-c\n(d) \\ [e] ^f", string.punctuation, "Café → 5 €", *LABELS]
    wanted, counts = plain([canonicalize_text(text) for text in texts])
    ids, lengths = ours(texts)
    assert ids.shape == (len(texts), 200)
    assert lengths.tolist() == counts.tolist()
    for row, expected, count in zip(ids.tolist(), wanted.tolist(), counts.tolist(), strict=True):
        assert row == expected[:count] + [1] * (200 - count)
    ours.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path, 200, 1)
    assert torch.equal(again(texts)[0], ids)


def test_the_padding_that_a_folder_names(tmp_path) -> None:
    for pad, expected in (("</s>", 59), ("[PAD]", 0), ({"content": "dog"}, 6), ("unknown", 1)):
        put_siglip_tokenizer(tmp_path, 60, pad)
        assert Tokenizer.from_folder(tmp_path, 16).for_siglip(tmp_path, 1).pad == expected
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.from_folder(tmp_path, 16).for_siglip(tmp_path, 1).pad == 1


def test_probabilities_are_marked_as_the_checkpoints_own(siglip) -> None:
    recognizer = Recognizer.from_pretrained(siglip, device="cpu")
    assert recognizer.calibrator.own
    assert recognizer.sought(["animal"]).plain  # nothing is joined to them
    again = Calibrator.from_dict(json.loads(json.dumps(recognizer.calibrator.to_dict())))
    assert again.own
    features = torch.rand(3, 2, 3) - 0.5
    wanted = (features[..., 0] * recognizer.ram.backbone.logit_scale - 3.0).sigmoid()
    near(recognizer.calibrator(features).float(), wanted, 1e-6)
    near(again(features), recognizer.calibrator(features), 1e-6)
    fitted = Calibrator.fit(features, features[..., 0] > 0)
    assert not Calibrator.from_dict(fitted.to_dict()).own


def test_memory_for_filled_texts_is_bounded(siglip, monkeypatch) -> None:
    ram = RAM(Backbone.from_pretrained(siglip), preset("ramatch", adapted_layers=2, prompt_layers=1)).eval()
    monkeypatch.setattr(label_set, "KEEP", 16 * 3)
    with torch.no_grad():
        wanted = torch.cat([ram.label_set(ram.backbone, [label]) for label in LABELS])
        near(ram.label_set(ram.backbone, LABELS), wanted, 1e-5)
    assert len(ram.label_set._kept) <= 3


def test_learned_context_makes_room_in_a_filled_text(siglip) -> None:
    ours = Backbone.from_pretrained(siglip)
    ram = RAM(ours, preset("ramatch", adapted_layers=2, prompts="coop", prompt_tokens=3)).eval()
    with torch.no_grad():
        found = ram.label_set(ours, ["cat", "red dog"])
        ids = ours.tokenize(["cat.", "red dog."])[0]
        words = torch.cat([ram.label_set.prompts[0].expand(2, -1, -1), ours.text.tokens(ids)], 1)[:, :16]
        lengths = torch.tensor([16, 16])  # whatever: all is read, and the last place is the feature
        near(
            found, ours.project_text(ours.text.pool(ours.text.run(ours.text.embed(ids, words), lengths), lengths)), 1e-5
        )


def test_the_table_of_the_documentation() -> None:
    """It names every model type that is read."""
    from ramatch.modeling.checkpoints.loading import READ, TEXT, VISION

    page = (Path(__file__).parents[2] / "docs" / "backbones.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)))
    assert not sorted((set(READ) | set(VISION) | set(TEXT)) - named)
