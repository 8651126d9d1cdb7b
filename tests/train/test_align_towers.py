"""Towers of every family that can be joined, against `transformers`, and aligned with each other."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from align_helpers import squares
from tiny_models import backbone

from ramatch.errors import RamatchError
from ramatch.modeling.backbone import Backbone
from ramatch.modeling.checkpoints.folder import save_backbone
from ramatch.modeling.checkpoints.huggingface import TEXT
from ramatch.modeling.checkpoints.loading import read_tower
from ramatch.modeling.preprocess import CLIP_MEAN, HALF, IMAGENET_MEAN
from ramatch.train.align import AlignConfig, align
from ramatch.train.assemble import join_towers
from ramatch.train.targets import Told

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
WORDS = {"vocab_size": 40, "max_position_embeddings": 24}
CLIP_SEES = transformers.CLIPVisionConfig(**SHAPE, image_size=24, patch_size=8, projection_dim=16)
CLIP_READS = transformers.CLIPTextConfig(**SHAPE, **WORDS, bos_token_id=2, eos_token_id=3, projection_dim=16)
VISION: dict[str, Any] = {
    "dinov2": lambda: transformers.Dinov2Model(
        transformers.Dinov2Config(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=24, patch_size=8, mlp_ratio=2
        )
    ),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**SHAPE, image_size=24, patch_size=8)),
    "vit with a head": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**SHAPE, image_size=24, patch_size=8)
    ),
    "clip": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(vision_config=CLIP_SEES.to_dict(), text_config=CLIP_READS.to_dict(), projection_dim=16)
    ),
    "clip's alone": lambda: transformers.CLIPVisionModel(CLIP_SEES),
}
READS: dict[str, Any] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SHAPE, **WORDS)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**SHAPE, **WORDS)),
    "roberta with a head": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SHAPE, **WORDS)),
    "xlm-roberta": lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**SHAPE, **WORDS)),
    "distilbert": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(dim=32, n_layers=3, n_heads=2, hidden_dim=48, **WORDS)
    ),
    "clip": VISION["clip"],
    "clip's alone": lambda: transformers.CLIPTextModel(CLIP_READS),
}


def put(make: Any, folder: Path, tokenizer: Path) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():  # biases and positions start at zero, where mistakes would not show
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    return model


def inner(model: Any, *names: str) -> Any:
    """The tower inside a model with a head or with two towers."""
    return next((getattr(model, name) for name in names if hasattr(model, name)), model)


@pytest.mark.parametrize("kind", VISION)
def test_vision_towers_equal_those_of_transformers(kind, towers, tmp_path):
    model = put(VISION[kind], tmp_path / "seen", towers[1])
    joined = join_towers(tmp_path / "seen", towers[1], image_size=24, dim=20, global_pool="cls").eval()
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    own = inner(model, "vision_model", "vit")
    with torch.no_grad():
        hidden = own(pixels).last_hidden_state
        if "clip" in kind:  # whose last norm is for the class token only
            norm = inner(own, "post_layernorm") if hasattr(own, "post_layernorm") else own.vision_model.post_layernorm
            hidden = norm(hidden)
        torch.testing.assert_close(joined.vision.norm(joined.vision(pixels)), hidden, atol=1e-4, rtol=1e-4)
    wanted = CLIP_MEAN if "clip" in kind else IMAGENET_MEAN if kind == "dinov2" else HALF
    assert joined.preprocess.mean == wanted
    (tmp_path / "seen" / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    assert read_tower(tmp_path / "seen", "vision").preprocess.mean == (0.1, 0.2, 0.3)


@pytest.mark.parametrize("kind", READS)
def test_text_towers_equal_those_of_transformers(kind, towers, tmp_path):
    model = put(READS[kind], tmp_path / "read", towers[1])
    joined = join_towers(towers[0], tmp_path / "read", image_size=24, dim=20, global_pool="cls").eval()
    texts = ["a red square at the left", "a square"]
    ids, lengths = joined.tokenize(texts)
    assert joined.text is not None
    own = inner(model, "text_model", "roberta")
    # RoBERTa tells padding by its token, not by the mask, when it counts positions
    padding = getattr(model.config, "pad_token_id", None) or 0
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    with torch.no_grad():
        hidden = own(ids.masked_fill(~mask, padding), attention_mask=mask.long()).last_hidden_state
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        wanted = hidden[torch.arange(2), lengths - 1] if "clip" in kind else pooled
        torch.testing.assert_close(joined.text(ids, lengths), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("vision", "text"), [("vit", "roberta"), ("clip's alone", "distilbert"), ("clip", "clip")])
def test_they_align_and_are_read_again(vision, text, towers, tmp_path):
    put(VISION[vision], tmp_path / "seen", towers[1])
    put(READS[text], tmp_path / "read", towers[1])
    pixels, captions, _ = squares(20)
    config = AlignConfig(
        image_size=32, dim=12, vision_layers=1, epochs=1, batch_size=10, min_images=3, views=1, ignore_above=0.99999
    )
    result = align(tmp_path / "seen", tmp_path / "read", pixels, Told(captions), config, device="cpu")
    save_backbone(result.backbone, tmp_path / "out")
    loaded = Backbone.from_pretrained(tmp_path / "out")
    assert dataclasses.asdict(loaded.vision.config)["image"] == 32
    torch.testing.assert_close(loaded.encode_text(["a red square"]), result.backbone.encode_text(["a red square"]))
    scaled = loaded.preprocess.normalize(pixels[:2])
    torch.testing.assert_close(loaded.encode_image(scaled)[0], result.backbone.encode_image(scaled)[0])


def test_the_towers_of_a_backbone_of_ours(towers, tmp_path):
    own = backbone("clip")
    save_backbone(own, tmp_path / "ours")
    joined = join_towers(tmp_path / "ours", tmp_path / "ours", image_size=32, dim=9, global_pool="cls")
    assert torch.equal(joined.vision.patch.weight, own.vision.patch.weight)
    assert joined.preprocess.mean == own.preprocess.mean
    with torch.no_grad():
        ids, lengths = own.tokenize(["cat", "red kite"])
        torch.testing.assert_close(joined.text(ids, lengths), own.text(ids, lengths))


def test_what_is_wrong_is_said(towers, tmp_path):
    assert "mpnet" not in TEXT
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "mpnet"}))
    for part in ("vision", "text"):
        with pytest.raises(RamatchError, match="'mpnet' model"):
            read_tower(tmp_path / "odd", part)
    put(READS["distilbert"], tmp_path / "mute", towers[1])
    (tmp_path / "mute" / "tokenizer.json").unlink()
    with pytest.raises(RamatchError, match=r"mute has no tokenizer files; put tokenizer\.json beside"):
        join_towers(towers[0], tmp_path / "mute", image_size=24, dim=9, global_pool="cls")
    changed = json.loads((towers[0] / "config.json").read_text()) | {"hidden_size": 40}
    shutil.copytree(towers[0], tmp_path / "lies")
    (tmp_path / "lies" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(RamatchError, match=r"lies: tensor '.*' is .*, expected"):
        join_towers(tmp_path / "lies", towers[1], image_size=24, dim=9, global_pool="cls")
