"""Which photos fit a query: a look at all global features, then at the regions of the promising ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from ..recognizer import Recognizer
from .features import encode_images, encode_words, probabilities
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
    found = recognizer.sought(query.labels)  # looked for as more words than were asked for
    directions, words = encode_words(recognizer, found.words) if count else (torch.zeros(0), None)
    both = directions = directions.cpu()
    if like is not None:
        photo = encode_images(recognizer, recognizer.ram.preprocess.resize(like)[None])[0].cpu()
        both = torch.cat([directions.reshape(-1, photo.shape[1]), photo])
    every = len(view.rows) == len(view.arrays["image"])
    image = Labels(both).image(view.arrays, slice(None) if every else view.rows)
    places = torch.arange(len(image))
    if room is not None and len(image) > room:
        standard = image / image.std(0).clamp(min=1e-6)
        promise = standard[:, len(found.words) :].sum(1)  # of the photo it shall be like
        if count:
            sign = torch.ones(count)
            sign[split:] = -1
            promise = promise + torch.from_numpy(found.highest(standard.numpy())) @ sign
        places = promise.topk(room, sorted=False).indices.sort().values
        image = image[places]
    rows = view.rows[places.numpy()]
    each = np.ones((len(rows), 0))
    if words is not None and len(rows):
        found = recognizer.trusting(found, words)
        best = torch.cat([top for _, top in Labels(directions).best(view.arrays, rows)])
        each = found.combine(probabilities(recognizer, image[:, : len(found.words)], best, words, independent=True)[0])
    total = each[:, :split].prod(1) * (1 - each[:, split:]).prod(1)
    similarity = None
    if like is not None:
        similarity = image[:, len(found.words)].numpy().clip(-1, 1)  # rounding to 8 bits may go beyond
        total = total * similarity.clip(min=0)
    order = np.argsort(-total, kind="stable")[: int((total >= threshold).sum())]
    return Ranking(rows[order], total[order], each[order], None if similarity is None else similarity[order])
