"""Fixtures of the picture tests."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def image():
    """A grey gradient: any colour in a picture of it is heat."""
    ramp = np.tile(np.linspace(60, 200, 160, dtype=np.uint8), (120, 1))
    return Image.fromarray(np.stack([ramp] * 3, axis=-1))
