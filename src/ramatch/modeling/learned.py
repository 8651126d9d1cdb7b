"""Labels that a model was taught with its user's own images: where each lies in the text space now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from ..errors import RamatchError
from ..files import write_atomic
from .checkpoints.files import read_label_features


@dataclass(frozen=True)
class Learned:
    """unit (K, D): directions of K labels. They are compared with regions and images, and they are what is learned
    (`train/own.py`); TSS goes on looking at what the text tower says of them."""

    names: tuple[str, ...]
    unit: Tensor

    def place(self, names: Sequence[str], unit: Tensor) -> tuple[Tensor, np.ndarray]:
        """Text features (N + K, D) with those of learned labels in their places, and which of the names (N,) these
        are."""
        rows = {name.lower(): row for row, name in enumerate(self.names)}
        found = [rows.get(name.lower(), -1) for name in names]
        places = [i for i, row in enumerate(found) if row >= 0]
        if places:
            unit = unit.clone()
            unit[places] = self.unit[[found[i] for i in places]].to(unit)
        return unit, np.array(found) >= 0

    def save(self, file: Path) -> None:
        """In the form of label features."""
        labels = {"labels": json.dumps(list(self.names), ensure_ascii=False)}
        features = {"features": self.unit.float().cpu().contiguous()}
        write_atomic(file, lambda path: save_file(features, path, metadata=labels))

    @classmethod
    def load(cls, file: Path, dim: int) -> Learned | None:
        """What `save` wrote, if it did, for a text space of `dim` numbers."""
        if not file.is_file():
            return None
        names, unit = read_label_features(file)
        if unit.shape[1] != dim or not torch.isfinite(unit).all():
            raise RamatchError(f"{file}: features of {unit.shape[1]} numbers, but the model has {dim}; train again")
        return cls(tuple(map(str, names)), F.normalize(unit, dim=-1))
