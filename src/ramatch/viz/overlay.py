"""Heat over an image with numpy and Pillow alone, for pictures, HTML reports and the web page."""

from __future__ import annotations

import numpy as np
from PIL import Image

from ramatch.errors import RamatchError

# Anchors in OKLab (lightness, a, b), where equal steps look equal; lightness rises or falls all the way, so the
# ramps survive grey printing and colour-blind eyes. HEAT lies over photographs, INK fills matrices on white paper.
_HEAT = ((0.30, 0.04, -0.14), (0.45, 0.14, -0.10), (0.60, 0.19, 0.03), (0.74, 0.11, 0.13), (0.95, -0.03, 0.14))
_INK = ((0.99, 0.00, 0.00), (0.86, -0.05, -0.02), (0.66, -0.06, -0.08), (0.45, -0.01, -0.14), (0.24, 0.03, -0.10))


def _ramp(anchors: tuple[tuple[float, float, float], ...]) -> np.ndarray:
    """(256, 3) uint8 sRGB along the anchors, evenly spaced in OKLab (Ottosson, 2020)."""
    points = np.array(anchors)
    travelled = np.append(0, np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=1)))
    at = np.linspace(0, travelled[-1], 256)
    lab = np.stack([np.interp(at, travelled, channel) for channel in points.T], axis=1)
    to_lms = np.array(
        [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728], [1, -0.0894841775, -1.2914855480]]
    )
    to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = np.clip((lab @ to_lms.T) ** 3 @ to_rgb.T, 0, 1)
    srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.round(255 * srgb).astype(np.uint8)


HEAT, INK = _ramp(_HEAT), _ramp(_INK)


def upsample(heatmap: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(h, w) to (H, W) for size = (W, H), bicubic, kept within the range of the input."""
    heat = np.asarray(heatmap, dtype=np.float32)
    if heat.ndim != 2 or heat.size == 0 or not np.isfinite(heat).all():
        raise RamatchError(f"a heat map must be (rows, columns) with finite numbers, got {heat.shape}")
    big = np.asarray(Image.fromarray(heat).resize(size, Image.Resampling.BICUBIC))
    return np.clip(big, heat.min(), heat.max())


def overlay(
    image: Image.Image, heatmap: np.ndarray, *, vmax: float | None = None, strength: float = 0.85
) -> Image.Image:
    """The image with the heat map (h, w) laid over it: colour and opacity grow with the weight.

    `vmax` is the weight of full heat (default: the map's largest), to compare several maps on one scale.
    `strength` is the opacity there. Where nothing is, the photograph shows through, a little paler than it was.
    """
    photo = np.asarray(image.convert("RGB"), dtype=np.float32)
    top = float(np.max(heatmap)) if vmax is None else vmax
    heat = np.clip(upsample(heatmap, image.size) / max(top, 1e-12), 0, 1)
    grey = photo @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    backdrop = 0.95 * (0.7 * photo + 0.3 * grey[..., None])
    colour = HEAT[np.round(255 * heat).astype(np.uint8)].astype(np.float32)
    alpha = strength * (heat * heat * (3 - 2 * heat))[..., None] ** 0.7  # smooth feet: no rim around a spot
    return Image.fromarray(np.round((1 - alpha) * backdrop + alpha * colour).astype(np.uint8))
