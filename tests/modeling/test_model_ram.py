"""RAM as a whole: scores, losses, the size of the vocabulary, gradients, preprocessing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_models import backbone, close, pixels, tiny_ram
from torchvision.transforms import InterpolationMode, v2

from ramatch.config import PRESETS, preset
from ramatch.modeling.losses import LOSSES
from ramatch.modeling.ram import RAM, Labels, Trunk

NAMES = ["cat", "red traffic light", "kite", "dog"]
TARGETS = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0]])


def bare(name: str, **changes) -> RAM:
    """Without TSS, so that regions do not depend on the vocabulary and only matching does."""
    return tiny_ram(name, tss=False, **changes)


def vocabulary(n: int, seed: int = 0) -> Labels:
    unit = F.normalize(torch.randn(n, 32, generator=torch.Generator().manual_seed(seed)), dim=-1)
    return Labels(tuple(f"label {i}" for i in range(n)), unit, unit)


def trunk(batch: int = 4, regions: int = 16) -> Trunk:
    g = torch.Generator().manual_seed(9)
    return Trunk(torch.randn(batch, 32, generator=g), torch.randn(batch, regions, 64, generator=g), (), (4, 4))


@pytest.mark.parametrize("name", ["paper", "reference", "ramatch"])
def test_scores_by_hand(name):
    ram = tiny_ram(name)
    with torch.no_grad():
        output = ram(pixels(), NAMES)
        labels = ram.encode_labels(NAMES)
        kept = ram.trunk(pixels())
        regions = F.normalize(ram.region_set.regions(ram.backbone, kept, labels.tss), dim=-1)
        close(output.sim, torch.einsum("bmd,nd->bmn", regions, labels.unit))
        close(output.image, F.normalize(kept.image, dim=-1) @ labels.unit.T)
        close(output.best, output.sim.max(1).values)
        s_r = sum(output.match.plan[:, k] * output.sim[:, k] for k in range(16))
        close(output.region, s_r * 4 / 4 + output.best * 3 / 4 if name == "ramatch" else s_r)  # four labels, a quarter
        score = ram.score(output)
        if name == "ramatch":
            close(score, 0.6 * (output.region + output.best) / 2 + 0.4 * output.image)
        else:
            close(
                score, ((output.region / ram.tau_region).softmax(-1) + (output.image / ram.tau_global).softmax(-1)) / 2
            )
            close(score.sum(-1), torch.ones(2))
        joint = RAM(ram.backbone, ram.config.replace(score="joint"))
        joint.load_state_dict(ram.state_dict())
        logits = (output.region / ram.tau_region + output.image / ram.tau_global) / 2
        close(joint.score(output), logits.softmax(-1))


@pytest.mark.parametrize(("share", "best", "off"), [(0.5, 0.0, 0.5), (0.7, 1.0, 0.2), (1.0, 0.25, 0.0)])
def test_partial_score_by_hand(share, best, off):
    ram = tiny_ram("ramatch", score="partial", region_share=share, best_share=best, partial_share=off)
    with torch.no_grad():
        output = ram(pixels(), NAMES)
        region = (1 - best) * output.region + best * output.sim.max(1).values
        z = ram.backbone.logit_scale / 2 * ((1 - share) * output.image + share * region)
        close(ram.score(output), z - off * z.exp().sum(1, keepdim=True).log())
        cosine = RAM(ram.backbone, ram.config.replace(score="cosine"))
        assert torch.equal(ram.score(output).argsort(1), cosine.score(output).argsort(1)), (
            "within an image it ranks alike"
        )


def test_best_region_beside_the_plan():
    kept, labels = trunk(), vocabulary(5)
    with torch.no_grad():
        plain, best, mixed = (bare("ramatch", max_weight=w).recognize(kept, labels) for w in (0.0, 1.0, 0.25))
    close(best.region, best.sim.amax(1))
    close(mixed.region, 0.75 * plain.region + 0.25 * plain.best)


@pytest.mark.parametrize("matcher", ["kcot", "ot", "bipartite", "average", "reweight"])
def test_default_scores_do_not_scale_with_the_vocabulary(matcher):
    """Times N, a label's column is a distribution over regions: s_R is a weighted mean of its cosines, for any N."""
    if matcher == "bipartite":
        pytest.importorskip("scipy")
    ours, paper, kept = bare("ramatch", matcher=matcher), bare("paper", matcher=matcher), trunk()
    for n in (1, 4, 40, 400):
        with torch.no_grad():
            output, theirs = ours.recognize(kept, vocabulary(n)), paper.recognize(kept, vocabulary(n))
        assert (output.region <= output.sim.amax(1) + 1e-5).all()
        assert (output.region >= output.sim.amin(1) - 1e-5).all()
        close(theirs.match.plan.sum(1), torch.full((4, n), 1 / n))
        assert (theirs.region.abs() <= theirs.sim.abs().amax(1) / n + 1e-6).all()  # the paper's s_R shrinks as 1/N


def test_irrelevant_labels_keep_the_scale():
    """Ten labels, then ninety more that no region resembles: ours stays, the paper's falls to a tenth."""
    kept, few = trunk(), vocabulary(10)
    far = F.normalize(-kept.local.mean((0, 1))[:32] + 0.1 * torch.randn(90, 32), dim=-1)
    many = Labels(
        few.names + tuple(f"far {i}" for i in range(90)), torch.cat([few.unit, far]), torch.cat([few.unit, far])
    )
    sizes = {}
    for name in ("ramatch", "paper"):
        ram = bare(name, matcher="reweight")
        with torch.no_grad():
            sizes[name] = [ram.recognize(kept, labels).region[:, :10] for labels in (few, many)]
    close(sizes["ramatch"][1], sizes["ramatch"][0])
    close(sizes["paper"][1] * 10, sizes["paper"][0])


def test_kcot_scale_with_many_more_labels():
    """Twenty times the labels: competition moves our scores somewhat, the paper's fall twenty times further."""
    kept, ratio = trunk(), {}
    few, many = vocabulary(10), vocabulary(200)  # the first ten are the same
    assert torch.equal(few.unit, many.unit[:10])
    for name in ("ramatch", "paper"):
        ram = bare(name, max_weight=0.0)
        with torch.no_grad():
            a, b = (ram.recognize(kept, labels).region[:, :10].abs().mean() for labels in (few, many))
        ratio[name] = (b / a).item()
    assert 0.25 < ratio["ramatch"] < 4
    assert ratio["paper"] == pytest.approx(ratio["ramatch"] / 20, rel=0.05)


def test_repeated_evidence_keeps_the_score():
    """Every region twice (an image twice as fine): the same weights split in two, the same scores."""
    ram, labels, kept = bare("ramatch", tol=1e-7, max_iter=2000), vocabulary(6), trunk()
    twice = Trunk(kept.image, kept.local.repeat_interleave(2, 1), (), (8, 4))
    with torch.no_grad():
        close(ram.recognize(twice, labels).region, ram.recognize(kept, labels).region, 1e-4)


@pytest.mark.parametrize("kind", list(LOSSES))
def test_losses_reach_every_learned_part(kind):
    ram = tiny_ram("ramatch").train()
    loss = ram.loss(ram(pixels(), NAMES, TARGETS), TARGETS, kind)
    loss.backward()
    learned = {k: p for k, p in ram.named_parameters() if p.requires_grad}
    assert {k.split(".")[0] for k in learned} == {"region_set", "label_set", "tau_global", "tau_region"}
    for name, p in learned.items():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        assert p.grad.abs().max() > 0, name


def test_loss_is_the_sum_of_two_branches():
    ram = tiny_ram("paper")
    output = ram(pixels(), NAMES, TARGETS)
    mmc = LOSSES["mmc"]
    close(
        ram.loss(output, TARGETS),
        mmc(output.region / ram.tau_region, TARGETS) + mmc(output.image / ram.tau_global, TARGETS),
    )


def test_no_gradient_through_the_plan():
    """d s_R / d sim is the plan itself."""
    ram = bare("paper")
    kept = trunk(1)
    local = kept.local.clone().requires_grad_()
    output = ram.recognize(Trunk(kept.image, local, (), kept.grid), vocabulary(3))
    output.sim.retain_grad()
    output.region.sum().backward()
    close(output.sim.grad, output.match.plan)
    assert not output.match.plan.requires_grad


def test_a_few_steps_learn():
    torch.manual_seed(0)
    ram = tiny_ram("ramatch").train()
    optimiser = torch.optim.AdamW([p for p in ram.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        optimiser.zero_grad()
        loss = ram.loss(ram(pixels(), NAMES, TARGETS), TARGETS)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_encoded_labels_serve_instead_of_names():
    ram = tiny_ram()
    with torch.no_grad():
        encoded = ram.encode_labels(NAMES)
        close(ram(pixels(), encoded).region, ram(pixels(), NAMES).region, 0)
        close(ram(pixels(), encoded, TARGETS).region, ram(pixels(), NAMES, TARGETS).region, 0)
    close(encoded.unit.norm(dim=-1), torch.ones(4))
    raw = tiny_ram("paper").encode_labels(NAMES)
    assert (raw.tss.norm(dim=-1) - 1).abs().max() > 0.01  # TSS looks at the features as the tower gives them
    assert encoded.tss is encoded.unit


def test_teacher_only_with_targets():
    ram = tiny_ram("reference")
    with torch.no_grad():
        free, guided = ram(pixels(), NAMES).match.plan, ram(pixels(), NAMES, TARGETS).match.plan
        assert (free - guided).abs().max() > 1e-3
        off = RAM(ram.backbone, ram.config.replace(tkt=False))
        off.load_state_dict(ram.state_dict())
        close(off.eval()(pixels(), NAMES, TARGETS).match.plan, free, 0)


def test_temperatures_start_where_the_config_says():
    model = backbone()
    for name, start in (("paper", 2e-3), ("reference", 2e-3), ("ramatch", PRESETS["ramatch"].tau_region)):
        ram = RAM(model, preset(name, adapted_layers=1, saa_layers=1, prompt_layers=1))
        assert ram.tau_region.item() == pytest.approx(start)
        assert ram.tau_global.item() == pytest.approx(1 / 20)  # 1 / logit_scale
    ram = RAM(model, preset("reference", adapted_layers=1, prompt_layers=1, tau_region=2e-4, tau_global=0.5))
    assert (ram.tau_region.item(), ram.tau_global.item()) == pytest.approx((2e-4, 0.5))


def test_half_precision_backbone_has_full_precision_scores():
    ram = tiny_ram()
    with torch.no_grad():
        expected = ram(pixels(), NAMES)
        with torch.autocast("cpu", torch.bfloat16):
            output = ram(pixels(), NAMES)
    assert output.region.dtype == output.sim.dtype == output.match.plan.dtype == torch.float32
    close(output.region, expected.region, 0.05)


def test_pixel_normalisation_and_stretching():
    """224×224 without keeping the aspect ratio; mean = std = 0.5 in the reference, the backbone's own otherwise."""
    image = Image.fromarray(np.tile(np.arange(100, dtype=np.uint8)[None, :, None], (20, 1, 3)))
    ours, theirs = tiny_ram("ramatch").preprocess, tiny_ram("reference").preprocess
    small = theirs.resize(image)
    assert small.shape == (3, 32, 32)
    assert small.dtype == torch.uint8
    assert small[0, 0, 0] < 5  # both ends of the wide image are there
    assert small[0, 0, -1] > 94
    batch = small[None]
    torch.testing.assert_close(theirs.normalize(batch), (batch.float() / 255 - 0.5) / 0.5)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (ours.mean, ours.std))
    torch.testing.assert_close(ours.normalize(batch), (batch.float() / 255 - mean) / std)
    assert ours.mean[0] == pytest.approx(0.48145466)
    assert torch.equal(
        theirs.resize(Image.fromarray(np.full((32, 32), 7, np.uint8))), torch.full((3, 32, 32), 7, dtype=torch.uint8)
    )


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_resizing_is_torchvisions(interpolation):
    """The reference resizes bilinearly with smoothing, as torchvision does by default; other presets bicubically."""
    g = np.random.default_rng(0)
    image = Image.fromarray(g.integers(0, 256, (90, 130, 3), dtype=np.uint8))
    own = tiny_ram("reference" if interpolation == "bilinear" else "paper").preprocess
    theirs = v2.Resize((32, 32), interpolation=InterpolationMode(interpolation))(image)
    assert own.interpolation == interpolation
    assert torch.equal(own.resize(image), torch.from_numpy(np.array(theirs)).permute(2, 0, 1))


def test_other_settings_on_the_same_weights():
    ram = tiny_ram("ramatch")
    other = ram.with_config(ram.config.replace(matcher="average", score="joint"))
    with torch.no_grad():
        before = ram(pixels(), NAMES)
        found = other(pixels(), NAMES)
        assert (ram.config.matcher, other.config.matcher) == ("kcot", "average")
        close(found.region, ram.recognize(ram.trunk(pixels()), ram.encode_labels(NAMES), matcher="average").region, 0)
        close(ram(pixels(), NAMES).region, before.region, 0)
        assert (found.region - before.region).abs().max() > 1e-3
        ram.tau_region.mul_(2)
    assert other.tau_region is ram.tau_region  # one model, not a copy of it


@pytest.mark.parametrize("name", ["ramatch", "paper"])
def test_scores_without_a_plan_are_those_of_the_plan(name):
    ram = tiny_ram(name)
    with torch.no_grad():
        kept, labels = ram.trunk(pixels()), ram.encode_labels(NAMES)
        whole, scores = ram.recognize(kept, labels), ram.recognize(kept, labels, plan=False)
    close(scores.region, whole.region)
    close(scores.best, whole.best)
    close(scores.image, whole.image, 0)
    assert scores.sim is scores.match is None
    assert whole.sim is not None
    assert whole.match is not None
