"""Recognizer: any kind of image, any vocabulary, the trunk run once, models saved and loaded, probabilities of both
kinds."""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent / "modeling"))

from tiny_models import backbone, counted, tiny_ram

from ramatch import Recognizer
from ramatch.assets import GENERAL, vocabulary
from ramatch.data.images import ImageError
from ramatch.data.lexicon import Lexicon
from ramatch.errors import RamatchError
from ramatch.evaluation.calibration import Calibrator
from ramatch.modeling.checkpoints.folder import save_backbone
from ramatch.modeling.known import LEAST, Known
from ramatch.modeling.matching import MATCHERS
from ramatch.recognizer import predict_files

LABELS = ["cat", "dog", "traffic light", "kite", "person riding a bicycle"]
BACKGROUND = tuple("red blue large small old riding traffic light photo the in very".split())


def picture(seed: int = 0, size: tuple[int, int] = (48, 40)) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def make(*, cache: int = 64, labels: list[str] | None = LABELS, **changes: object) -> Recognizer:
    torch.manual_seed(0)  # the same weights each time
    recognizer = Recognizer(tiny_ram("ramatch", **changes), cache=cache)
    if labels:
        recognizer.set_vocabulary(labels)
    return recognizer


def same(a, b, tolerance: float = 1e-5) -> None:
    assert a.labels == b.labels
    np.testing.assert_allclose(a.scores, b.scores, atol=tolerance)
    np.testing.assert_allclose(a.values, b.values, atol=tolerance)


def far(a, b, least: float = 1e-3) -> bool:
    return float(np.abs(a.scores - b.scores).max()) > least


# ------------------------------------------------------------------------------------------------------- images


def test_every_kind_of_image_gives_the_same_prediction(tmp_path):
    photo = picture()
    photo.save(tmp_path / "a.png")
    path, array = tmp_path / "a.png", np.asarray(photo)
    data = path.read_bytes()
    recognizer = make(cache=0)
    first = recognizer.predict(path)
    kinds = {
        "str": str(path),
        "PIL": photo,
        "array": array,
        "tensor": torch.from_numpy(array.copy()).permute(2, 0, 1),
        "float array": array / 255.0,
        "float tensor": torch.from_numpy(array / 255.0).permute(2, 0, 1),
        "bytes": data,
        "bytearray": bytearray(data),
        "memoryview": memoryview(data),
        "stream": io.BytesIO(data),
        "opened PIL": Image.open(path),
    }
    for kind, image in kinds.items():
        found = recognizer.predict(image)
        same(found, first)
        assert found.size == (48, 40), kind
    with path.open("rb") as file:
        found = recognizer.predict(file)
    same(found, first)
    assert {first.source, found.source} == {str(path)}
    assert recognizer.predict(array).source is None
    assert far(recognizer.predict(picture(1)), first)


def test_one_image_or_many():
    recognizer = make(cache=0)
    photos = [picture(i, (40, 40)) for i in range(5)]
    one = recognizer.predict(photos[2])
    many = recognizer.predict(photos, batch_size=2)
    assert [type(many), len(many)] == [list, 5]
    same(many[2], one)
    same(recognizer.predict(p for p in photos)[2], one)
    stack = np.stack([np.asarray(p) for p in photos])
    same(recognizer.predict(stack)[2], one)
    same(recognizer.predict(torch.from_numpy(stack).permute(0, 3, 1, 2))[2], one)
    assert recognizer.predict([]) == []
    assert far(many[0], many[1])


def test_one_bad_image_does_not_cost_the_others(tmp_path):
    recognizer = make(cache=0)
    picture().save(tmp_path / "a.png")
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    images = [tmp_path / "bad.jpg", tmp_path / "a.png", picture(1), b"", tmp_path / "a.png"]
    found = recognizer.predict(images, batch_size=2)
    assert [bool(each) for each in found] == [False, True, True, False, True]
    assert found[0].source == str(tmp_path / "bad.jpg")
    assert "not a picture" in found[0].reason
    same(found[2], recognizer.predict(picture(1)))
    same(found[4], found[1])
    assert [bool(each) for each in recognizer.predict(images[:1])] == [False]
    for wrong in (lambda: recognizer.predict(images, strict=True), lambda: recognizer.predict(images[0])):
        with pytest.raises(ImageError, match=r"bad\.jpg: not a picture"):
            wrong()


def test_what_it_shows_is_short():
    recognizer = make(labels=None)
    assert repr(recognizer) == "Recognizer(model on cpu: not calibrated, no vocabulary yet)"
    recognizer.set_vocabulary(LABELS)
    assert repr(recognizer) == "Recognizer(model on cpu: not calibrated, 5 labels)"
    assert repr(recognizer.vocabulary) == "Vocabulary(5 labels: cat, dog, traffic light, …)"


def test_everything_public_is_listed():
    import ramatch

    assert set(ramatch.__all__) <= set(dir(ramatch))
    assert set(ramatch._HOMES) == set(ramatch.__all__) - {"__version__"}
    assert all(getattr(ramatch, name) is not None for name in ramatch.__all__)


def test_rectangular_input():
    ram = tiny_ram("ramatch")
    ram.backbone.preprocess = type(ram.backbone.preprocess)((32, 64))
    recognizer = Recognizer(ram)
    recognizer.set_vocabulary(LABELS)
    found = recognizer.predict(picture(), maps=True)
    assert found.grid == (4, 8)
    assert found.plan.shape == (32, len(LABELS))
    assert found.heatmap("cat").shape == (4, 8)


def test_errors_say_what_to_do(tmp_path):
    recognizer = make(labels=None)
    assert recognizer.labels == ()
    recognizer.set_vocabulary(LABELS)
    with pytest.raises(RamatchError, match="unknown matcher 'magic'; known: kcot"):
        recognizer.predict(picture(), matcher="magic")
    with pytest.raises(RamatchError, match="batch_size"):
        recognizer.predict([picture()], batch_size=0)
    with pytest.raises(ImageError, match="no such file"):
        recognizer.predict(tmp_path / "none.jpg")
    for labels, message in (
        ("cat", "not one string"),
        ([], "no labels"),
        (["a", " a"], "given twice"),
        ([""], "empty"),
    ):
        with pytest.raises(RamatchError, match=message):
            recognizer.set_vocabulary(labels)
    assert recognizer.labels == tuple(LABELS)  # a refused vocabulary changes nothing
    with pytest.raises(RamatchError, match="no device 'abacus'"):
        Recognizer.from_pretrained("x", device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(RamatchError, match="no CUDA GPU"):
            Recognizer.from_pretrained("x", device="cuda")


# ------------------------------------------------------------------------------------------- vocabularies and cache


def test_a_new_vocabulary_does_not_run_the_image_tower_again():
    recognizer, photo = make(), picture()
    with counted(recognizer.ram.backbone.vision.blocks) as calls:
        before = recognizer.predict(photo)
        assert set(calls.values()) == {1}
        recognizer.set_vocabulary(["red", "small dog"])
        after = recognizer.predict(photo)
        assert set(calls.values()) == {1}
        recognizer.predict(picture(1))
        assert set(calls.values()) == {2}
    assert before.labels == tuple(LABELS)
    assert after.labels == ("red", "small dog")
    fresh = make(cache=0, labels=["red", "small dog"])
    with counted(fresh.ram.backbone.vision.blocks) as calls:
        same(fresh.predict(photo), after)
        fresh.predict(photo)
        assert set(calls.values()) == {2}  # without a cache every image runs


def test_the_cache_is_bounded_and_drops_the_least_recently_used():
    recognizer = make(cache=2)
    a, b, c = (picture(i) for i in range(3))
    with counted(recognizer.ram.backbone.vision.blocks) as calls:

        def runs(image) -> bool:
            before = calls[0]
            recognizer.predict(image)
            return calls[0] > before

        assert [runs(a), runs(b), runs(a), runs(c)] == [True, True, False, True]
        assert [runs(a), runs(b)] == [False, True]  # b was used longest ago, so it had to go
    recognizer.predict([picture(i) for i in range(10, 17)])
    assert len(recognizer.trunks) == 2
    assert recognizer.trunks.tensors
    for tensor in recognizer.trunks.tensors:  # a slice would keep its whole batch in memory
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_batches_of_seen_new_and_repeated_images():
    recognizer, plain = make(), make(cache=0)
    a, b, c = (picture(i) for i in range(3))
    recognizer.predict(a)
    sizes: list[int] = []
    inner = recognizer.ram.trunk
    recognizer.ram.trunk = lambda pixels: sizes.append(len(pixels)) or inner(pixels)  # type: ignore[method-assign]
    found = recognizer.predict([b, a, c, b])
    assert sizes == [2]  # b and c once; a is known
    for ours, theirs in zip(found, plain.predict([b, a, c, b]), strict=True):
        same(ours, theirs)
    assert far(found[0], found[1])


def test_another_vocabulary_or_matcher_for_one_call_changes_nothing_else():
    recognizer, photo = make(), picture()
    config, before = recognizer.ram.config, recognizer.predict(photo)
    other = recognizer.encode_vocabulary(["red", "blue"])
    assert recognizer.predict(photo, vocabulary=other).labels == ("red", "blue")
    assert far(recognizer.predict(photo, matcher="average"), before)
    assert recognizer.labels == tuple(LABELS)
    with pytest.raises(RuntimeError, match="boom"):
        recognizer.predict(photo, vocabulary=_Boom(), matcher="ot")  # type: ignore[arg-type]
    assert recognizer.ram.config is config
    same(recognizer.predict(photo), before)


class _Boom:
    """Stands for whatever may go wrong between."""

    def __getattr__(self, name: str):
        raise RuntimeError("boom")


def test_templates_of_a_vocabulary():
    recognizer, photo = make(), picture()
    kept = recognizer.ram.label_set.config
    plain = recognizer.encode_vocabulary(LABELS)
    two = recognizer.encode_vocabulary(LABELS, templates=["A photo of a {}.", "the {} in the rain"])
    assert recognizer.ram.label_set.config is kept
    assert far(recognizer.predict(photo, vocabulary=two), recognizer.predict(photo, vocabulary=plain))
    again = recognizer.encode_vocabulary(LABELS)
    torch.testing.assert_close(again.encoded.unit, plain.encoded.unit)
    with pytest.raises(RamatchError, match="exactly once"):
        recognizer.encode_vocabulary(LABELS, templates=["no place for the label"])
    assert recognizer.ram.label_set.config is kept


# -------------------------------------------------------------------------------------------- maps, probabilities


@pytest.mark.parametrize("matcher", list(MATCHERS))
def test_maps(matcher):
    recognizer = make()
    found = recognizer.predict(picture(), maps=True, matcher=matcher)
    assert found.grid == (4, 4)
    assert found.plan.shape == found.similarities.shape == (16, len(LABELS))
    np.testing.assert_allclose(found.plan.sum(0), 1, atol=1e-3)
    np.testing.assert_allclose(found.marginal.sum(), 1, atol=1e-4)
    assert found.plan.min() >= 0
    assert np.abs(found.similarities).max() <= 1 + 1e-5
    same(recognizer.predict(picture(), matcher=matcher), found)
    assert recognizer.predict(picture(), plan=True).plan is not None
    assert recognizer.predict(picture()).plan is None


@pytest.mark.parametrize("preset", ["ramatch", "paper"])
def test_without_calibration_scores_are_relative_to_the_vocabulary(preset):
    recognizer = Recognizer(tiny_ram(preset))
    ram, photo = recognizer.ram, picture()
    assert not recognizer.calibrated
    for labels in (LABELS, ["cat"]):
        recognizer.set_vocabulary(labels)
        found = recognizer.predict(photo)
        assert not found.calibrated
        with torch.no_grad():
            pixels = ram.preprocess.normalize(ram.preprocess.resize(photo)[None])
            output = ram(pixels, labels)
            image, region = output.image / ram.tau_global, output.region / ram.tau_region
            expected = (image.softmax(-1) + region.softmax(-1))[0] / 2
        np.testing.assert_allclose(found.values, expected.numpy(), atol=1e-5)
        np.testing.assert_allclose(found.values.sum(), 1, atol=1e-5)
        np.testing.assert_allclose(found.scores, ram.score(output)[0].detach().numpy(), atol=1e-5)
    assert found.values.tolist() == [pytest.approx(1.0)]


@pytest.fixture
def calibrator() -> Calibrator:
    features = torch.rand(400, 3, 3, generator=torch.Generator().manual_seed(4))
    return Calibrator.fit(features, features.mean(-1) > 0.5, names=("image", "region", "best"))


def test_calibrated_probabilities_are_used_where_there_are_any(tmp_path, calibrator):
    own = Recognizer(tiny_ram(), calibrator=calibrator)
    own.save_pretrained(tmp_path / "m", with_backbone=True)
    assert (tmp_path / "m" / "calibration.json").is_file()
    recognizer = Recognizer.from_pretrained(tmp_path / "m", device="cpu", kinds=False)
    assert recognizer.calibrated
    recognizer.set_vocabulary(LABELS)
    found = recognizer.predict(picture())
    assert found.calibrated
    ram = recognizer.ram
    with torch.no_grad():
        output = ram(ram.preprocess.normalize(ram.preprocess.resize(picture())[None]), LABELS)
    features = torch.stack([output.image, output.region, output.best], -1)
    np.testing.assert_allclose(found.probabilities, np.asarray(calibrator(features))[0], atol=1e-5)
    assert abs(found.probabilities.sum() - 1) > 0.1
    (tmp_path / "m" / "calibration.json").unlink()
    assert not Recognizer.from_pretrained(tmp_path / "m", device="cpu").calibrated


def test_labels_are_looked_for_as_their_kinds_too(calibrator):
    photo, labels = picture(), ["animal", "kite", "automobile"]
    both = Recognizer(tiny_ram(), calibrator=calibrator)
    both.set_vocabulary(labels)
    found = both.predict(photo, maps=True)
    assert found.labels == both.labels == tuple(labels)
    assert found.similarities.shape[1:] == (3,)
    words = both.vocabulary.sought.words
    assert {"dog", "cat", "car"} <= set(words)
    alone = Recognizer(both.ram, calibrator=calibrator, kinds=False)
    alone.set_vocabulary(list(words))
    each = alone.predict(photo, maps=True)
    np.testing.assert_allclose(found.probabilities, both.vocabulary.sought.combine(each.probabilities), atol=1e-6)
    best = both.vocabulary.sought.winners(each.probabilities)
    np.testing.assert_allclose(found.similarities, each.similarities[:, best], atol=1e-6)
    known = Known(torch.randn(LEAST, 32), torch.tensor([3.0, 0.0, 0.0, 0.0]))
    both.ram.known = known
    both.set_vocabulary(labels)
    alone.set_vocabulary(list(words))
    (found, other), each = both.predict([photo, picture(1)]), alone.predict([photo, picture(1)])
    for answer, by_word in zip((found, other), each, strict=True):
        np.testing.assert_allclose(answer.familiarity, by_word.familiarity[:3], atol=1e-6)
        best = both.vocabulary.sought.winners(by_word.probabilities)
        np.testing.assert_allclose(answer.trust, by_word.trust[best], atol=1e-6)  # of the word that says it
    assert not both.vocabulary.sought.plain
    both.ram.known = replace(known, weights=torch.tensor([0.0, 0.0, 0.0, -5.0]))
    both.set_vocabulary(labels)
    assert both.vocabulary.sought.plain, "words that the model does not know say nothing of others"
    both.ram.known = known
    both.set_vocabulary("voc20")
    assert both.vocabulary.sought == both.sought(vocabulary("voc20"))
    alone.set_vocabulary(labels)
    assert alone.vocabulary.encoded.names == tuple(labels)
    assert Recognizer(both.ram).encode_vocabulary(labels).sought.plain, "relative probabilities cannot be joined"


def test_without_a_vocabulary_the_general_one_is_used():
    recognizer = make(labels=None)
    found = recognizer.predict(picture())
    assert found.labels == recognizer.labels == tuple(vocabulary(GENERAL))
    said = [tag.label for tag in found.tags()]
    assert 0 < len(said) < len(found.labels)
    for tag in found.top(50):
        assert not set(found.parents(tag.label)) & set(said), "each thing is said once"
        assert found.parents(tag.label) == Lexicon.built_in().above(Lexicon.built_in().find(tag.label))
    assert [entry["label"] for entry in found.to_dict(top=5)["labels"]] == said[:5]
    recognizer.set_vocabulary("voc20")
    assert recognizer.labels == tuple(vocabulary("voc20"))


# ------------------------------------------------------------------------------------------------ saving, loading


def size_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def test_adapters_apart_from_their_backbone(tmp_path):
    save_backbone(backbone(), tmp_path / "tower")
    ram = tiny_ram()
    ram.backbone.name = str(tmp_path / "tower")
    recognizer = Recognizer(ram)
    recognizer.save_pretrained(tmp_path / "adapters")
    written = sorted(p.name for p in (tmp_path / "adapters").iterdir())
    assert written == ["SHA256SUMS.txt", "config.json", "ram.safetensors"]
    assert size_of(tmp_path / "adapters") < size_of(tmp_path / "tower") / 2
    assert size_of(tmp_path / "adapters") < 400_000
    recognizer.set_vocabulary(LABELS)
    loaded = Recognizer.from_pretrained(tmp_path / "adapters", device="cpu")  # finds its backbone by name
    loaded.set_vocabulary(LABELS)
    same(loaded.predict(picture()), recognizer.predict(picture()))
    assert loaded.device.type == "cpu"
    (tmp_path / "tower").rename(tmp_path / "moved")
    with pytest.raises(RamatchError, match="no such file or folder"):
        Recognizer.from_pretrained(tmp_path / "adapters", device="cpu")
    moved = Recognizer.from_pretrained(tmp_path / "adapters", device="cpu", backbone=str(tmp_path / "moved"))
    moved.set_vocabulary(LABELS)
    same(moved.predict(picture()), loaded.predict(picture()))
    save_backbone(backbone(seed=1), tmp_path / "wrong")
    with pytest.raises(RamatchError, match=r"fingerprint .* its weights differ"):
        Recognizer.from_pretrained(tmp_path / "adapters", device="cpu", backbone=str(tmp_path / "wrong"))


@pytest.mark.parametrize("kind", ["clip", "dual"])
@pytest.mark.parametrize(("weights", "off"), [("fp32", 1e-6), ("fp16", 2e-2), ("int8", 2e-2)])
def test_a_folder_that_stands_alone(tmp_path, kind, weights, off):
    recognizer = make(kind=kind)
    recognizer.save_pretrained(tmp_path / "run" / "model", with_backbone=True, weights=weights)
    loaded = Recognizer.from_pretrained(str(tmp_path / "run" / "model"), device="cpu")
    loaded.set_vocabulary(LABELS)
    same(loaded.predict(picture()), recognizer.predict(picture()), off)
    around = Recognizer.from_pretrained(tmp_path / "run", device="cpu")  # the folder of a training run will do
    around.set_vocabulary(LABELS)
    same(around.predict(picture()), loaded.predict(picture()))
    shutil.rmtree(tmp_path / "run" / "model" / "backbone")
    with pytest.raises(RamatchError):
        Recognizer.from_pretrained(tmp_path / "run" / "model", device="cpu")


def test_a_plain_backbone_is_used_zero_shot(tmp_path):
    save_backbone(backbone(), tmp_path / "tower")
    recognizer = Recognizer.from_pretrained(tmp_path / "tower", device="cpu", image_size=(32, 48))
    assert not [p for n, p in recognizer.ram.named_parameters() if not n.startswith(("backbone.", "tau")) and p.numel()]
    recognizer.set_vocabulary(LABELS)
    assert recognizer.predict(picture(), maps=True).grid == (4, 6)
    with pytest.raises(RamatchError, match="unknown preset 'best'"):
        Recognizer.from_pretrained(tmp_path / "tower", device="cpu", preset="best")
    with pytest.raises(RamatchError, match=r"neither|cannot be reached"):
        Recognizer.from_pretrained("nobody/no-such-clip", device="cpu")


def test_half_precision_on_a_cpu(tmp_path):
    make().save_pretrained(tmp_path / "m", with_backbone=True)
    found = {}
    for dtype in (None, torch.float32, torch.bfloat16):
        recognizer = Recognizer.from_pretrained(tmp_path / "m", device=torch.device("cpu"), dtype=dtype)
        assert recognizer.ram.backbone.dtype == (dtype or torch.float32)
        recognizer.set_vocabulary(LABELS)
        found[dtype] = recognizer.predict(picture(), maps=True)
    same(found[None], found[torch.float32], 0)
    assert found[torch.bfloat16].scores.dtype == np.float32
    same(found[torch.bfloat16], found[None], 0.15)
    gap = np.abs(found[torch.bfloat16].scores - found[None].scores).max()
    assert 0 < gap < 0.03  # it is another precision, and it hardly matters


# ------------------------------------------------------------------------------------------------- many files


def test_files_are_streamed_with_a_bounded_look_ahead(tmp_path):
    paths = [tmp_path / f"{i:02}.png" for i in range(30)]
    for i, path in enumerate(paths):
        picture(i, (36, 36)).save(path)
    recognizer = make()
    decoded: list[str] = []
    load = recognizer.load
    recognizer.load = lambda image: decoded.append(str(image)) or load(image)  # type: ignore[method-assign]
    stream = predict_files(recognizer, paths, batch_size=3)
    first = next(stream)
    stream.close()
    assert first.source == str(paths[0])
    assert len(decoded) <= 3 + 2 * 3  # the batch, and two more ahead
    found = list(predict_files(recognizer, paths, batch_size=7, maps=True, matcher="ot"))
    assert [p.source for p in found] == [str(p) for p in paths]
    same(found[11], recognizer.predict(paths[11], matcher="ot"))
    assert found[11].plan is not None


def test_unreadable_files_are_recorded_and_the_others_answered(tmp_path):
    paths = [tmp_path / f"{i}.png" for i in range(5)]
    for i, path in enumerate(paths):
        picture(i).save(path)
    paths[0].write_bytes(b"no picture")
    paths[3].write_bytes(paths[4].read_bytes()[:200])
    recognizer = make()
    failed: list[tuple[str, str]] = []
    found = list(predict_files(recognizer, paths, batch_size=2, failed=failed))
    assert [p.source for p in found] == [str(paths[i]) for i in (1, 2, 4)]
    assert [name for name, _ in failed] == [str(paths[0]), str(paths[3])]
    assert "not a picture" in failed[0][1]
    assert "truncated" in failed[1][1]
    with pytest.raises(ImageError, match="not a picture"):
        list(predict_files(recognizer, paths))


# ------------------------------------------------------------------------------------------------- background


def test_background_labels_compete_but_are_not_answered(tmp_path):
    recognizer = make(labels=["cat", "dog"], max_weight=0.0)
    plain = recognizer.predict(picture(), maps=True)
    recognizer.ram.background = BACKGROUND
    recognizer.set_vocabulary(["cat", "dog"])
    found = recognizer.predict(picture(), maps=True)
    assert found.labels == ("cat", "dog")
    assert found.plan.shape == (16, 2)
    np.testing.assert_allclose(found.plan.sum(0), 1, atol=1e-3)
    assert np.abs(found.plan - plain.plan).max() > 1e-3  # they did compete
    np.testing.assert_allclose(found.values.sum(), 1, atol=1e-5)
    recognizer.save_pretrained(tmp_path / "m", with_backbone=True)
    loaded = Recognizer.from_pretrained(tmp_path / "m", device="cpu")
    assert loaded.ram.background == BACKGROUND
    loaded.set_vocabulary(["cat", "dog"])
    same(loaded.predict(picture()), found, 1e-6)


def test_a_label_that_is_asked_for_leaves_the_background():
    ram = tiny_ram()
    ram.background = ("red", "blue", "traffic light")
    assert len(ram.encode_labels(["cat", "dog"]).unit) == 5
    assert len(ram.encode_labels(["Red", "cat"]).unit) == 4
    assert len(ram.encode_labels(["blue", "traffic light", "red"]).unit) == 3
    ram.train()
    assert len(ram.encode_labels(["cat", "dog"]).unit) == 2  # training has its own vocabulary


def test_with_a_background_a_score_hardly_depends_on_what_else_is_asked():
    """Each label asked alone and with five others: scores move by less than a tenth of their spread; without a
    background by several times as much."""
    names = ["cat", "dog", "kite", "person", "bicycle", "rain"]
    photos = [np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8) for i in range(8)]

    def moves(background: tuple[str, ...]) -> tuple[np.ndarray, float]:
        recognizer = make(labels=None, max_weight=0.0)
        recognizer.ram.background = background
        recognizer.set_vocabulary(names)
        together = np.stack([p.scores for p in recognizer.predict(photos)], axis=1)  # (labels, images)
        alone = []
        for name in names:
            recognizer.set_vocabulary([name])
            alone.append([p.scores[0] for p in recognizer.predict(photos)])
        return np.abs(np.array(alone) - together), float(together.std())

    (with_background, spread), (without, _) = moves(BACKGROUND), moves(())
    assert with_background.max() < spread / 10
    assert without.max() > spread / 10
    assert with_background.mean() < without.mean() / 3
