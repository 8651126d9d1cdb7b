"""Which photos fit a query: a look at all global features, then at the regions of the promising ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from ..recognizer import Recognizer
from .features import encode_images, label_directions, label_words, probabilities
from .query import Query
from .vectors import Labels

CANDIDATES = 8192  # photos whose regions are looked at


class View(NamedTuple):
    """A library at one moment: rows whose photo has a file, and the vectors of all."""

    version: int
    rows: np.ndarray
    arrays: dict[str, np.ndarray]


class Ranking(NamedTuple):
    """Rows, best first; probabilities of the whole query and of each label (R, N); similarity to a photo."""

    rows: np.ndarray
    probability: np.ndarray
    each: np.ndarray
    similarity: np.ndarray | None


def rank(
    view: View,
    query: Query,
    recognizer: Recognizer,
    *,
    like: Image.Image | None = None,
    room: int | None = CANDIDATES,
    threshold: float = 0.0,
) -> Ranking:
    """All labels that are wanted and none of the others, as independent events; times the cosine with the photo `like`.

    Only so many photos take part as `room` says, those with the most promising global features; None: all, which
    reads every region from the disk.
    """
    count, split = len(query.labels), len(query.wanted)
    directions = label_directions(recognizer, query.labels).cpu() if count else torch.zeros(0)
    both = directions
    if like is not None:
        photo = encode_images(recognizer, recognizer.ram.preprocess.resize(like)[None])[0].cpu()
        both = torch.cat([directions.reshape(-1, photo.shape[1]), photo])
    every = len(view.rows) == len(view.arrays["image"])
    image = Labels(both).image(view.arrays, slice(None) if every else view.rows)
    places = torch.arange(len(image))
    if room is not None and len(image) > room:
        sign = torch.ones(len(both))
        sign[split:count] = -1
        promise = (image / image.std(0).clamp(min=1e-6)) @ sign
        places = promise.topk(room, sorted=False).indices.sort().values
        image = image[places]
    rows = view.rows[places.numpy()]
    each = np.ones((len(rows), 0))
    if count and len(rows):
        best = torch.cat([found for _, found in Labels(directions).best(view.arrays, rows)])
        each, _ = probabilities(
            recognizer, image[:, :count], best, label_words(recognizer, query.labels), independent=True
        )
    total = each[:, :split].prod(1) * (1 - each[:, split:]).prod(1)
    similarity = None
    if like is not None:
        similarity = image[:, count].numpy().clip(-1, 1)  # rounding to 8 bits may go beyond
        total = total * similarity.clip(min=0)
    order = np.argsort(-total, kind="stable")[: int((total >= threshold).sum())]
    return Ranking(rows[order], total[order], each[order], None if similarity is None else similarity[order])
