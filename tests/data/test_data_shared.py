"""The real folders, when they are there: counts, decoding, and the protocol's own rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramatch.data import BENCHMARKS, ImageDataset, prepare, read_captions, read_protocol
from ramatch.data.records import read_annotations
from ramatch.modeling.preprocess import Preprocess


@pytest.mark.parametrize("name", ["coco-ov", "peta-ov", "ucm-ov"])
def test_shared_benchmarks(shared: Path, name: str) -> None:
    benchmark = BENCHMARKS[name]
    prepared = prepare(name, shared / "data" / name)
    assert prepared.images == benchmark.expected
    assert prepared.missing_images == 0
    assert not set(prepared.seen) & set(prepared.unseen)
    zsl = read_protocol(shared / "data" / name, "zsl")
    assert all(r.labels for r in zsl.annotations)
    assert zsl.unseen == prepared.unseen
    assert not zsl.annotations.summary.issues


@pytest.mark.parametrize(("name", "size"), [("coco-ov", (224, 224)), ("peta-ov", (96, 192)), ("ucm-ov", (224, 224))])
def test_shared_images_decode_in_place(shared: Path, name: str, size: tuple[int, int]) -> None:
    annotations = read_annotations(shared / "data" / name, split="test_gzsl")
    assert {annotations.records[i].load().size for i in range(0, len(annotations), 97)} == {size}
    image, index = ImageDataset(annotations.records, Preprocess((64, 32)))[0]
    assert image.shape == (3, 64, 32)
    assert annotations.targets()[index].sum() == len(annotations.records[0].labels)


def test_shared_captions_need_both_folders(shared: Path) -> None:
    captions = read_captions(shared / "data" / "captions", [shared / "data" / "coco-ov"])
    assert len(captions.records) == 12_914
    assert not captions.summary.issues
    assert captions.records[0].load().mode == "RGB"
    alone = read_captions(shared / "data" / "captions")
    assert alone.summary.count("missing image") == 906
