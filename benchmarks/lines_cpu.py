"""What a user without a GPU feels: tagging beside the Hugging Face pipeline, and the wait for the first answer."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ramatch import assets
from ramatch.errors import RamatchError
from ramatch.modeling.checkpoints.folder import save_ram
from ramatch.modeling.checkpoints.loading import bundled_model
from ramatch.modeling.fuse import fuse
from ramatch.modeling.graph import GraphedRAM
from ramatch.recognizer import Recognizer

from .measure import Row, row
from .models import SIZES, Bench, Line, label_names, random_images, random_ram, word_tokenizer

LABELS = 80
FIRST_ANSWER = 6.0  # seconds


def photos() -> list[Image.Image]:
    """The bundled photographs, decoded: both sides start from there."""
    found = sorted(Path(assets.__file__).parent.glob("photos/*.jpg"))
    if not found:
        raise RamatchError("the bundled photographs are missing from this installation; reinstall ramatch")
    pictures = []
    for path in found:
        with Image.open(path) as picture:
            pictures.append(picture.convert("RGB"))
    return pictures


def line_tag(bench: Bench) -> Iterator[Row]:
    """The small model with 80 labels, beside the pipeline with a backbone of the same size."""
    size = "mini" if bench.size == "clip-b16" else bench.size
    names, pictures = label_names(LABELS), photos()
    recognizer = Recognizer(random_ram(size, "ramatch", bench.device), cache=0)
    recognizer.set_vocabulary(names)
    pipeline = _pipeline(size, bench.device)
    ours, theirs = [], []
    for _ in range(3):  # in turns, so that other work on the machine falls on both alike
        theirs.append(_rate(lambda: pipeline(pictures, candidate_labels=names), len(pictures)))
        ours.append(_rate(lambda: recognizer.predict(pictures, batch_size=8), len(pictures)))
    yield row(
        f"tagging, small model, {LABELS} labels, CPU",
        max(ours),
        "img/s",
        baseline=max(theirs),
        baseline_what="zero-shot-image-classification pipeline",
        ratio_at_least=2,
        note=f"{torch.get_num_threads()} threads, {len(pictures)} photographs, best of three turns",
        ours=ours,
        theirs=theirs,
    )
    images = random_images(8, recognizer.ram.preprocess.size, bench.device, 1)[0]
    engine, labels = GraphedRAM(fuse(recognizer.ram), batch_size=8), recognizer.vocabulary.encoded
    rate = max(_rate(lambda: engine(images, labels), 8) for _ in range(3))
    yield row("the same from pixels in memory, fused, CPU", rate, "img/s")


def _rate(call: Any, images: int) -> float:
    begun = time.perf_counter()
    call()
    return images / (time.perf_counter() - begun)


def _pipeline(size: str, device: torch.device) -> Any:
    """The Hugging Face pipeline over a DINOv2 and a BERT of the small model's size, with random weights."""
    from transformers import (
        BertConfig,
        Dinov2Config,
        PreTrainedTokenizerFast,
        VisionTextDualEncoderConfig,
        VisionTextDualEncoderModel,
        ViTImageProcessor,
    )
    from transformers.pipelines.zero_shot_image_classification import ZeroShotImageClassificationPipeline

    vision, text, dim = SIZES[size]
    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        Dinov2Config(
            hidden_size=vision.width,
            num_attention_heads=vision.heads,
            num_hidden_layers=vision.layers,
            image_size=vision.image,
            patch_size=vision.patch,
            mlp_ratio=vision.mlp // vision.width,
        ),
        BertConfig(
            vocab_size=text.vocab,
            hidden_size=text.width,
            num_hidden_layers=text.layers,
            num_attention_heads=text.heads,
            intermediate_size=text.mlp,
        ),
        projection_dim=dim,
    )
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(text).inner, pad_token="[PAD]", unk_token="[UNK]"
    )
    pixels: Any = ViTImageProcessor(size={"height": vision.image, "width": vision.image})
    model: Any = VisionTextDualEncoderModel(config)
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it finds this kind of model unusual for the task, and says so at length
    try:
        return ZeroShotImageClassificationPipeline(
            model=model.eval(), tokenizer=tokenizer, image_processor=pixels, device=device
        )
    finally:
        logger.setLevel(level)


def line_first(bench: Bench) -> Iterator[Row]:
    """From pressing Enter to the answer for one image, in a process of its own."""
    photo = min(Path(assets.__file__).parent.glob("photos/*.jpg"))
    with tempfile.TemporaryDirectory() as folder:
        model = bench.model or ("ramatch-mini" if bundled_model("ramatch-mini") else None)
        note = f"model {model}"
        if model is None:
            size = "mini" if bench.size == "clip-b16" else bench.size
            model, note = folder, "the small model's size with random weights"
            save_ram(random_ram(size, "ramatch", torch.device("cpu")), folder, with_backbone=True, weights="fp16")
        command = [
            sys.executable,
            "-m",
            "ramatch",
            "tag",
            str(photo),
            "--vocabulary",
            "coco80",
            "--device",
            "cpu",
            "--model",
            model,
        ]
        source = str(Path(assets.__file__).parents[2])
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
        seconds = []
        for _ in range(2):  # the second finds its files in the system's cache, as after an install
            begun = time.perf_counter()
            run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
            seconds.append(time.perf_counter() - begun)
            if run.returncode:
                raise RamatchError(f"ramatch tag failed: {run.stderr.strip()[-500:]}")
    yield row(
        "first answer of `ramatch tag`, one image, CPU", seconds[1], "s", at_most=FIRST_ANSWER, note=note, all=seconds
    )


CPU_LINES: dict[str, Line] = {"tag": line_tag, "first": line_first}
