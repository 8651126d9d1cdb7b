"""Alignment learns a toy task, the same way each time, from tensors and from files."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch
from align_helpers import COLOURS, put, put_squares, squares

from ramatch.data import decode_all, read_captions
from ramatch.errors import RamatchError
from ramatch.evaluation.retrieval import retrieval
from ramatch.modeling.backbone import Backbone
from ramatch.modeling.checkpoints.folder import save_backbone
from ramatch.modeling.preprocess import Preprocess
from ramatch.train import align as module
from ramatch.train.align import AlignConfig, AlignTask, align, align_folder, caption_loss, contrast
from ramatch.train.assemble import join_towers
from ramatch.train.targets import Labels, Sources, Told
from ramatch.train.teachers import ask

# random sentence encoders find all words alike, so hardly anything may be ignored as too close
CONFIG = AlignConfig(
    image_size=32, dim=24, vision_layers=2, epochs=25, batch_size=20, min_images=6, views=1, ignore_above=0.9999
).replace(**{"optim.lr": 5e-3, "optim.text_lr": 3e-3, "optim.vision_lr": 3e-3})
SHORT = CONFIG.replace(epochs=2)


def test_alignment_learns(towers):
    pixels, captions, _ = squares(60)
    new_pixels, new_captions, _ = squares(20, seed=9)  # other noise; every colour at every place once
    new_captions = [texts[:1] for texts in new_captions]
    before = retrieval(join_towers(*towers, image_size=32, dim=24, global_pool="cls+mean"), new_pixels, new_captions)
    entries: list[dict] = []
    result = align(*towers, pixels, Told(captions), CONFIG, device="cpu", on_log=entries.append)
    after = retrieval(result.backbone, new_pixels, new_captions)
    for way in ("image→text R@5", "text→image R@5"):
        assert before[way] < 50
        assert after[way] >= 90
    assert entries == result.log
    assert [e["epoch"] for e in entries] == list(range(1, 26))
    assert entries[-1]["step"] == 25 * 3
    for first, last in zip(entries[0]["losses"], entries[-1]["losses"], strict=True):
        assert last < 0.6 * first  # captions and tags, on the global feature and on regions
    assert set(COLOURS) <= set(result.tags)
    assert "square" in result.tags
    assert result.backbone.logit_scale == pytest.approx(sum(entries[-1]["scales"][2:]) / 2, rel=0.05)


def test_what_learns_and_what_stays(towers):
    pixels, captions, _ = squares(40)
    start = join_towers(*towers, image_size=32, dim=24, global_pool="cls+mean").state_dict()
    result = align(*towers, pixels, Told(captions), SHORT, device="cpu")
    now = result.backbone.state_dict()
    changed = {name for name in now if not torch.equal(now[name], start[name])}
    assert not any(name.startswith(("vision.blocks.0.", "vision.patch", "vision.positions")) for name in changed)
    assert not any("text.tokens" in name or "text.positions" in name for name in changed)
    for part in ("vision.blocks.1.", "vision.blocks.2.", "vision.norm", "text.blocks.0.", "visual_projection"):
        assert any(name.startswith(part) for name in changed), part
    assert not any(p.requires_grad for p in result.backbone.parameters())


def same(a: Backbone, b: Backbone) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    "changes",
    [{}, {"saa_layers": 1, "views": 3}, {"tag_across": 0.0, "optim.average": 0.5}],
    ids=["plain", "saa-views", "average"],
)
def test_the_same_seed_gives_the_same_weights(towers, changes):
    pixels, captions, _ = squares(40)
    config = SHORT.replace(**changes)
    first = align(*towers, pixels, Told(captions), config, device="cpu")
    torch.rand(7)  # what happened before does not matter
    again = align(*towers, pixels, Told(captions), config, device="cpu")
    assert same(first.backbone, again.backbone)
    assert first.log == again.log
    other = align(*towers, pixels, Told(captions), config.replace(seed=1), device="cpu")
    assert not same(first.backbone, other.backbone)
    if changes:
        plain = align(*towers, pixels, Told(captions), SHORT, device="cpu")
        assert not same(first.backbone, plain.backbone)


def test_without_tags(towers):
    pixels, captions, _ = squares(20)
    with pytest.raises(RamatchError, match="no tag occurs in 500 images"):
        align(*towers, pixels, Told(captions), SHORT.replace(min_images=500), device="cpu")
    config = SHORT.replace(min_images=500, tag_weight=0.0)
    result = align(*towers, pixels, Told(captions), config, device="cpu")
    assert result.tags == ()
    assert result.log[-1]["losses"][2:4] == [0, 0]
    # no tag taught the tags' temperatures, so the captions' one is used
    assert result.backbone.logit_scale == pytest.approx(sum(result.log[-1]["scales"][:2]) / 2, rel=0.05)


def test_bad_settings_and_data(towers):
    pixels, captions, _ = squares(6)
    for wrong in (
        {"epochs": 0},
        {"batch_size": 1},
        {"crop": 0.0},
        {"optim.average": 1.0},
        {"tag_across": 2.0},
        {"beta": 0.0},
        {"global_pool": "max"},
        {"views": 0},
    ):
        with pytest.raises(RamatchError):
            SHORT.replace(**wrong)
    with pytest.raises(RamatchError, match="6 images and 5 lists"):
        align(*towers, pixels, Told(captions[:5]), SHORT, device="cpu")
    with pytest.raises(RamatchError, match="no caption, no other sentence and no label"):
        align(*towers, pixels, Told([*captions[:5], []]), SHORT, device="cpu")
    with pytest.raises(RamatchError, match="vision_layers is 9, but the vision tower has 3"):
        align(*towers, pixels, Told(captions), SHORT.replace(vision_layers=9, min_images=1), device="cpu")
    changed = AlignConfig().with_overrides(["epochs=3", "optim.text_lr=1e-4", "global_pool=cls"])
    assert changed == AlignConfig(epochs=3, global_pool="cls", optim=AlignConfig().optim.replace(text_lr=1e-4))
    for wrong_text in ("epochs", "speed=3", "epochs=many"):
        with pytest.raises(RamatchError, match=wrong_text.split("=")[0]):
            AlignConfig().with_overrides([wrong_text])


# --------------------------------------------------------------------------------------------------- from files


def test_align_folder(towers, tmp_path, monkeypatch):
    data = put_squares(tmp_path / "data", 40)
    held: list[list[tuple[str, ...]]] = []
    monkeypatch.setattr(
        module, "retrieval", lambda model, pixels, texts: held.append(list(texts)) or retrieval(model, pixels, texts)
    )
    report = align_folder(*towers, Sources(data / "captions.json", test=8), tmp_path / "a", config=SHORT, device="cpu")
    assert report["images"] == 32
    assert report["tags"] > 5
    assert report["settings"]["epochs"] == 2
    assert set(report["retrieval"]) >= {"image→text R@1", "text→image R@10"}
    written = json.loads((tmp_path / "a" / "alignment.json").read_text())
    assert {k: v for k, v in written.items() if k != "log"} == json.loads(json.dumps(report))
    assert len(written["log"]) == 2
    assert len((tmp_path / "a" / "tags.txt").read_text().split("\n")) == report["tags"] + 1
    loaded = Backbone.from_pretrained(tmp_path / "a")
    assert loaded.preprocess.size == (32, 32)
    assert loaded.encode_text(["a red square"]).shape == (1, 24)

    rows = json.loads((data / "captions.json").read_text())["images"]
    random.Random(0).shuffle(rows)
    put(data / "captions.json", {"images": rows})
    align_folder(*towers, Sources(data, test=8), tmp_path / "b", config=SHORT, device="cpu")
    assert len(held[0]) == 8
    assert sorted(held[0]) == sorted(held[1])  # the same images, whatever the file's order

    with pytest.raises(RamatchError, match="not an empty folder"):
        align_folder(*towers, Sources(data), tmp_path / "a", config=SHORT, device="cpu")
    with pytest.raises(RamatchError, match="1 of 40 images are left"):
        align_folder(*towers, Sources(data, test=39), tmp_path / "c", config=SHORT, device="cpu")
    assert not (tmp_path / "c").exists()


def test_an_unreadable_image_is_named(towers, tmp_path):
    data = put_squares(tmp_path / "data", 6)
    (data / "images" / "004.png").write_bytes(b"broken")
    with pytest.raises(RamatchError, match=r"004\.png") as caught:
        align_folder(*towers, Sources(data), tmp_path / "a", config=SHORT, device="cpu")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_pixels_of_records(tmp_path):
    data = put_squares(tmp_path / "data", 5)
    records = read_captions(data).records
    same_size = decode_all(records, Preprocess((32, 32)))
    assert torch.equal(same_size, squares(5)[0])
    assert decode_all(records, Preprocess((16, 48))).shape == (5, 3, 16, 48)


def test_contrast_counts_rows_alike_and_leaves_the_likeliest_out():
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 10, generator=g)
    positive = torch.zeros(4, 10, dtype=torch.bool)
    positive[0, :5], positive[1, 0], positive[2, 3:5] = True, True, True  # the last row has none
    negative = ~positive
    negative[:, 9] = False  # neither

    def one(row: int, column: int, without: int = 0) -> float:
        others = sorted((float(scores[row, j]) for j in range(10) if negative[row, j]), reverse=True)[without:]
        return math.log1p(sum(math.exp(x - float(scores[row, column])) for x in others))

    def rows(without: int = 0) -> list[list[float]]:
        return [[one(i, j, without) for j in range(10) if positive[i, j]] for i in range(3)]

    mean = [sum(r) / len(r) for r in rows()]
    assert contrast(scores, positive, negative).item() == pytest.approx(sum(map(sum, rows())) / 8, rel=1e-5)
    assert contrast(scores, positive, negative, even=True).item() == pytest.approx(sum(mean) / 3, rel=1e-5)
    found = contrast(scores, positive, negative, leave_out=0.2).item()
    assert found == pytest.approx(sum(map(sum, rows(2))) / 8, rel=1e-5)
    assert contrast(scores, positive & False, negative, even=True) == 0


def test_images_held_out_and_left_out_by_name(towers, tmp_path: Path):
    data = put_squares(tmp_path / "data", 40)
    keys = [r.key for r in read_captions(data).records]
    named = Sources(data, test=keys[:6], exclude=keys[4:10])
    report = align_folder(*towers, named, tmp_path / "named", config=SHORT, device="cpu")
    assert report["images"] == 30
    assert report["retrieval"]
    with pytest.raises(RamatchError, match=r"1 image.* not in the captions, such as 'nobody\.jpg'"):
        align_folder(*towers, Sources(data, test=["nobody.jpg"]), tmp_path / "d", config=SHORT, device="cpu")
    with pytest.raises(RamatchError, match="'even_tags' must be true or false"):
        AlignConfig().with_overrides(["even_tags=perhaps"])
    assert AlignConfig().with_overrides(["even_tags=false", "leave_out=0"]) == AlignConfig(
        even_tags=False, leave_out=0.0
    )


# --------------------------------------------------------------------------------- hints, labels, missing captions


def test_the_caption_loss_counts_images_with_captions_alone():
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    has = torch.tensor([True, False, True, True, False])
    wanted = 0.0
    for i in has.nonzero()[:, 0].tolist():
        wanted += float(logits[i, has].logsumexp(0) - logits[i, i])  # among the captions there are
        wanted += float(logits[:, i].logsumexp(0) - logits[i, i])  # among all images
    assert caption_loss(logits, has).item() == pytest.approx(wanted / 6, rel=1e-5)
    assert caption_loss(logits, has & False) == 0


def test_images_without_captions_teach_by_hints_and_labels(towers):
    """Colours that captions never name are learned from hints, and from annotations."""
    pixels, captions, colours = squares(60)
    new, _, shown = squares(20, seed=9)

    plain = [
        [texts[0].replace(c, "something")] if i % 2 else []
        for i, (texts, c) in enumerate(zip(captions, colours, strict=True))
    ]
    hints = [texts if i % 2 else [f"is it {c}"] for i, (texts, c) in enumerate(zip(plain, colours, strict=True))]
    truth = torch.full((60, len(COLOURS)), -1, dtype=torch.int8)
    for i in range(0, 60, 2):
        truth[i] = torch.tensor([colours[i] == c for c in COLOURS])
    labels = Labels(tuple(COLOURS), truth)
    silent = [texts or ["is it something"] for texts in plain]

    def right(told: Told) -> float:
        return colours_right(align(*towers, pixels, told, CONFIG, device="cpu"), new, shown)

    assert right(Told(plain, silent)) <= 0.5
    assert right(Told(plain, hints)) >= 0.8
    assert right(Told(plain, labels=labels)) >= 0.8


def colours_right(result, pixels, shown) -> float:
    """Share of images whose colour is the word nearest to them."""
    features = result.backbone.encode_image(result.backbone.preprocess.normalize(pixels))
    image = torch.nn.functional.normalize(features[0].float(), dim=-1)
    words = torch.nn.functional.normalize(result.backbone.encode_text(list(COLOURS)).float(), dim=-1)
    best = (image @ words.T).argmax(-1).tolist()
    return sum(list(COLOURS)[b] == c for b, c in zip(best, shown, strict=True)) / len(shown)


def test_a_teacher_tells_what_captions_leave_out(towers, tmp_path):
    """Colours that few captions name, and of which most captions say the wrong one, are learned from a teacher."""
    pixels, captions, colours = squares(60)
    new, _, shown = squares(20, seed=9)
    save_backbone(align(*towers, pixels, Told(captions), CONFIG, device="cpu").backbone, tmp_path / "teacher")
    wrong = list(COLOURS)[1:] + list(COLOURS)[:1]
    swapped = dict(zip(COLOURS, wrong, strict=True))
    told = Told([[texts[0].replace(c, swapped[c])] for texts, c in zip(captions, colours, strict=True)])
    taught = CONFIG.replace(teachers=(str(tmp_path / "teacher"),), teacher_weight=30.0)
    assert colours_right(align(*towers, pixels, told, CONFIG, device="cpu"), new, shown) <= 0.2
    result = align(*towers, pixels, told, taught, device="cpu")
    assert colours_right(result, new, shown) >= 0.8
    assert len(result.log[0]["losses"]) == 6
    assert result.log[-1]["losses"][5] < 0.5 * result.log[0]["losses"][5]
    with pytest.raises(RamatchError, match="nowhere"):
        align(*towers, pixels, told, CONFIG.replace(teachers=(str(tmp_path / "nowhere"),)), device="cpu")


def test_several_teachers_answer_with_their_mean(towers, tmp_path):
    pixels, captions, _ = squares(20)
    names = []
    for seed in (0, 1):
        names.append(str(tmp_path / str(seed)))
        result = align(*towers, pixels, Told(captions), SHORT.replace(seed=seed), device="cpu")
        save_backbone(result.backbone, names[-1])
    texts, concepts = ["a red square", "a dog"], [("red",), ("square", "box")]
    asked: dict = {"device": torch.device("cpu"), "dtype": torch.float32, "beta": 20.0}
    alone = [ask([name], pixels, texts, concepts, **asked) for name in names]
    both = ask(names, pixels, texts, concepts, **asked)
    rough = ask(names, pixels, texts, concepts, **asked | {"dtype": torch.bfloat16})
    torch.testing.assert_close(rough.tags.float(), both.tags, atol=0.02, rtol=0.02)
    torch.testing.assert_close(both.tags, (alone[0].tags + alone[1].tags) / 2)
    rows, which = torch.tensor([3, 4]), torch.tensor([1, 0])
    mean = sum(one.of_captions(rows, which) for one in alone) / 2
    torch.testing.assert_close(both.of_captions(rows, which), mean)
    own = Backbone.from_pretrained(names[0])  # and one of them is what the backbone itself says
    image, regions = own.encode_image(own.preprocess.normalize(pixels))
    word = torch.nn.functional.normalize(own.encode_text(["red", "reds"]), dim=-1).mean(0)
    cosine = torch.nn.functional.cosine_similarity
    pooled = (torch.logsumexp(20 * cosine(regions, word, dim=-1), 1) - math.log(regions.shape[1])) / 20
    torch.testing.assert_close(alone[0].tags[:, 0], (cosine(image, word, dim=-1) + pooled) / 2, atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------- mosaics


def test_mosaics_teach_the_tags_of_all_four_images(towers, monkeypatch):
    """Each step sees `mosaics` pictures per image, with the tags of the four images they show, and tags alone."""
    pixels, captions, _ = squares(40)
    seen: list[tuple[int, torch.Tensor]] = []
    real = AlignTask._tag_losses

    def spy(self, found, masks, late):
        seen.append((len(found[0]), masks[0].sum(1)))
        return real(self, found, masks, late)

    monkeypatch.setattr(AlignTask, "_tag_losses", spy)
    result = align(*towers, pixels, Told(captions), SHORT.replace(mosaics=0.5), device="cpu")
    assert [count for count, _ in seen] == [20, 10] * 4  # two epochs of two steps
    ones, fours = (torch.cat([tags for count, tags in seen if count == size]).float().mean() for size in (20, 10))
    assert 1.5 * ones < fours <= 4 * ones
    seen.clear()
    plain = align(*towers, pixels, Told(captions), SHORT.replace(mosaics=0.0), device="cpu")
    assert [count for count, _ in seen] == [20] * 4
    assert result.log[-1]["losses"] != plain.log[-1]["losses"]
    with pytest.raises(RamatchError, match="'mosaics' must not be negative"):
        AlignConfig(mosaics=-1)
