"""Vectors of a library: int8, in append-only files that are mapped into memory.

A row holds a photo's global feature (D), its kept regions (K, D), and a scale for each of the two. The database says
how many rows count; what lies behind them was being written when somebody pulled the plug, and is overwritten.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PRODUCTS = 1 << 20  # of regions and labels at once: they stay in the processor's cache
Arrays = dict[str, np.ndarray]


class Vectors:
    """Rows of one generation; compacting writes the next one beside it."""

    def __init__(self, folder: Path, generation: int, dim: int, kept: int) -> None:
        shapes = {"image": ("<i1", (dim,)), "regions": ("<i1", (kept, dim)), "scales": ("<f4", (2,))}
        self.parts = {folder / f"{name}.{generation}": (name, *shape) for name, shape in shapes.items()}

    def append(self, rows: int, arrays: Arrays) -> None:
        """Write behind the `rows` that count, and wait until the disk has it all."""
        try:
            for path, (name, kind, shape) in self.parts.items():
                with open(path, "ab") as file:
                    file.truncate(rows * np.dtype((kind, shape)).itemsize)
                    file.write(arrays[name].astype(kind).tobytes())
                    file.flush()
                    os.fsync(file.fileno())
        except OSError:
            for path, (_, kind, shape) in self.parts.items():  # a full disk gets its room back
                with contextlib.suppress(OSError):
                    os.truncate(path, rows * np.dtype((kind, shape)).itemsize)
            raise

    def open(self, rows: int) -> Arrays:
        """The first `rows`, mapped. Copy-on-write, because torch does not take read-only memory."""
        if not rows:
            return {name: np.zeros((0, *shape), kind) for name, kind, shape in self.parts.values()}
        return {name: np.memmap(p, kind, "c", shape=(rows, *shape)) for p, (name, kind, shape) in self.parts.items()}

    def remove(self) -> None:
        for path in self.parts:
            path.unlink(missing_ok=True)


def quantize(image: np.ndarray, regions: np.ndarray) -> Arrays:
    """Features (B, D), (B, K, D) → int8 and scales. A photo's regions share one: the best is found in integers."""
    scales = np.stack([np.abs(image).max(-1), np.abs(regions).max((-1, -2))], axis=1) / 127
    scales = np.maximum(scales, 1e-12).astype(np.float32)
    image, regions = np.rint(image / scales[:, :1]), np.rint(regions / scales[:, 1:, None])
    return {"image": image.astype(np.int8), "regions": regions.astype(np.int8), "scales": scales}


def checksum(arrays: Arrays, row: int) -> int:
    return zlib.crc32(b"".join(arrays[name][row].tobytes() for name in ("image", "regions", "scales")))


class Labels:
    """Label directions (N, D), ready for products with int8 rows."""

    def __init__(self, directions: Tensor) -> None:
        directions = directions.float().cpu()
        self.scale = directions.abs().amax(1).clamp(min=1e-12) / 127
        self.whole = (directions / self.scale[:, None]).round()
        self.bytes = self.whole.char()
        self.integers = torch.cpu._is_vnni_supported()  # without such instructions integer products are slow

    def products(self, rows: np.ndarray) -> Tensor:
        """(R, D) int8 → (R, N), to be multiplied by the scales of row and label."""
        matrix = torch.from_numpy(rows)
        return torch._int_mm(matrix, self.bytes.T) if self.integers else matrix.float() @ self.whole.T

    def image(self, arrays: Arrays, rows: np.ndarray | slice) -> Tensor:
        """Cosines (R, N) of global features."""
        found = self.products(np.ascontiguousarray(arrays["image"][rows]))
        return found * self.scale * torch.from_numpy(arrays["scales"][rows, 0])[:, None]

    def best(self, arrays: Arrays, rows: np.ndarray) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Blocks of rows, and the cosines (R, N) of each label's best region."""
        kept, dim = arrays["regions"].shape[1:]
        size = min(max(PRODUCTS // (kept * len(self.scale)), 16), 512)
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            adjacent = block[-1] - block[0] + 1 == len(block)  # then nothing is copied
            regions = arrays["regions"][slice(block[0], block[-1] + 1) if adjacent else block]
            found = self.products(regions.reshape(-1, dim)).unflatten(0, (-1, kept)).amax(1)
            yield block, found * self.scale * torch.from_numpy(arrays["scales"][block, 1])[:, None]
