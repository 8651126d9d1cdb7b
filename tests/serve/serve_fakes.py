"""A recognizer without a model: quick, deterministic, and it remembers how it was called."""

from __future__ import annotations

import io
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from ramatch.assets import vocabulary as bundled
from ramatch.masks import FineScores
from ramatch.prediction import Prediction


class FakeVocabulary:
    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)


class FakeRecognizer:
    """Probability of a label depends on its spelling and the image's mean colour; `gate` holds predict back."""

    name, device, calibrated = "fake-mini", "cpu", True

    def __init__(self, *, grid: tuple[int, int] = (7, 9), seconds: float = 0.0, labels: Sequence[str] = ()) -> None:
        self.grid, self.seconds, self.labels = grid, seconds, tuple(labels)
        self.calls: list[dict[str, Any]] = []
        self.encoded: list[tuple[str, ...]] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.fail: Exception | None = None

    def encode_vocabulary(
        self, labels: Sequence[str] | str, *, templates: Sequence[str] | None = None
    ) -> FakeVocabulary:
        labels = bundled(labels) if isinstance(labels, str) else labels
        self.encoded.append(tuple(labels))
        return FakeVocabulary(labels)

    def predict(
        self,
        images: Any,
        *,
        vocabulary: FakeVocabulary | None = None,
        matcher: str | None = None,
        maps: bool = False,
        plan: bool = False,
        masks: bool = False,
        batch_size: int = 32,
    ) -> list[Prediction]:
        labels = vocabulary.labels if vocabulary else self.labels
        self.calls.append({"images": len(images), "labels": labels, "matcher": matcher, "maps": maps})
        self.threads.add(threading.current_thread().name)
        self.started.set()
        assert self.gate.wait(20)
        time.sleep(self.seconds)
        if self.fail is not None:
            raise self.fail
        found = [self._one(image, labels, maps or masks) for image in images]
        return [replace(one, fine=_halves(len(labels))) for one in found] if masks else found

    def _one(self, image: Image.Image, labels: tuple[str, ...], maps: bool) -> Prediction:
        salt = int(np.asarray(image.resize((8, 8)), dtype=np.int64).sum())
        seeds = [zlib.crc32(f"{label}{salt}".encode()) for label in labels]
        probabilities = np.array([((seed % 9973) / 9973) ** 6 for seed in seeds])
        plan = marginal = None
        if maps:
            rows, columns = self.grid
            y, x = np.mgrid[0 : 1 : rows * 1j, 0 : 1 : columns * 1j]
            blobs = []
            for seed in seeds:
                cx, cy, r = (seed >> 3) % 97 / 97, (seed >> 9) % 89 / 89, 0.12 + (seed >> 15) % 50 / 250
                blobs.append(np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / (2 * r * r)).ravel() + 1e-4)
            plan = np.stack([blob / blob.sum() for blob in blobs], axis=1)
            marginal = np.full(rows * columns, 1 / (rows * columns))
        return Prediction(
            labels, probabilities, np.log(probabilities + 1e-6), True, self.grid, plan, plan, marginal, None, image.size
        )

    @property
    def batches(self) -> list[int]:
        """Batch sizes, the warm-up's left out."""
        return [call["images"] for call in self.calls[1:]]


def _halves(labels: int) -> FineScores:
    """The first half of the labels shares the left half of a picture, the second the right one."""
    scores = np.zeros((2, 2, labels), dtype=np.float32)
    scores[:, 0, : labels // 2] = scores[:, 1, labels // 2 :] = 1
    return FineScores(scores, np.full((2, 2), -9, dtype=np.float32))


def picture(
    width: int = 40, height: int = 30, colour: tuple[int, int, int] = (200, 30, 60), kind: str = "JPEG", **save: Any
) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, kind, **save)
    return buffer.getvalue()
