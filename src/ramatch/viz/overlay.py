"""Heat over an image with numpy and Pillow alone, for pictures, HTML reports and the web page."""

from __future__ import annotations

import numpy as np
from PIL import Image

from ramatch.errors import RamatchError

# Stops evenly spaced in OKLab, where equal steps look equal; lightness rises or falls all the way, so the ramps
# survive grey printing and color-blind eyes. HEAT lies over photographs, INK fills matrices on white paper.
_HEAT = (
    "2d1471 441c78 5c227f 742585 8b2a86 a0327f b73877 ce3c6d de4a64 e85d5b f2704e fc823b ff9943 ffb051 ffc65e ffdc6b "
    "fff278"
)
_INK = (
    "fcfcfc dff1f2 c1e5e8 a4dadf 8fcad9 79bbd3 63accc 4c9dc6 448cbe 3e7cb7 386baf 3359a7 2f499a 2c3a86 282c72 241e5f "
    "1f104d"
)


def _ramp(stops: str) -> np.ndarray:
    """(256, 3) uint8 sRGB along the stops."""
    colors = np.array([list(bytes.fromhex(stop)) for stop in stops.split()])
    at = np.linspace(0, 255, len(colors))
    return np.stack([np.interp(np.arange(256), at, channel) for channel in colors.T], axis=1).round().astype(np.uint8)


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
