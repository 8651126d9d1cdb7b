"""What is known of images, from their captions, other sentences and labels: which concepts they show, which they do
not, and of which nobody can say. `align` and `adapt` learn from it.

A concept is a meaning: words that captions say, joined with their synonyms and with what they are a kind of by a
lexicon. Annotations are complete, sentences are not, so annotations win; what is too close in meaning to something that
a sentence says is not called absent because the sentence leaves it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.annotations import Annotations, Record
from ..data.captions import CaptionRecord, read_caption_sets
from ..data.lexicon import Lexicon, concepts, unsettled
from ..data.splits import find_data, hold_out, read_split
from ..data.tags import mine_tags
from ..errors import RamatchError
from ..settings import Count, NotNegative, Settings

Paths = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class ConceptConfig(Settings):
    """Which concepts are made of what is said of images."""

    max_tags: Count = 1500
    min_images: Count = 12  # a tag must occur in the captions of so many
    # tags this close to a positive one (cosine of the untuned text tower) are not called absent
    ignore_above: NotNegative = 0.6
    # synonyms and parents of tags: the built-in table, a TSV's path, or none: tags as captions say them
    lexicon: str | None = "built-in"


@dataclass(frozen=True)
class Labels:
    """Annotations of some images: truth int8 (images, L), −1 for images that have none."""

    classes: tuple[str, ...] = ()
    truth: Tensor | None = None


@dataclass(frozen=True)
class Told:
    """What is said of images: a list of captions for each, which may be empty where there are other sentences (what
    concepts are taken from; by default the captions) or labels."""

    captions: Sequence[Sequence[str]]
    more: Sequence[Sequence[str]] | None = None
    labels: Labels = Labels()

    @property
    def sentences(self) -> Sequence[Sequence[str]]:
        return self.captions if self.more is None else self.more


@dataclass(frozen=True)
class Known:
    """texts: all words of each of C concepts, its name first; the first `labels` of them are labels. targets: int8
    (images, C): 1 present, 0 absent, −1 not known."""

    texts: tuple[tuple[str, ...], ...]
    targets: Tensor
    labels: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(words[0] for words in self.texts)


def known_concepts(
    told: Told,
    lexicon: Lexicon | None,
    config: ConceptConfig,
    near: Callable[[Sequence[str]], Tensor],
    *,
    silent: bool,
) -> Known:
    """What sentences and labels tell of each image.

    near: unit text features (N, D) of names; what lies closer than `ignore_above` to something said is not called
    absent. silent: that sentences leave out a label says nothing."""
    sentences, labels, lexicon = told.sentences, told.labels, lexicon or Lexicon({})
    spoken = torch.tensor([i for i, texts in enumerate(sentences) if texts], dtype=torch.long)
    tags = mine_tags([sentences[i] for i in spoken], min_images=config.min_images, max_tags=config.max_tags)
    found = concepts(tags, lexicon)
    column, texts = _columns(labels.classes, found.names, lexicon)
    present, said, known = torch.zeros(3, len(sentences), len(texts), dtype=torch.bool)
    places = torch.tensor([column[name] for name in found.names], dtype=torch.long)
    present[spoken[:, None], places], said[spoken[:, None], places] = found.targets, found.said
    known[spoken[:, None], places] = True
    certain = torch.zeros_like(known)
    if labels.truth is not None and labels.classes:
        count = len(labels.classes)
        annotated = (labels.truth[:, 0] >= 0).nonzero()[:, 0]
        truth = labels.truth[annotated].bool()
        if silent:
            known[:, :count] = False
        present[annotated, :count], certain[annotated, :count] = truth, True
        said[annotated, :count] |= truth
        for i, name in enumerate(labels.classes):  # a dog is an animal
            higher = [column[n] for n in lexicon.above(lexicon.find(name)) if n in column]
            present[annotated[:, None], torch.tensor(higher, dtype=torch.long)] |= truth[:, [i]]
    plain = near([words[0] for words in texts])
    close, below = plain @ plain.T > config.ignore_above, _below(column, lexicon).to(plain.device)
    parts = zip(said.split(4096), present.split(4096), strict=True)
    open_ = torch.cat([unsettled(s.to(plain.device), p.to(plain.device), close, below).cpu() for s, p in parts])
    targets = torch.where(present, 1, torch.where(certain | (known & ~open_), 0, -1)).to(torch.int8)
    return Known(tuple(texts), targets, len(labels.classes))


def _columns(
    classes: Sequence[str], names: Sequence[str], lexicon: Lexicon
) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    """Places of meanings by the lexicon's name, labels first, and all words for each; a label by its own name."""
    column = {lexicon.find(name).name: i for i, name in reversed(list(enumerate(classes)))}
    texts = [tuple(dict.fromkeys((name, *lexicon.find(name).words))) for name in classes]
    for name in names:
        if name not in column:
            column[name] = len(texts)
            texts.append(lexicon.find(name).words)
    return column, texts


def _below(column: dict[str, int], lexicon: Lexicon) -> Tensor:
    """bool (C, C): whether the second is a kind of the first."""
    size = max(column.values(), default=-1) + 1
    out = torch.zeros(size, size, dtype=torch.bool)
    for name, place in column.items():
        for higher in lexicon.above(lexicon.find(name)):
            if higher in column:
                out[column[higher], place] = True
    return out


@dataclass(frozen=True)
class Examples:
    """Images to learn from, with what is said of them; images kept for retrieval; how many were excluded; an account of
    each set (by its name: models travel, folders do not)."""

    records: list[CaptionRecord | Record]
    told: Told
    held: list[CaptionRecord]
    excluded: int
    accounts: list[dict[str, Any]]


@dataclass(frozen=True)
class Sources:
    """Captioned images, and if there are any: further sentences about images (`hints`: questions, notes; concepts are
    taken from them as from captions, but they are no captions), and labelled images. An image that several files name
    (by the same key) counts once, with all that they say.

    `test`: keys of captioned images that are used for retrieval, or how many (chosen by their names alone, so that
    every run holds out the same). `exclude`: keys of images to leave out altogether."""

    captions: Paths
    labels: str | Path | None = None
    hints: Paths = ()
    images_roots: Sequence[str | Path] = ()
    split: str | None = "train"
    test: int | Sequence[str] = 0
    exclude: Sequence[str] = ()

    def read(self) -> Examples:
        roots, labelled = list(self.images_roots), None
        if self.labels is not None:
            place = find_data(self.labels)
            labelled = read_split(place, self.split, images=[str(root) for root in roots])
            roots.append(place if place.is_dir() else place.parent)  # sentences may tell of these images
        captioned, summaries = read_caption_sets(self.captions, roots)
        hinted, more = read_caption_sets(self.hints, roots) if self.hints else ([], [])
        everything = {r.key: r for r in (*captioned, *hinted, *(labelled.records if labelled else ()))}
        held, excluded = self._held([r.key for r in captioned]), set(self.exclude)
        records = [r for key, r in everything.items() if key not in held | excluded]
        if len(records) < 2:
            raise RamatchError(
                f"{len(records)} of {len(everything)} images are left to train on: there must be at least 2"
            )
        told, said = ({r.key: r.captions for r in found} for found in (captioned, hinted))
        accounts = [*summaries, *more, *([labelled.summary] if labelled else [])]
        return Examples(
            records,
            Told(
                [told.get(r.key, ()) for r in records],
                [(*told.get(r.key, ()), *said.get(r.key, ())) for r in records],
                _labels(records, labelled),
            ),
            [r for r in captioned if r.key in held - excluded],
            len(everything.keys() & excluded),
            [summary.to_dict() | {"path": Path(summary.path).name} for summary in accounts],
        )

    def _held(self, keys: Sequence[str]) -> set[str]:
        if isinstance(self.test, int):
            return {keys[i] for i in hold_out(keys, self.test, "test")}
        if unknown := sorted(set(self.test) - set(keys)):
            raise RamatchError(f"{len(unknown)} image(s) to hold out are not in the captions, such as '{unknown[0]}'")
        return set(self.test)


def _labels(records: Sequence[CaptionRecord | Record], labelled: Annotations | None) -> Labels:
    if labelled is None:
        return Labels()
    rows = {r.key: i for i, r in enumerate(labelled.records)}
    own = torch.tensor([rows.get(r.key, -1) for r in records])
    truth = labelled.targets().to(torch.int8)[own]
    truth[own < 0] = -1
    return Labels(tuple(labelled.classes), truth)
