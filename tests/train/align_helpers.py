"""Tiny random DINOv2 and BERT folders, and pictures of coloured squares with captions."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 40),
    "blue": (40, 60, 230),
    "yellow": (240, 230, 40),
    "white": (250, 250, 250),
}
PLACES = {"top": (0, 8), "bottom": (16, 8), "left": (8, 0), "right": (8, 16)}  # corner of the square: row, column
WORDS = ["a", "square", "at", "the", "there", "is", "something", "photo", "of", "A", ".", *COLOURS, *PLACES]
SIDE = 32


def tiny_towers(root: Path) -> tuple[Path, Path]:
    from transformers import BertConfig, BertModel, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    vision, text = root / "tiny-dinov2", root / "tiny-bert"
    Dinov2Model(
        Dinov2Config(
            hidden_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=24, patch_size=8, mlp_ratio=2
        )
    ).save_pretrained(vision)
    BertModel(
        BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=40,
            max_position_embeddings=24,
        )
    ).save_pretrained(text)
    ids = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    inner = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.save(str(text / "tokenizer.json"))
    return vision, text


def squares(count: int = 60, seed: int = 0) -> tuple[torch.Tensor, list[list[str]], list[str]]:
    """Pictures uint8 (n, 3, 32, 32) of one coloured square on noise, two captions each, and the colours shown."""
    rng = np.random.default_rng(seed)
    kinds = list(product(COLOURS, PLACES))
    pictures, captions, colours = [], [], []
    for i in range(count):
        colour, place = kinds[i % len(kinds)]
        picture = rng.integers(90, 130, (SIDE, SIDE, 3), dtype=np.uint8)
        row, column = PLACES[place]
        picture[row : row + 16, column : column + 16] = COLOURS[colour]
        pictures.append(torch.from_numpy(picture).permute(2, 0, 1))
        captions.append([f"a {colour} square at the {place}", f"there is something {colour}"])
        colours.append(colour)
    return torch.stack(pictures), captions, colours


def put_squares(root: Path, count: int = 60) -> Path:
    """The same as files: images/, captions.json of all, labels.json (colours) of every second one."""
    pixels, captions, colours = squares(count)
    (root / "images").mkdir(parents=True)
    names = [f"images/{i:03}.png" for i in range(count)]
    for name, picture in zip(names, pixels, strict=True):
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(root / name)
    put(root / "captions.json", {"images": [[n, c] for n, c in zip(names, captions, strict=True)]})
    rows = [[n, [c]] for n, c in zip(names, colours, strict=True)][::2]
    put(root / "labels.json", {"classes": list(COLOURS), "images": rows})
    return root


def put(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
