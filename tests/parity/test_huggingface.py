"""Backbones read from Hugging Face folders against `transformers`' own outputs, with all adapters off (fp32, 1e-5)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hf_models import clip_vision_head, dual_encoder, lively, near, word_tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
)

from ramatch.config import preset
from ramatch.errors import RamatchError
from ramatch.modeling.backbone import Backbone
from ramatch.modeling.checkpoints.folder import load_saved_backbone, save_backbone
from ramatch.modeling.checkpoints.huggingface import TEXT, VISION
from ramatch.modeling.ram import RAM

WORDS = "a photo of cat dog red traffic light person riding bicycle"


def clip_folder(folder: Path, vision: dict, text: dict, dim: int, *, std: float, shards: bool = False) -> CLIPModel:
    vocab = text["vocab_size"]
    config = CLIPConfig(
        vision_config=vision,
        text_config=text | {"bos_token_id": vocab - 2, "eos_token_id": vocab - 1},
        projection_dim=dim,
    )
    model = lively(CLIPModel(config), std) if std else CLIPModel(config).eval()
    model.save_pretrained(folder, **({"max_shard_size": "100KB"} if shards else {}))
    return model


def compare_clip(
    model: CLIPModel, ours: Backbone, tensors: dict, pixels: torch.Tensor, interpolate: bool = False
) -> None:
    """Class-token, patch and text features."""
    eps, vocab = model.config.vision_config.layer_norm_eps, model.config.text_config.vocab_size
    context = model.config.text_config.max_position_embeddings
    ids = torch.randint(1, vocab - 2, (3, context))
    lengths = torch.tensor([context, 5, 9])
    ids[:, 0] = vocab - 2
    ids[torch.arange(3), lengths - 1] = vocab - 1
    mask = (torch.arange(context) < lengths[:, None]).long()
    with torch.no_grad():
        seen = model.get_image_features(pixels, interpolate_pos_encoding=interpolate)
        read = model.text_model(input_ids=ids * mask, attention_mask=mask)
        image, patches = ours.encode_image(pixels)
        words = ours.project_text(ours.text(ids[:, : lengths.max()], lengths))
        everything = clip_vision_head(seen.last_hidden_state, tensors, eps)
    near(image, everything[:, 0])
    near(image, seen.pooler_output)
    near(patches, everything[:, 1:])
    near(words, read.pooler_output @ tensors["text_projection.weight"].T)
    assert (words[0] - words[1]).abs().max() > 1e-2


def test_clip_vit_b16_size(tmp_path):
    vision = {"patch_size": 16, "image_size": 224}  # the rest of CLIPVisionConfig is the base size
    text = {
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "vocab_size": 1000,
        "max_position_embeddings": 77,
    }
    model = clip_folder(tmp_path, vision, text, 512, std=0)
    ours = Backbone.from_pretrained(tmp_path)
    c = ours.vision.config
    assert (c.width, c.layers, c.heads, c.patch, c.image, c.act) == (768, 12, 12, 16, 224, "quick_gelu")
    compare_clip(model, ours, load_file(tmp_path / "model.safetensors"), torch.randn(1, 3, 224, 224))


SMALL_TEXT = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "vocab_size": 60,
    "max_position_embeddings": 16,
}
SMALL_VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 48,
    "patch_size": 12,
}


@pytest.mark.parametrize("act", ["quick_gelu", "gelu", "gelu_pytorch_tanh"])
def test_small_clip_other_shapes(tmp_path, act):
    extra = {"hidden_act": act, "layer_norm_eps": 1e-3}
    model = clip_folder(tmp_path, SMALL_VISION | extra, SMALL_TEXT | extra, 40, std=0.1)
    ours = Backbone.from_pretrained(tmp_path)
    compare_clip(model, ours, load_file(tmp_path / "model.safetensors"), torch.randn(2, 3, 48, 48))
    assert ours.logit_scale == pytest.approx(model.logit_scale.exp().item())
    assert not any(p.requires_grad for p in ours.parameters())
    assert not ours.training


@pytest.mark.parametrize("size", [(72, 72), (96, 36), (24, 60)])
def test_small_clip_other_input_size(tmp_path, size):
    model = clip_folder(tmp_path, SMALL_VISION, SMALL_TEXT, 40, std=0.1)
    ours = Backbone.from_pretrained(tmp_path, image_size=size)
    assert ours.preprocess.size == size
    assert ours.vision.grid(*size) == (size[0] // 12, size[1] // 12)
    compare_clip(model, ours, load_file(tmp_path / "model.safetensors"), torch.randn(2, 3, *size), interpolate=True)


def test_sharded_weights_and_bad_size(tmp_path):
    model = clip_folder(tmp_path, SMALL_VISION, SMALL_TEXT, 40, std=0.1, shards=True)
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 1
    tensors = {k: v for part in parts for k, v in load_file(part).items()}
    compare_clip(model, Backbone.from_pretrained(tmp_path), tensors, torch.randn(1, 3, 48, 48))
    with pytest.raises(RamatchError, match="not a multiple of the patch size 12"):
        Backbone.from_pretrained(tmp_path, image_size=50)


def test_clip_vision_tower_alone_with_label_features(tmp_path):
    config = CLIPVisionConfig(**SMALL_VISION, projection_dim=40)
    model = lively(CLIPVisionModelWithProjection(config))
    model.save_pretrained(tmp_path / "v")
    features = torch.randn(3, 40)
    save_file(
        {"features": features}, tmp_path / "f.safetensors", metadata={"labels": json.dumps(["cat", "dog", "ski"])}
    )
    ours = Backbone.from_pretrained(tmp_path / "v", label_features=tmp_path / "f.safetensors")
    pixels = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        seen = model(pixels)
        image, patches = ours.encode_image(pixels)
    near(image, seen.image_embeds)
    near(patches, clip_vision_head(seen.last_hidden_state, load_file(tmp_path / "v" / "model.safetensors"))[:, 1:])

    near(ours.label_features(["ski", "cat"]), torch.nn.functional.normalize(features[[2, 0]], dim=-1))
    ram = RAM(ours, preset("reference", adapted_layers=2))
    output = ram(pixels, ["dog", "ski"], torch.tensor([[1, 0], [1, 1]]))
    ram.loss(output, torch.tensor([[1, 0], [1, 1]])).backward()
    assert ram.region_set.visual_prompts.grad.abs().max() > 0
    # everything that needs text says so
    for attempt in (lambda: ours.encode_text(["cat"]), lambda: ours.tokenize(["cat"])):
        with pytest.raises(RamatchError, match=r"needs a text tower.*--label-features"):
            attempt()
    with pytest.raises(RamatchError, match="no label feature is given for 'zebra'; the file has 3 labels"):
        ram(pixels, ["cat", "zebra"])


@pytest.mark.parametrize(
    ("tensors", "metadata", "says"),
    [
        ({"features": torch.zeros(2, 40)}, {"labels": '["a"]'}, "1 labels for a tensor of shape"),
        ({"features": torch.zeros(1, 7)}, {"labels": '["a"]'}, "size 7"),
        ({"features": torch.zeros(1, 40)}, None, "no JSON list 'labels'"),
        ({"wrong": torch.zeros(1, 40)}, {"labels": '["a"]'}, "features"),
    ],
)
def test_bad_label_features(tmp_path, tensors, metadata, says):
    lively(CLIPVisionModelWithProjection(CLIPVisionConfig(**SMALL_VISION, projection_dim=40))).save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "f.safetensors", metadata=metadata)
    with pytest.raises(RamatchError, match=says):
        Backbone.from_pretrained(tmp_path, label_features=tmp_path / "f.safetensors")


# dual encoders: DINOv2 + BERT


def small_pair(side: int = 70):
    dinov2 = Dinov2Model(
        Dinov2Config(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, image_size=side, patch_size=14)
    )
    bert = BertModel(
        BertConfig(
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=3,
            intermediate_size=96,
            vocab_size=60,
            max_position_embeddings=40,
        )
    )
    return lively(dinov2), lively(bert, seed=1)


def compare_dual(dinov2, bert, ours: Backbone, heads: dict, pixels: torch.Tensor, texts: list[str]) -> None:
    ids, lengths = ours.tokenize(texts)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    with torch.no_grad():
        seen = dinov2(pixels).last_hidden_state @ heads["visual_projection.weight"].T  # DINOv2 ends with its own norm
        states = bert(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        image, patches = ours.encode_image(pixels)
        near(ours.encode_text(texts), pooled @ heads["text_projection.weight"].T)
        alone = torch.cat([ours.encode_text([t]) for t in texts])
    near(patches, seen[:, 1:])
    near(image, seen[:, 0] + (seen[:, 1:].mean(1) if ours.global_pool == "cls+mean" else 0))
    near(alone, ours.encode_text(texts))  # padding does not leak into the mean


@pytest.mark.parametrize("pool", ["cls", "cls+mean"])
def test_dual_encoder(tmp_path, pool):
    dinov2, bert = small_pair()
    heads = dual_encoder(tmp_path, dinov2, bert, pool=pool, tokenizer=word_tokenizer(WORDS, "[CLS]", "[SEP]", 60))
    ours = Backbone.from_pretrained(tmp_path)
    assert (ours.logit_scale, ours.preprocess.size, ours.vision.config.layer_scale) == (50.0, (28, 28), True)
    texts = ["a photo of a cat", "dog", "person riding a red bicycle of a traffic light", "zzz"]
    for size in ((28, 28), (70, 70), (84, 42)):  # interpolated twice, and the grid it was trained for
        compare_dual(dinov2, bert, ours, heads, torch.randn(2, 3, *size), texts)


def test_dual_encoder_14x14_from_518(tmp_path):
    """The shipped model's case: a 37×37 position grid interpolated to 14×14."""
    dinov2, bert = small_pair(518)
    heads = dual_encoder(
        tmp_path, dinov2, bert, image_size=(196, 196), tokenizer=word_tokenizer(WORDS, "[CLS]", "[SEP]", 60)
    )
    ours = Backbone.from_pretrained(tmp_path)
    assert ours.vision.positions.shape == (1 + 37 * 37, 64)
    assert ours.vision.grid(*ours.preprocess.size) == (14, 14)
    compare_dual(dinov2, bert, ours, heads, torch.randn(1, 3, 196, 196), ["cat", "red dog"])


def test_our_own_form_keeps_the_features(tmp_path):
    dinov2, bert = small_pair()
    (tmp_path / "hf").mkdir()
    dual_encoder(tmp_path / "hf", dinov2, bert, pool="cls+mean", tokenizer=word_tokenizer(WORDS, "[CLS]", "[SEP]", 60))
    ours = Backbone.from_pretrained(tmp_path / "hf")
    save_backbone(ours, tmp_path / "own")
    again, through = load_saved_backbone(tmp_path / "own"), Backbone.from_pretrained(tmp_path / "own")
    pixels = torch.randn(1, 3, 28, 28)
    for other in (again, through):
        assert other.fingerprint() == ours.fingerprint()
        near(other.encode_image(pixels)[0], ours.encode_image(pixels)[0], 0)
        near(other.encode_text(["red cat"]), ours.encode_text(["red cat"]), 0)
        assert (other.preprocess, other.logit_scale) == (ours.preprocess, ours.logit_scale)
    assert (again.name, through.name) == (ours.name, str(tmp_path / "own"))  # a backbone is known by where it was found
    save_backbone(ours, tmp_path / "half", weights="fp16")
    half = load_saved_backbone(tmp_path / "half")
    near(half.encode_text(["red cat"]), ours.encode_text(["red cat"]), 2e-2)  # word embeddings in int8
    ours.vision.cls.data[0] += 1
    assert again.fingerprint() != ours.fingerprint()


# the real weights


@pytest.fixture(scope="module")
def real() -> Path:
    folder = Path(os.environ.get("RAMATCH_WEIGHTS", "-"))
    if not all((folder / name / "config.json").is_file() for name in ("clip-b16", "dinov2-s", "minilm")):
        pytest.skip("real weights not present (set RAMATCH_WEIGHTS to a folder with clip-b16, dinov2-s and minilm)")
    return folder


def test_real_clip_vision_tower(real):
    model = CLIPVisionModelWithProjection.from_pretrained(real / "clip-b16").eval()
    ours = Backbone.from_pretrained(real / "clip-b16")
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        seen = model(pixels)
        image, patches = ours.encode_image(pixels)
    near(image, seen.image_embeds)
    near(patches, clip_vision_head(seen.last_hidden_state, load_file(real / "clip-b16" / "model.safetensors"))[:, 1:])


def test_real_label_features(real, shared):
    file = shared / "weights" / "coco80_clip_b16_text.safetensors"
    if not file.is_file():
        pytest.skip("label features not present")
    ours = Backbone.from_pretrained(real / "clip-b16", label_features=file)
    names = list(ours.given_labels)
    assert len(names) == 80
    near(ours.label_features(names).norm(dim=-1), torch.ones(80))


def test_real_dual_encoder(real, tmp_path):
    dinov2, bert = (AutoModel.from_pretrained(real / n).eval() for n in ("dinov2-s", "minilm"))
    heads = dual_encoder(tmp_path, dinov2, bert, image_size=(196, 196), dim=384)
    tokenizer = AutoTokenizer.from_pretrained(real / "minilm")
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = Backbone.from_pretrained(tmp_path)
    texts = ["A photo of a cat.", "a café table with two T-shirts", "dog"]
    expected = tokenizer(texts, padding=True, return_tensors="pt")["input_ids"]
    assert torch.equal(ours.tokenize(texts)[0], expected)
    compare_dual(dinov2, bert, ours, heads, torch.randn(1, 3, 196, 196), texts)


# wrong folders


def test_wrong_folders_are_named(tmp_path):
    def write(name: str, config: dict | str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return folder

    (tmp_path / "empty").mkdir()
    dual = {
        "model_type": "vision-text-dual-encoder",
        "vision_config": {"model_type": "vit"},
        "text_config": {"model_type": "bert"},
    }
    cases = {
        tmp_path / "empty": "has no config.json",
        write("gpt", {"model_type": "gpt2"}): "is a 'gpt2' model; ramatch reads CLIP",
        write("broken", "{"): "not valid JSON",
        write("plain", dual): "BERT's own pooler",
        write("half", dual | {"ramatch": {"image_size": [28, 28]}}): "lacks global_pool, logit_scale",
        write(
            "vit", dual | {"ramatch": {"image_size": [28, 28], "logit_scale": 1.0, "global_pool": "cls"}}
        ): "joins vit and bert",
        write("no-weights", CLIPConfig().to_dict()): "no weights",
        tmp_path / "absent": "no such file or folder",
    }
    for folder, says in cases.items():
        with pytest.raises(RamatchError, match=says):
            Backbone.from_pretrained(folder)


def test_damaged_weights_are_named(tmp_path):
    clip_folder(tmp_path, SMALL_VISION, SMALL_TEXT, 40, std=0.1)
    stored = load_file(tmp_path / "model.safetensors")
    good = {name: value.clone() for name, value in stored.items()}  # not views of the file, which is overwritten
    name = "vision_model.encoder.layers.1.mlp.fc1.weight"
    for change, says in (
        ({name: None}, name.removeprefix("vision_model.")),
        ({name: torch.zeros(3, 3)}, r"blocks\.1\.fc1\.weight"),
        ({"visual_projection.weight": None}, "visual projection"),
        ({"text_projection.weight": torch.zeros(41, 48)}, r"\(41, 48\)"),
    ):
        save_file({k: v for k, v in (good | change).items() if v is not None}, tmp_path / "model.safetensors")
        with pytest.raises(RamatchError, match=says):
            Backbone.from_pretrained(tmp_path)
    save_file(good, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "relu"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RamatchError, match="activation 'relu' is not known"):
        Backbone.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(RamatchError, match="not a readable safetensors file"):
        Backbone.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["clip", "clip_vision_model", "clip_text_model", "vit", "bert", "distilbert"])
def test_fields_that_a_config_leaves_out(kind):
    """They have the defaults of `transformers`."""
    full = AutoConfig.for_model(kind).to_dict()
    families = [table[kind] for table in (VISION, TEXT) if kind in table]
    assert families
    for family in families:
        assert family.shape({"model_type": kind}) == family.shape(full)
    if kind == "clip":  # early releases say some of it twice, and the second is what counts
        early = {"model_type": "clip", "text_config": None, "text_config_dict": {"hidden_size": 640}}
        assert TEXT["clip"].shape(early).width == 640


def test_hub_id_without_network():
    with pytest.raises(RamatchError, match=r"'somebody/some-clip' is neither .* on this machine.*download it once"):
        Backbone.from_pretrained("somebody/some-clip")
