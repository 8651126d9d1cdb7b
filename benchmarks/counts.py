"""Operations and bytes of recognising one image: the two numbers that bound how fast it can be."""

from __future__ import annotations

from ramatch.config import RAMConfig
from ramatch.modeling.backbone import TowerConfig


def operations(c: TowerConfig, dim: int, config: RAMConfig, labels: int) -> dict[str, float]:
    """Floating-point operations (a multiplication and an addition are two) of matrix products, by part, for one image.

    As RAM does it: the last layer computes only its class token where nothing reads its patches.
    """
    w, m = c.width, (c.image // c.patch) ** 2
    t, start = 1 + m, c.layers - config.adapted_layers
    adapted = config.adapted_layers if config.tss else 0
    saa = c.layers if config.saa_layers == -1 else config.saa_layers
    whole = saa == 0 or (adapted > 0 and config.tss_input == "after")
    tower = 2.0 * m * 3 * c.patch**2 * w
    for i in range(c.layers):
        keys = t + (config.visual_prompts if i >= start else 0)
        rows = 1 if i + 1 == c.layers and not whole else t
        projected = 2 * keys + (rows if rows == 1 else keys)  # keys and values of all, queries of those that go on
        tower += 2.0 * projected * w * w + 4.0 * rows * keys * w + 2.0 * rows * w * w + 4.0 * rows * w * c.mlp
    return {
        "tower": tower + 2.0 * w * dim,
        "SAA": saa * (4.0 * m * t * w + 2.0 * m * w * w),
        "TSS, convolutions": adapted * 2.0 * m * w * dim * (9 + 1 + 1),  # 3×3, 1×1 and the way back
        "TSS, labels": adapted * 2 * 4.0 * m * labels * dim,
        "projection": 2.0 * m * w * dim,
        "similarities": 2.0 * (m + 1) * dim * labels,
    }


def plain_operations(c: TowerConfig, dim: int) -> float:
    """Of plain encoding: the tower, every layer whole, and the projection of the class token."""
    t = 1 + (c.image // c.patch) ** 2
    layer = 2.0 * t * (4 * c.width**2 + 2 * c.width * c.mlp) + 4.0 * t * t * c.width
    return 2.0 * (t - 1) * 3 * c.patch**2 * c.width + c.layers * layer + 2.0 * c.width * dim


def least_bytes(c: TowerConfig, dim: int, config: RAMConfig, labels: int, batch: int, number: int = 2) -> float:
    """Fewest bytes through device memory for one image of a batch: pixels in, scores out, weights and labels once."""
    adapted = config.adapted_layers if config.tss else 0
    weights = 3 * c.patch**2 * c.width + c.layers * (4 * c.width**2 + 2 * c.width * c.mlp) + c.width * dim
    weights += adapted * 11 * c.width * dim
    keys = labels * dim * (1 + 3 * adapted)
    return 3.0 * c.image**2 + 4.0 * labels + number * (weights + keys) / batch
