"""Operations counted on paper are those that run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.counts import least_bytes, operations, plain_operations
from benchmarks.models import CLIP_VISION, TINY_VISION, random_images, random_labels, random_ram
from ramatch.config import preset
from ramatch.modeling.fuse import fuse

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "changes", [{}, {"tss_input": "after"}, {"saa_layers": -1, "visual_prompts": 0}, {"tss": False}]
)
def test_counted_operations_run(changes) -> None:
    config = preset("paper", matcher="average", **changes)  # the solver's sums are no matrix products
    ram = random_ram("tiny", config, CPU, text=False)
    labels = random_labels(64, 64, CPU)  # a multiple of the padding
    fused = fuse(ram)
    with (
        torch.no_grad(),
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        fused.recognize(fused.trunk(random_images(2, (64, 64), CPU, 1)[0]), labels)
    counted = sum(operations(TINY_VISION, 64, config, 64).values())
    # the mask's little convolution is left out on paper
    assert 2 * counted == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_vit_b_16() -> None:
    assert plain_operations(CLIP_VISION, 512) / 1e9 == pytest.approx(35.1, abs=0.1)
    parts = operations(CLIP_VISION, 512, preset("paper"), 1006)
    assert parts["tower"] < plain_operations(CLIP_VISION, 512)  # the last layer's patches are not computed
    assert parts["TSS, labels"] / 1e9 == pytest.approx(3 * 2 * 4 * 196 * 1006 * 512 / 1e9)
    whole = dataclasses.replace(preset("paper"), tss=False, saa_layers=0, visual_prompts=0)
    assert operations(CLIP_VISION, 512, whole, 1)["tower"] == pytest.approx(plain_operations(CLIP_VISION, 512))
    # the more images share the weights, the less is moved for one
    assert least_bytes(CLIP_VISION, 512, preset("paper"), 1006, 512) < least_bytes(
        CLIP_VISION, 512, preset("paper"), 1006, 32
    )
