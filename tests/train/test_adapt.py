"""Broad targets, and adapting from files to a model that stands alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "modeling"))

from align_helpers import put_squares
from tiny_models import tiny_ram
from train_tiny import LABELS, TARGETS, pictures, tiny_backbone

from ramatch import Recognizer
from ramatch.config import RAMConfig
from ramatch.errors import RamatchError
from ramatch.modeling.checkpoints.folder import save_backbone
from ramatch.modeling.ram import RAM
from ramatch.train.adapt import AdaptConfig, BroadTargets, adapt_folder, broad_targets, leave_open
from ramatch.train.cached import CachedTask, collect_cached, fit_cached, ram_stem
from ramatch.train.config import CachedConfig
from ramatch.train.features import FeatureCache, Views, cache_features
from ramatch.train.targets import Labels, Sources, Told


def keep(ram: RAM, pixels: torch.Tensor) -> FeatureCache:
    return cache_features(ram_stem(ram), pixels, Views())


# --------------------------------------------------------------------------------------------------- broad targets


def annotated(classes: tuple[str, ...], keys: list[str], rows: dict[str, tuple[str, ...]]) -> Labels:
    truth = torch.full((len(keys), len(classes)), -1, dtype=torch.int8)
    for i, key in enumerate(keys):
        if key in rows:
            truth[i] = torch.tensor([name in rows[key] for name in classes])
    return Labels(classes, truth)


class Words:
    """Text features by hand: each word has its own direction, `puppy` lies close to `dog`."""

    axes = ("dog", "cat", "red", "frisbee", "red frisbee")

    def encode_text(self, names):
        out = torch.zeros(len(names), len(self.axes) + 1)
        for row, name in zip(out, names, strict=True):
            if name == "puppy":
                row[0], row[-1] = 0.9, 0.436
            else:
                row[self.axes.index(name)] = 1
        return out


def test_broad_targets_know_what_each_source_tells():
    captions = {
        "both": ["a dog with a red frisbee"],
        "caption": ["a puppy with a red frisbee", "dog"],
        "tag": ["a red frisbee"],
        "cap2": ["puppy"],
    }
    keys = ["both", "caption", "label", "tag", "cap2"]
    labels = annotated(("cat", "dog"), keys, {"both": ("cat",), "label": ("dog",)})
    told = [captions.get(key, ()) for key in keys]
    plain = AdaptConfig(min_images=2, lexicon=None)
    broad = broad_targets(Words(), Told(told, labels=labels), plain)  # type: ignore[arg-type]
    assert broad.names[:2] == ("cat", "dog")  # labels first
    assert set(broad.names[2:]) == {"red", "frisbee", "red frisbee", "puppy"}  # "dog" is a label already
    assert broad.targets.dtype == torch.int8
    rows = {
        key: dict(zip(broad.names, row.tolist(), strict=True)) for key, row in zip(keys, broad.targets, strict=True)
    }
    tags = {"red": 1, "frisbee": 1, "red frisbee": 1}
    # captions say dog, the annotations (which are complete) say cat and no dog; puppy is too close to dog to be absent
    assert rows["both"] == {"cat": 1, "dog": 0, "puppy": -1, **tags}
    assert rows["caption"] == {"cat": -1, "dog": 1, "puppy": 1, **tags}  # no caption says that there is no cat
    assert rows["label"] == {"cat": 0, "dog": 1, "puppy": -1, "red": -1, "frisbee": -1, "red frisbee": -1}
    assert rows["tag"] == {
        "cat": -1,
        "dog": -1,
        "puppy": 0,
        **tags,
    }  # nor that there is no dog: only annotations deny labels
    assert rows["cap2"] == {"cat": -1, "dog": -1, "puppy": 1, "red": 0, "frisbee": 0, "red frisbee": 0}
    far = broad_targets(Words(), Told(told, labels=labels), plain.replace(ignore_above=0.95))  # type: ignore[arg-type]
    assert far.targets[keys.index("both"), far.names.index("puppy")] == 0
    assert broad.labels == far.labels == 2
    few = broad_targets(Words(), Told(told, labels=labels), plain.replace(min_images=99))  # type: ignore[arg-type]
    assert few.names == ("cat", "dog")
    assert few.targets.tolist() == [[1, 0], [-1, -1], [0, 1], [-1, -1], [-1, -1]]


def test_words_of_one_meaning_share_their_targets_and_kinds_speak_for_what_stands_above(tmp_path):
    table = "name\tsynonyms\tparents\ncat\tpussycat\tanimal\ndog\t\tanimal\npuppy\t\tdog\n"
    (tmp_path / "words.tsv").write_text(table + "animal\tcreature\t\nfrisbee\tdisc\t\n")
    captions = {"said": ["a puppy"], "disc": ["a disc"], "animal": ["an animal"]}
    keys = ["said", "disc", "animal", "cat", "none"]
    labels = annotated(("cat", "dog"), keys, {"cat": ("cat",), "none": ()})
    config = AdaptConfig(min_images=1, lexicon=str(tmp_path / "words.tsv"))
    told = [captions.get(key, ()) for key in keys]

    class Apart:
        def encode_text(self, names):
            return torch.eye(len(names))

    broad = broad_targets(Apart(), Told(told, labels=labels), config)  # type: ignore[arg-type]
    assert broad.names[:2] == ("cat", "dog")
    assert set(broad.names[2:]) == {"puppy", "frisbee", "animal", "pussycat", "creature", "disc"}
    found = {name: column.tolist() for name, column in zip(broad.names, broad.targets.T, strict=True)}
    # a puppy is a dog and an animal; a label that is there makes its kind there; only captions that could have said so,
    # or annotations, deny
    assert found["dog"] == [1, -1, -1, 0, 0]
    assert found["animal"] == found["creature"] == [1, 0, 1, 1, -1]
    assert found["puppy"] == [1, 0, -1, -1, -1]  # an animal may be a puppy
    assert found["cat"] == found["pussycat"] == [-1, -1, -1, 1, 0]
    assert found["frisbee"] == found["disc"] == [0, 1, 0, -1, -1]
    assert [broad.names[source] for source in broad.sources[-3:]] == [
        {"pussycat": "cat", "creature": "animal", "disc": "frisbee"}[name] for name in broad.names[-3:]
    ]


def test_the_likeliest_absences_of_a_tag_are_left_open():
    ram, pixels = tiny_ram(), pictures(12)
    kept = keep(ram, pixels)
    names = ("red", "green", "blue", "yellow")
    targets = torch.zeros(12, 4, dtype=torch.int8)
    targets[:3, 2], targets[:8, 3], targets[11, 2] = 1, 1, -1
    broad = BroadTargets(names, targets, 2, (0, 1, 2, 3))
    with torch.no_grad():  # adapters that have learned something must not count
        for parameter in ram.region_set.tss.parameters():
            parameter.normal_()
    opened = leave_open(ram, kept, broad, targets, 1.0)
    assert torch.equal(opened[:, :2], targets[:, :2])  # annotated labels are what they are
    changed = opened != targets
    assert (targets[changed] == 0).all()
    assert (opened[changed] == -1).all()
    assert changed.sum(0).tolist() == [0, 0, 3, 2]  # as many as there are presences, half of the absences at most
    bare = RAM(ram.backbone, ram.config.replace(tss=False))
    found = collect_cached(bare, keep(bare, pixels), names)
    likely = torch.lerp(found[..., 0], found[..., 2], ram.config.region_share)
    for tag in (2, 3):
        absent = targets[:, tag] == 0
        assert likely[changed[:, tag], tag].min() >= likely[absent & ~changed[:, tag], tag].max() - 1e-3
    assert (leave_open(ram, kept, broad, targets, 0.4) != targets).sum(0).tolist() == [0, 0, 1, 2]


def test_focus_adds_the_loss_of_the_annotated_labels():
    """The first step's loss with focus is that of all labels, and that of the annotated ones alone on top."""
    pixels = pictures()

    def first(targets: torch.Tensor, focus: float, annotated: int) -> float:
        torch.manual_seed(0)
        ram = tiny_ram(matcher="average")  # others look at the targets before the loss does
        config = CachedConfig(epochs=1, batch_size=len(pixels), loss="sigmoid", focus=focus)
        return fit_cached(CachedTask(ram, keep(ram, pixels), targets, LABELS, config, annotated))["loss"][0]

    alone = TARGETS.clone()
    alone[:, 1:] = -1
    assert first(TARGETS, 0.5, 1) == pytest.approx(first(TARGETS, 0, 1) + 0.5 * first(alone, 0, 1), abs=2e-4)
    assert first(TARGETS, 0.5, 0) == first(TARGETS, 0, 0)  # where nothing is annotated there is nothing to add


# ------------------------------------------------------------------------------------------------------ adapting


RAM_SETTINGS = RAMConfig(
    adapted_layers=1, saa_layers=1, prompt_layers=1, visual_prompts=2, prompt_tokens=2, max_iter=20
)


def test_adapt_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("ramatch.train.adapt.LEAST", 5)
    monkeypatch.setattr("ramatch.modeling.known.LEAST", 5)
    data = put_squares(tmp_path / "data", 24)
    save_backbone(tiny_backbone(), tmp_path / "tower")
    config = AdaptConfig(epochs=2, batch_size=8, loss="mmc", focus=0.0, min_images=3, views=2, ignore_above=0.999)
    options: dict = {"ram": RAM_SETTINGS, "config": config, "device": "cpu"}
    gone = ["images/000.png", "images/001.png", "nowhere.png"]
    place = Sources(data / "captions.json", data / "labels.json", split=None, exclude=gone)
    report = adapt_folder(tmp_path / "tower", place, tmp_path / "out", background=["square", "photo"], **options)
    assert (report["images"], report["captioned"], report["labelled"], report["excluded"]) == (22, 22, 11, 2)
    assert report["labels"] == 5
    tags = (tmp_path / "out" / "tags.txt").read_text().split("\n")[:-1]
    assert len(tags) == report["tags"]
    assert "square" in tags
    assert "red" not in tags  # a label already
    written = json.loads((tmp_path / "out" / "adapt.json").read_text())
    assert written == json.loads(json.dumps(report))
    for name in ("config.json", "adapt.json"):  # nothing of this machine travels with the model
        assert str(tmp_path) not in (tmp_path / "out" / name).read_text()
    (tmp_path / "tower").rename(tmp_path / "elsewhere")  # the model folder stands alone
    recognizer = Recognizer.from_pretrained(tmp_path / "out", device="cpu")
    assert recognizer.ram.background == ("square", "photo")
    assert recognizer.ram.config == RAM_SETTINGS
    recognizer.set_vocabulary(["red", "blue"])
    assert recognizer.predict(data / "images" / "000.png").labels == ("red", "blue")
    trained = recognizer.ram.region_set.tss[0].back.weight
    assert trained.abs().max() > 0
    known = recognizer.ram.known  # labels, tags and their synonyms
    assert known is not None
    assert len(known.unit) == report["labels"] + report["tags"]

    tower = tmp_path / "elsewhere"
    with pytest.raises(RamatchError, match="not an empty folder"):
        adapt_folder(tower, place, tmp_path / "out", **options)
    nothing = replace(place, exclude=[f"images/{i:03}.png" for i in range(24)])
    with pytest.raises(RamatchError, match="0 of 24 images are left"):
        adapt_folder(tower, nothing, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()
    again = adapt_folder(tower, place, tmp_path / "new", **options)
    assert again["log"]["loss"] == report["log"]["loss"]  # background has no part in training


def test_captions_and_labels_of_different_images(tmp_path):
    """Captioned images elsewhere, labelled ones in a folder of their own."""
    captioned, labelled = put_squares(tmp_path / "c", 12), put_squares(tmp_path / "l", 12)
    for i in range(12):
        (captioned / "images" / f"{i:03}.png").rename(captioned / "images" / f"c{i:03}.png")
    text = (captioned / "captions.json").read_text()
    (captioned / "captions.json").write_text(text.replace("images/", "images/c"))
    save_backbone(tiny_backbone(), tmp_path / "tower")
    data = Sources(captioned / "captions.json", labelled / "labels.json", split=None)
    config = AdaptConfig(epochs=1, min_images=2, views=1, weights="int8")
    report = adapt_folder(tmp_path / "tower", data, tmp_path / "out", ram=RAM_SETTINGS, config=config, device="cpu")
    assert (report["images"], report["captioned"], report["labelled"]) == (18, 12, 6)
    for file in ("ram.safetensors", "backbone/model-vision.safetensors", "backbone/model-text.safetensors"):
        kinds = {tensor.dtype for tensor in load_file(tmp_path / "out" / file).values()}
        assert torch.int8 in kinds, file
    assert Recognizer.from_pretrained(tmp_path / "out", device="cpu").ram.config == RAM_SETTINGS
