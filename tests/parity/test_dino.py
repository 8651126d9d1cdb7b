"""DINOv2 with registers, its SwiGLU size, and DINOv3 against `transformers`; aligned with multilingual text towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import SIZES, WORDS
from hf_models import lively, near, word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from ramatch.config import preset
from ramatch.errors import RamatchError
from ramatch.modeling.backbone import Backbone
from ramatch.modeling.checkpoints.folder import save_backbone
from ramatch.modeling.checkpoints.loading import read_tower
from ramatch.modeling.fuse import fuse
from ramatch.modeling.graph import GraphedRAM
from ramatch.modeling.ram import RAM
from ramatch.train.align import AlignConfig, align
from ramatch.train.assemble import join_towers
from ramatch.train.targets import Told

DINOV2 = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 56, "patch_size": 14}
DINOV3 = SIZES | {"image_size": 64, "patch_size": 16, "num_register_tokens": 4}
TOWERS: dict[str, Any] = {
    "dinov2 with registers": lambda: transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**DINOV2, num_register_tokens=4)
    ),
    "dinov2 with registers, giant": lambda: transformers.Dinov2WithRegistersModel(
        transformers.Dinov2WithRegistersConfig(**DINOV2, use_swiglu_ffn=True)
    ),
    "dinov2, giant": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**DINOV2, use_swiglu_ffn=True)),
    "dinov3": lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**DINOV3)),
    "dinov3, gated": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**DINOV3, use_gated_mlp=True, hidden_act="silu", key_bias=True)
    ),
    "dinov3, no registers": lambda: transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(**DINOV3 | {"num_register_tokens": 0})
    ),
}


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """XLM-RoBERTa with a sentencepiece-like tokenizer, as multilingual ones are."""
    folder = tmp_path_factory.mktemp("xlm-roberta")
    config = transformers.XLMRobertaConfig(**SIZES, vocab_size=80, max_position_embeddings=34)
    lively(transformers.XLMRobertaModel(config)).save_pretrained(folder)
    multilingual_tokenizer(folder)
    return folder


def multilingual_tokenizer(folder: Path) -> None:
    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>")
    inner.train_from_iterator(
        ["ein roter Hund", "une photo d'un chat", "犬と猫", "a red dog", "a green square"], trainer
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    inner.save(str(folder / "tokenizer.json"))


def put(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = lively(TOWERS[kind]())
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", TOWERS)
@torch.no_grad()
def test_vision_towers(kind, words, tmp_path) -> None:
    model = put(kind, tmp_path / "seen")
    config = model.config
    side = config.image_size
    joined = join_towers(tmp_path / "seen", words, image_size=side, dim=20, global_pool="cls").eval()
    first, patch = joined.vision.config.prefix, config.patch_size
    assert first == 1 + getattr(config, "num_register_tokens", 0)
    for size in ((side, side), (6 * patch, 3 * patch), (2 * patch, 5 * patch)):
        pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(2))
        hidden = model(pixels).last_hidden_state
        near(joined.vision.norm(joined.vision(pixels)), hidden, 1e-5)
        wanted = hidden @ joined.visual_projection.weight.T
        image, patches = joined.encode_image(pixels)
        near(image, wanted[:, 0], 1e-5)
        near(patches, wanted[:, first:], 1e-5)
    save_backbone(joined, tmp_path / "own")
    again = Backbone.from_pretrained(tmp_path / "own")
    assert again.vision.config == joined.vision.config
    assert again.fingerprint() == joined.fingerprint()


@pytest.mark.parametrize("kind", ["dinov2 with registers", "dinov3"])
@torch.no_grad()
def test_fused_is_the_same(kind, words, tmp_path) -> None:
    put(kind, tmp_path / "seen")
    joined = join_towers(tmp_path / "seen", words, image_size=64 if "3" in kind else 56, dim=20, global_pool="cls+mean")
    labels = ["red dog", "chat", "犬"]
    pixels = torch.randint(0, 256, (2, 3, *joined.preprocess.size), dtype=torch.uint8)
    for name, changes in (("aligned", {}), ("ramatch", {"visual_prompts": 3}), ("ramatch", {"pooled": "adapted"})):
        ram = RAM(joined, preset(name, adapted_layers=2, saa_layers=2, prompt_layers=1, **changes)).eval()
        for key, p in ram.named_parameters():
            if not key.startswith(("backbone.", "tau")):
                p.data.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
        encoded = ram.encode_labels(labels)
        output = ram.recognize(ram.trunk(pixels), encoded)
        fast = GraphedRAM(fuse(ram), best=True)(pixels, encoded)
        near(fast.image, output.image, 1e-5)
        near(fast.region, output.region, 1e-5)
        near(fast.scores, ram.score(output), 1e-5)


@pytest.mark.parametrize("kind", TOWERS)
def test_aligned_and_trained(kind, words, tmp_path) -> None:
    """With XLM-RoBERTa: an epoch of `align`, then a training step of RAM on what it made."""
    put(kind, tmp_path / "seen")
    pixels = torch.randint(0, 256, (12, 3, 60, 60), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    captions = [["a red dog"], ["une photo d'un chat"], ["a green square"]] * 4
    side = 64 if "dinov3" in kind else 56
    config = AlignConfig(image_size=side, dim=12, vision_layers=1, epochs=1, batch_size=6, min_images=3, views=1)
    result = align(tmp_path / "seen", words, pixels, Told(captions), config, device="cpu")
    save_backbone(result.backbone, tmp_path / "out")
    loaded = Backbone.from_pretrained(tmp_path / "out")
    scaled = loaded.preprocess.normalize(pixels[:2, :, :side, :side])
    torch.testing.assert_close(loaded.encode_image(scaled)[0], result.backbone.encode_image(scaled)[0])
    ram = RAM(loaded, preset("aligned", adapted_layers=2, prompts="deep", prompt_layers=1, visual_prompts=2)).train()
    targets = torch.tensor([[1, 0], [0, 1]])
    ram.loss(ram(pixels[:2, :, :side, :side], ["red dog", "chat"], targets), targets).backward()
    for part in (ram.region_set.tss[-1].back.weight, ram.region_set.visual_prompts, ram.label_set.prompts):
        assert torch.isfinite(part.grad).all()
        assert part.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["xlm-roberta", "minilm"])
@torch.no_grad()
def test_multilingual_text_towers(kind, words, tmp_path) -> None:
    """Multilingual MiniLM is a BERT with XLM-RoBERTa's kind of words."""
    if kind == "minilm":
        words = tmp_path / "words"
        config = transformers.BertConfig(**SIZES, vocab_size=80, max_position_embeddings=34)
        model = lively(transformers.BertModel(config))
        model.save_pretrained(words)
        multilingual_tokenizer(words)
    else:
        model = transformers.XLMRobertaModel.from_pretrained(words).eval()
    put("dinov3", tmp_path / "seen")
    joined = join_towers(tmp_path / "seen", words, image_size=64, dim=20, global_pool="cls").eval()
    texts = ["ein roter Hund", "犬", "une photo d'un chat et un chien"]
    own = Tokenizer.from_file(str(words / "tokenizer.json")).encode_batch(texts)
    ids, lengths = joined.tokenize(texts)
    assert [row[:n].tolist() for row, n in zip(ids, lengths.tolist(), strict=True)] == [e.ids for e in own]
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    padding = model.config.pad_token_id or 0
    hidden = model(ids.masked_fill(~mask, padding), attention_mask=mask.long()).last_hidden_state
    pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    near(joined.encode_text(texts), pooled @ joined.text_projection.weight.T, 1e-5)


def test_a_tower_alone_is_not_a_model(tmp_path) -> None:
    put("dinov3", tmp_path / "seen")
    with pytest.raises(RamatchError, match=r"'dinov3_vit' model, a tower alone .* `ramatch align` joins"):
        Backbone.from_pretrained(tmp_path / "seen")
    with pytest.raises(RamatchError, match=r"'dinov3_vit' model, which has no text tower; give it as --vision"):
        read_tower(tmp_path / "seen", "text")


@torch.no_grad()
def test_siglip_towers_for_align(tmp_path, words) -> None:
    """Its vision tower joins another text; its text tower, which reads padding, is refused."""
    sight = transformers.SiglipVisionConfig(**SIZES, image_size=64, patch_size=16)
    model = lively(transformers.SiglipVisionModel(sight))
    model.save_pretrained(tmp_path / "seen")
    joined = join_towers(tmp_path / "seen", words, image_size=80, dim=20, global_pool="cls+mean").eval()
    pixels = torch.randn(2, 3, 80, 80)
    seen = model(pixels, interpolate_pos_encoding=True).pooler_output @ joined.visual_projection.weight.T
    near(joined.project_image(joined.vision(pixels)), seen, 1e-5)
    reads = transformers.SiglipTextConfig(
        **SIZES, vocab_size=60, max_position_embeddings=16, bos_token_id=58, eos_token_id=59
    )
    transformers.SiglipTextModel(reads).save_pretrained(tmp_path / "read")
    word_tokenizer(WORDS, "<s>", "</s>", 60).save(str(tmp_path / "read" / "tokenizer.json"))
    with pytest.raises(RamatchError, match="reads texts filled up to 16 tokens"):
        join_towers(tmp_path / "seen", tmp_path / "read", image_size=64, dim=20, global_pool="cls")
