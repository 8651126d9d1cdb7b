"""The language of searches, `dog beach`, `"hot dog" -person`, `hot dog, beach`, and which photos fit one: a look at all
global features, then at the regions of the promising ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from ..errors import RamatchError
from ..recognizer import Recognizer
from .features import encode_images, encode_words, probabilities
from .vectors import Labels

CANDIDATES = 8192  # photos whose regions are looked at
WORD = re.compile(r'-?"[^"]*"|[^\s",]+')  # or a phrase in quotes, maybe with a minus before it
PIECE = re.compile(r'(?:"[^"]*"|[^",])+')  # between commas


@dataclass(frozen=True)
class Query:
    """Labels that shall be there and labels that shall not; sorted, since their order says nothing."""

    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return self.wanted + self.unwanted


def parse_query(texts: str | Sequence[str], without: Iterable[str] = ()) -> Query:
    """One text without commas: every word is a label, quotes hold words together. With commas, or several texts: each
    part is one label. A minus before a label (or `without`) asks for photos that lack it. Case does not matter."""
    texts = [texts] if isinstance(texts, str) else list(texts)
    for text in texts:
        if text.count('"') % 2:
            raise RamatchError(f"the search '{text}' opens a quote and does not close it")
    several = len(texts) > 1 or any("," in re.sub(r'"[^"]*"', "", text) for text in texts)
    parts = [part.strip() for text in texts for part in (PIECE if several else WORD).findall(text)]
    found: dict[str, tuple[str, bool]] = {}
    for part in [*filter(None, parts), *(f"-{label}" for label in without)]:
        label, minus = " ".join(part.removeprefix("-").replace('"', " ").split()), part.startswith("-")
        if not label:
            raise RamatchError('a label of the search is empty: write a word, a "quoted phrase" or -word')
        before = found.get(label.casefold(), (label, minus))
        if before[1] != minus:
            raise RamatchError(f"the search asks for '{label}' and for its absence; choose one")
        found[label.casefold()] = (min(before[0], label), minus)
    ordered = [found[key] for key in sorted(found)]
    return Query(tuple(name for name, minus in ordered if not minus), tuple(name for name, minus in ordered if minus))


class View(NamedTuple):
    """A library at one moment: rows whose photo has a file, and the vectors of all."""

    version: tuple[int, int]
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
