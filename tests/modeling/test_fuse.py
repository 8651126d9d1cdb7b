"""A fused copy gives RAM's own numbers, for every setting that changes the computation, and so do its graphs."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CHOICES, close, tiny_ram

from ramatch.errors import RamatchError
from ramatch.modeling.fuse import fuse
from ramatch.modeling.graph import GraphedRAM

LABELS = ["cat", "red traffic light", "kite", "very old dog", "rain"]


def images(batch: int = 3, height: int = 32, width: int = 32) -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (batch, 3, height, width), generator=g, dtype=torch.uint8)


def alive(ram):
    """BatchNorm's statistics away from zero and one, so that folding them can go wrong."""
    g = torch.Generator().manual_seed(7)
    for module in ram.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=g) * 0.3)
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=g) + 0.5)
    return ram


def plain(ram, pixels, labels):
    with torch.no_grad():
        output = ram.recognize(ram.trunk(ram.preprocess.normalize(pixels)), labels)
        return output, ram.score(output)


def encode(ram, names=LABELS):
    with torch.no_grad():
        return ram.encode_labels(names)


SETTINGS = {
    "ours": ("ramatch", "clip", {}),
    "paper": ("paper", "clip", {}),
    "dinov2": ("ramatch", "dual", {}),
    "dinov2, paper": ("paper", "dual", {}),
    "all layers, sum, full mask": ("reference", "clip", {"stop": "marginal"}),
    "no TSS": ("ramatch", "clip", {"tss": False}),
    "no SAA": ("ramatch", "clip", {"saa_layers": 0}),
    "no prompts": ("paper", "clip", {"visual_prompts": 0}),
    "nothing": ("ramatch", "clip", {"tss": False, "saa_layers": 0, "visual_prompts": 0}),
    "SAA before TSS": ("paper", "clip", {"saa_layers": 3, "adapted_layers": 1}),
    "TSS before SAA": ("paper", "clip", {"saa_layers": 1, "adapted_layers": 3}),
    "all adapted": ("paper", "clip", {"saa_layers": 4, "adapted_layers": 4}),
    "5×5 mask": ("ramatch", "clip", {"mask_kernel": 5}),
    "best region": ("ramatch", "clip", {"max_weight": 0.3, "best_share": 0.0}),
    "best region in the score alone": ("ramatch", "clip", {"max_weight": 0.0, "best_share": 0.8, "region_share": 0.9}),
    "part of TSS": ("paper", "clip", {"tss_share": 0.4}),
    "joint": ("ramatch", "clip", {"score": "joint"}),
    "partial": ("ramatch", "clip", {"score": "partial"}),
    "ot": ("paper", "clip", {"matcher": "ot"}),
    "uniform": ("paper", "clip", {"lpd": False}),
    "reweight": ("ramatch", "clip", {"matcher": "reweight"}),
    "average": ("paper", "clip", {"matcher": "average"}),
    "negatives": ("ramatch", "clip", {"prompts": "dualcoop"}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_same_as_ram(setting: str) -> None:
    name, kind, changes = SETTINGS[setting]
    ram = alive(tiny_ram(name, kind, **changes))
    labels, pixels = encode(ram), images()
    output, scores = plain(ram, pixels, labels)
    fast = GraphedRAM(fuse(ram), best=True)(pixels, labels)
    assert fast.best is not None
    for found, wanted in ((fast.region, output.region), (fast.image, output.image), (fast.best, output.best)):
        close(found, wanted)
    close(fast.scores, scores)
    close(GraphedRAM(fuse(ram))(pixels, labels).scores, scores)  # without `best` the similarities are never whole


def every_choice():
    """Each option of each setting, so that a new one cannot be forgotten here."""
    for name, options in CHOICES.items():
        for option in options:
            yield pytest.param(name, option, id=f"{name}={option}")


@pytest.mark.parametrize(("name", "option"), every_choice())
def test_same_as_ram_for_every_choice(name: str, option: str) -> None:
    if option == "bipartite":
        pytest.importorskip("scipy")
    for kind in ("clip", "dual"):
        more = {"best_share": 0.0} if option == "one" else {}
        ram = alive(tiny_ram("ramatch", kind, **{name: option}, **more))
        labels = encode(ram)
        engine = GraphedRAM(fuse(ram), best=True)
        output, scores = plain(ram, images(), labels)
        close(engine(images(), labels).scores, scores)
        close(engine(images(), labels).image, output.image)


def test_rectangular_images() -> None:
    ram = alive(tiny_ram("paper"))
    labels, pixels = encode(ram), images(2, 48, 24)
    close(GraphedRAM(fuse(ram))(pixels, labels).scores, plain(ram, pixels, labels)[1])


def test_background_competes_but_is_not_asked_for() -> None:
    ram = alive(tiny_ram("ramatch"))
    ram.background = ("small bicycle", "blue light")
    labels = encode(ram)
    assert len(labels.unit) == len(LABELS) + 2
    scores = GraphedRAM(fuse(ram))(images(), labels).scores
    assert scores.shape == (3, len(LABELS))
    close(scores, plain(ram, images(), labels)[1])


def test_a_batch_wide_stop_or_a_per_image_one() -> None:
    ram = alive(tiny_ram("reference"))
    labels = encode(ram)
    _, scores = plain(ram, images(), labels)
    close(GraphedRAM(fuse(ram))(images(), labels).scores, scores)
    ram = ram.with_config(ram.config.replace(stop="marginal", tol=1e-4))
    assert (GraphedRAM(fuse(ram), batch_size=1)(images(), labels).scores - scores).abs().max() < 1e-3


def test_workspace_only_changes_the_steps() -> None:
    ram = alive(tiny_ram("paper"))
    labels, pixels = encode(ram), images(5)
    engine, small = GraphedRAM(fuse(ram)), GraphedRAM(fuse(ram))
    small.ram.workspace_mb = 0  # one row, one image at a time
    calls = count_softmax(lambda: small(pixels, labels)), count_softmax(lambda: engine(pixels, labels))
    assert calls[0] > 300  # 2 layers × 2 streams × 80 positions
    assert calls[1] < 20
    close(small(pixels, labels).scores, engine(pixels, labels).scores)


def count_softmax(call) -> int:
    """How many attention steps a call takes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(e.count for e in profile.key_averages() if e.key == "aten::_softmax")


def test_more_and_fewer_images_than_a_batch() -> None:
    ram = alive(tiny_ram("paper"))
    engine, labels = GraphedRAM(fuse(ram), batch_size=2), encode(ram)
    whole = engine(images(5), labels)
    assert whole.scores.shape == (5, len(LABELS))
    close(whole.scores[4:], engine(images(5)[4:], labels).scores)
    assert engine(images(5)[:0], labels).scores.shape == (0, len(LABELS))


def test_kept_trunks_with_other_vocabularies() -> None:
    ram = alive(tiny_ram("paper"))
    engine, pixels = GraphedRAM(fuse(ram), batch_size=4), images(4)
    kept = engine.trunk(pixels)
    for names in (LABELS, LABELS[::-1], ["kite", "dog"]):  # the second has the first one's size, the third has not
        labels = encode(ram, names)
        close(engine.recognize(kept, labels).scores, plain(ram, pixels, labels)[1])
        close(engine.recognize(kept[1:3], labels).scores, plain(ram, pixels, labels)[1][1:3])
    copy = kept.clone()
    assert all(
        torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(copy.tensors, kept.tensors, strict=True)
    )


def test_engines_do_not_share_a_vocabulary() -> None:
    """A new vocabulary of the same size is written over the old one, which must not be the caller's or another
    engine's."""
    ram = alive(tiny_ram("paper"))
    labels, other = encode(ram), encode(ram, LABELS[::-1])
    kept = [labels.unit.clone(), labels.tss.clone()]
    one, two = GraphedRAM(fuse(ram)), GraphedRAM(fuse(ram))
    one.recorder, two.recorder = FakeRecorder(), FakeRecorder()
    before = two(images(), labels).scores
    one(images(), labels)
    found = one(images(), other).scores
    assert torch.equal(labels.unit, kept[0])
    assert torch.equal(labels.tss, kept[1])
    assert torch.equal(two(images(), labels).scores, before)
    close(found, before.flip(-1))


class Replay:
    """Stands in for a CUDA graph: runs the function again and puts its results where the first ones were."""

    def __init__(self, function) -> None:
        self.function, self.result, self.runs = function, function(), 0

    def replay(self) -> None:
        self.runs += 1
        for static, value in zip(self.result.tensors, self.function().tensors, strict=True):
            static.copy_(value)


class FakeRecorder:
    def __init__(self) -> None:
        self.made: list[Replay] = []

    def record(self, function):
        self.made.append(Replay(function))
        return self.made[-1], self.made[-1].result


def test_graphs_are_kept_per_size_and_filled_each_time() -> None:
    """What surrounds the graphs, with a stand-in for them."""
    ram = alive(tiny_ram("paper"))
    labels, pixels = encode(ram), images(9)
    engine, eager = GraphedRAM(fuse(ram), batch_size=4), GraphedRAM(fuse(ram))
    engine.recorder = recorder = FakeRecorder()
    first = engine(pixels, labels)
    close(first.scores, eager(pixels, labels).scores)
    assert len(recorder.made) == 4  # two halves for four images, two for the one that is left
    kept = first.scores.clone()
    again = engine(pixels.flip(0), labels)
    close(again.scores, eager(pixels.flip(0), labels).scores)
    assert torch.equal(first.scores, kept)  # results are copies
    close(engine(pixels[:3], labels).scores, eager(pixels[:3], labels).scores)  # in the graph of four
    assert len(recorder.made) == 4
    trunk = engine.trunk(pixels[:4])
    for names, made in ((LABELS[::-1], 4), (LABELS[:2], 5)):  # another vocabulary; one of another size
        other = encode(ram, names)
        close(engine.recognize(trunk, other).scores, plain(ram, pixels[:4], other)[1])
        assert len(recorder.made) == made
    close(engine(pixels[4:5], other).scores, plain(ram, pixels[4:5], other)[1])


def test_graphs_with_a_plan_and_with_other_matchers() -> None:
    ram = alive(tiny_ram("ramatch"))
    labels, pixels = encode(ram), images(3)
    engine = GraphedRAM(fuse(ram), batch_size=4)
    engine.recorder = recorder = FakeRecorder()
    for made, matcher in ((2, None), (3, "ot"), (4, "reweight"), (4, "bipartite")):  # the host's own is not recorded
        for _ in range(2):
            found = engine(pixels, labels, plan=True, matcher=matcher)
            with torch.no_grad():
                wanted = ram.recognize(ram.trunk(pixels), labels, matcher=matcher)
            close(found.sim, wanted.sim)
            close(found.match.plan, wanted.match.plan)
            close(found.match.marginal, wanted.match.marginal)
            close(found.region, wanted.region)
            assert len(recorder.made) == made
    assert engine(pixels, labels).match is None
    assert len(recorder.made) == 5


def test_patience() -> None:
    ram = alive(tiny_ram("ramatch"))
    engine, labels = GraphedRAM(fuse(ram), batch_size=4, patience=2), encode(ram)
    engine.recorder = recorder = FakeRecorder()
    made = []
    for _ in range(6):
        engine(images(), labels)
        made.append(len(recorder.made))
    assert made == [0, 0, 1, 1, 2, 2]  # the trunk's, then that of the second half


def test_goes_on_when_recording_fails() -> None:
    ram = alive(tiny_ram("paper"))
    labels = encode(ram)
    for broken in (0, 1):  # the first half, the second half
        engine = GraphedRAM(fuse(ram), batch_size=4)

        class Refusing(FakeRecorder):
            def record(self, function, broken=broken):
                if len(self.made) == broken:
                    raise RuntimeError("operation not permitted when stream is capturing")
                return super().record(function)

        engine.recorder = Refusing()
        with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
            found = engine(images(), labels).scores
        close(found, plain(ram, images(), labels)[1])
        assert "not permitted" in (engine.why_eager or "")
        close(engine(images(), labels).scores, found)


def test_bfloat16_stays_close() -> None:
    """The tower in bfloat16: cosines within 2 %; a wrong step would be off by far more."""
    ram = alive(tiny_ram("paper"))
    labels = encode(ram)
    exact, rough = GraphedRAM(fuse(ram))(images(), labels), GraphedRAM(fuse(ram, torch.bfloat16))(images(), labels)
    assert (rough.image - exact.image).abs().max() < 0.02
    assert (rough.region * len(LABELS) - exact.region * len(LABELS)).abs().max() < 0.02
    assert rough.scores.dtype == torch.float32


def test_autocast_around_it_changes_nothing() -> None:
    ram = alive(tiny_ram("paper"))
    labels = encode(ram)
    wanted = GraphedRAM(fuse(ram))(images(), labels).scores
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(GraphedRAM(fuse(ram))(images(), labels).scores, wanted)


def test_weights_are_those_of_the_moment_it_was_built() -> None:
    ram = alive(tiny_ram("paper"))
    labels = encode(ram)
    engine = GraphedRAM(fuse(ram))
    before = engine(images(), labels).scores
    with torch.no_grad():
        ram.region_set.tss[0].area[0].weight.mul_(-1)
    assert torch.equal(engine(images(), labels).scores, before)
    assert not torch.allclose(GraphedRAM(fuse(ram))(images(), labels).scores, before)


def test_bad_input_is_named() -> None:
    ram = tiny_ram("paper")
    engine, labels = GraphedRAM(fuse(ram), batch_size=2), encode(ram)
    with pytest.raises(RamatchError, match="uint8"):
        engine(images().float(), labels)
    with pytest.raises(RamatchError, match="smaller than a patch"):
        engine(images()[:, :, :4], labels)
    with pytest.raises(RamatchError, match="at most 2 images"):
        engine.trunk(images(3))
    with pytest.raises(RamatchError, match="batch_size"):
        GraphedRAM(ram, batch_size=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", ["paper", "reference", "ramatch"])
def test_graphs_on_the_gpu(name: str) -> None:
    ram = alive(tiny_ram(name)).cuda()
    labels, pixels = encode(ram), images(5)
    engine = GraphedRAM(fuse(ram), batch_size=4)
    eager = GraphedRAM(fuse(ram), batch_size=4)
    eager.recorder = None
    for _ in range(2):
        assert (engine(pixels, labels).scores - eager(pixels.cuda(), labels).scores).abs().max() < 1e-5
    assert engine.why_eager is None
    kept = engine.trunk(pixels[:3])
    other = encode(ram, LABELS[::-1])
    assert (engine.recognize(kept, other).scores.flip(-1) - eager(pixels[:3], labels).scores).abs().max() < 1e-3
