"""Parts for other runtimes: the same numbers as the modules they are made of, in torch, onnxruntime and OpenVINO.
`test_exported.py` runs this file in a process of its own: where OpenVINO 2026.4 has run, Python may crash later."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import close, tiny_ram

from ramatch import Recognizer
from ramatch.assets import photo_paths
from ramatch.data.images import load_image
from ramatch.errors import RamatchError
from ramatch.modeling.exported import ImagePart, MatchPart, TextPart, in_int8, trunk_names
from ramatch.modeling.graph import GraphedRAM
from ramatch.modeling.ram import RAM
from ramatch.modeling.runtimes import choose, make_runtime

LABELS = ["cat", "dog", "traffic light", "kite"]
EXACT = ("openvino", "onnx")  # in float32


def bytes_of(ram: RAM, count: int = 3, seed: int = 0) -> torch.Tensor:
    size = (count, 3, *ram.preprocess.size)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def models() -> dict[str, RAM]:
    """All of the paper, visual prompts and SAA too; and a backbone that pools, as the shipped one does."""
    usual = {"cost": "softmax", "relax": None}
    return {
        "clip": tiny_ram("ramatch", **usual),
        "dual": tiny_ram("aligned", kind="dual", saa_layers=0, **usual),
    }


@pytest.fixture(params=["clip", "dual"])
def ram(request: pytest.FixtureRequest) -> RAM:
    return models()[request.param]


@torch.no_grad()
def test_parts_compute_what_the_model_does(ram: RAM) -> None:
    images = bytes_of(ram)
    trunk, labels = ram.trunk(images), ram.encode_labels(LABELS)
    found = ImagePart(ram)(images)
    assert len(trunk_names(ram)) == len(found)
    for ours, theirs in zip(found, trunk.tensors, strict=True):
        close(ours, theirs, 1e-4)
    output = ram.recognize(trunk, labels)
    matched = MatchPart(ram)(labels.unit, labels.tss, *found)
    for ours, theirs in zip(matched, (output.region, output.image, output.best), strict=True):
        close(ours, theirs, 1e-4)


def test_matching_that_is_not_exported_is_refused() -> None:
    with pytest.raises(RamatchError, match="matcher is average"):
        MatchPart(tiny_ram("ramatch", cost="softmax", relax=None, matcher="average"))


@torch.no_grad()
def test_text_part_is_the_text_tower() -> None:
    ram = tiny_ram("aligned", kind="dual")
    ids, lengths = ram.backbone.tokenize(["cat", "a red traffic light in the rain"])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    wanted = F.normalize(ram.backbone.encode_text(["cat", "a red traffic light in the rain"]), dim=-1)
    close(TextPart(ram)(ids, mask), wanted, 1e-6)
    with pytest.raises(RamatchError, match="learned prompts"):
        TextPart(tiny_ram("ramatch"))


@torch.no_grad()
def test_evening_out_channels_is_exact_and_helps(ram: RAM, monkeypatch: pytest.MonkeyPatch) -> None:
    images, wanted = bytes_of(ram), ImagePart(ram)(bytes_of(ram))
    weights = {name: value.clone() for name, value in ram.state_dict().items()}
    rounded = in_int8(ram, images)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(rounded(images), wanted, strict=True))
    assert 1e-4 < error < 0.1, "rounded, and not by much"
    steps, rounded.steps = rounded.steps, ()
    for ours, theirs in zip(rounded(images), wanted, strict=True):
        close(ours, theirs, 1e-4)
    assert len(steps) > 4 * len(ram.backbone.vision.blocks)
    for name, value in ram.state_dict().items():
        assert torch.equal(value, weights[name]), f"{name}: the model itself must stay as it is"


@pytest.mark.parametrize(("name", "kind"), [("openvino", "clip"), ("openvino-int8", "dual"), ("onnx", "clip")])
def test_runtimes_give_the_same_answers(name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ram = models()[kind]
    pytest.importorskip("onnxscript" if name == "onnx" else "openvino")
    monkeypatch.setenv("RAMATCH_CACHE", str(tmp_path))
    runtime = make_runtime(name, ram, lambda: bytes_of(ram, 8, seed=1))
    assert runtime is not None
    images, labels = bytes_of(ram, 11), ram.encode_labels(LABELS)
    engine = GraphedRAM(ram, best=True, runtime=runtime)
    wanted = GraphedRAM(ram, best=True)(images, labels)
    close(engine(images, labels).scores, wanted.scores, 1e-3 if name in EXACT else 0.05)
    plain = ram.trunk(images)
    for ours, theirs in zip(engine.trunk(images).tensors, plain.tensors, strict=True):
        close(ours, theirs, 1e-3 if name in EXACT else 0.2)
    # a second one reads what the first has kept, and a damaged file is made again
    again = make_runtime(name, ram, lambda: pytest.fail("looked at photographs again"))
    assert torch.equal(again(images[:2]).image, runtime(images[:2]).image)
    if name != "onnx":
        return
    kept = next(tmp_path.glob("runtime-*"))
    next(file for file in kept.iterdir() if file.suffix in (".xml", ".onnx")).write_bytes(b"damaged")
    made = make_runtime(name, ram, lambda: bytes_of(ram, 8, seed=1))
    close(made(images[:2]).image, runtime(images[:2]).image, 1e-3)


def test_images_of_another_size_are_left_to_torch(ram: RAM) -> None:
    class Never:
        name, size = "never", (8, 8)

        def __call__(self, images: torch.Tensor):
            raise AssertionError("not its size")

    images = bytes_of(ram, 2)
    close(GraphedRAM(ram, runtime=Never()).trunk(images).image, ram.trunk(images).image)


def test_what_auto_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ram = tiny_ram()
    monkeypatch.delenv("RAMATCH_RUNTIME")
    assert choose("auto", ram) == "torch"
    monkeypatch.setenv("RAMATCH_RUNTIME", "onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert choose("torch", ram) == "torch"
    with pytest.raises(RamatchError, match=r"onnxruntime.*ramatch\[onnx\]"):
        choose("auto", ram)
    with pytest.raises(RamatchError, match="unknown runtime 'tensorrt'; known: auto, torch"):
        choose("tensorrt", ram)
    with pytest.raises(RamatchError, match="runs on a CPU"):
        choose("openvino", ram.to("meta"))


def test_missing_packages_are_named_before_anything_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(RamatchError, match=r"pip install 'ramatch\[openvino\]'"):
        Recognizer(tiny_ram(), runtime="openvino")


def test_a_recognizer_says_what_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setenv("RAMATCH_CACHE", str(tmp_path))
    recognizer = Recognizer(tiny_ram(), runtime="openvino")
    assert "on cpu by openvino:" in repr(recognizer)
    assert "by" not in repr(Recognizer(tiny_ram(), runtime="torch"))
    plain = Recognizer(recognizer.ram, runtime="torch")
    pictures = [np.random.default_rng(i).integers(0, 256, (40, 48, 3), dtype=np.uint8) for i in range(3)]
    found = [model.predict(pictures, vocabulary=model.encode_vocabulary(LABELS)) for model in (recognizer, plain)]
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours.values, theirs.values, atol=1e-3)


def test_the_shipped_model_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded, it says of the bundled photographs what it says in full, but for a few hundredths."""
    ram = Recognizer.from_pretrained("ramatch-mini", device="cpu", dtype=torch.float32).ram
    photos = torch.stack([ram.preprocess.resize(load_image(path)) for path in photo_paths()[:4]])
    with torch.no_grad():
        plain, rounded = ImagePart(ram)(photos), in_int8(ram, photos)(photos)
    for name, ours, theirs in zip(trunk_names(ram), rounded, plain, strict=True):
        similarity = F.cosine_similarity(ours.flatten(1), theirs.flatten(1)).min()
        assert similarity > (0.99 if name == "image" else 0.95), name
