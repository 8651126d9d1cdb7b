"""Tagging without a list, beside a vendor's tagger: the same map from tags to the 80 names judges both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ramatch.data.annotations import Annotations, Record, Summary
from ramatch.data.lexicon import Lexicon, plural
from ramatch.data.sources import Locator
from ramatch.data.splits import hold_out
from ramatch.errors import RamatchError
from ramatch.evaluation.metrics import mean_ap, micro
from ramatch.files import read_json

from ..measure import Row, row
from .lists import Word
from .scores import Runner

VALIDATION = 500  # images, by a hash of their names; the others are the test
FIRST = 5
Tagged = list[tuple[str, float]]  # of one image, first things first


@dataclass(frozen=True)
class Free:
    """Images with all of COCO's 80 names that are in them, what five people said and what the vendor's tagger said."""

    data: Annotations
    captions: list[tuple[str, ...]]
    tagger: list[Tagged]


def read_free_tags(file: Path, images: Path, part: str, limit: int | None = None) -> Free:
    """The images of a part."""
    content, locator = read_json(file), Locator([images])
    held = set(hold_out([entry["path"] for entry in content["images"]], VALIDATION))
    chosen = [entry for i, entry in enumerate(content["images"]) if (i in held) == (part == "validation")][:limit]
    records = []
    for entry in chosen:
        source, key = locator.find(entry["path"])
        if source is None:
            raise RamatchError(f"{file}: {entry['path']} is not in {images}")
        records.append(Record(key, tuple(entry["labels"]), source))
    data = Annotations(tuple(content["classes"]), records, Summary(str(file), "free tags", part))
    tagger = [[(str(word).lower(), float(p)) for word, p in entry["tagger"]] for entry in chosen]
    return Free(data, [tuple(entry["captions"]) for entry in chosen], tagger)


class Judge:
    """What a tag says in terms of the 80 names, and whether a caption says it."""

    def __init__(self, names: Sequence[str], words: Sequence[Word], lexicon: Lexicon) -> None:
        self.names, self.lexicon = list(names), lexicon
        self.column = {w.word: self.names.index(w.names[0]) for w in words if w.kind != "hypernym"}
        self._columns: dict[str, set[int]] = {}

    def columns(self, tag: str) -> set[int]:
        """Names that are there if the tag is: itself, what it is a synonym of, what it is a kind of."""
        if tag not in self._columns:
            entry = self.lexicon.find(tag)
            meant = [tag] if tag in self.column else [*entry.words, *self.lexicon.above(entry)]
            self._columns[tag] = {self.column[word] for word in meant if word in self.column}
        return self._columns[tag]

    def scores(self, tagged: Sequence[Tagged]) -> np.ndarray:
        """(n, 80): the highest probability of a tag that says the name."""
        found = np.zeros((len(tagged), len(self.names)))
        for image, tags in enumerate(tagged):
            for tag, p in tags:
                for column in self.columns(tag):
                    found[image, column] = max(found[image, column], p)
        return found

    def said(self, tag: str, captions: Sequence[str]) -> bool:
        """Whether one of the captions has the tag, a synonym of it, or a plural."""
        words = dict.fromkeys((tag, *self.lexicon.find(tag).words))
        forms = [f" {plain(form)} " for word in words for form in (word, plural(word))]
        return any(form in f" {plain(caption)} " for caption in captions for form in forms)


def plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


def by_confidence(tagged: Sequence[Tagged]) -> list[Tagged]:
    return [sorted(tags, key=lambda tag: -tag[1]) for tags in tagged]


def tagged(runner: Runner, data: Annotations) -> tuple[list[Tagged], list[Tagged]]:
    """Everything with its probability, and what a reader is shown, first things first."""
    everything, shown = [], []
    for answer in runner.predictions(data.records, "general"):
        everything.append(list(zip(answer.labels, answer.values.tolist(), strict=True)))
        shown.append([(tag.label, tag.value) for tag in answer.top(FIRST)])
    return everything, shown


def judged(who: str, judge: Judge, free: Free, everything: Sequence[Tagged], shown: Sequence[Tagged]) -> Iterator[Row]:
    """`everything`: all that has a probability, for mAP and F1; `shown`: what a reader sees, first things first."""
    targets, scores = free.data.targets().numpy(), judge.scores(everything)
    about = {"images": len(free.data), "words": len(judge.names)}
    yield row(f"free tags, {who}: mAP of the 80 names", 100 * mean_ap(scores, targets), "%", **about)
    yield row(f"free tags, {who}: micro F1 at 0.5", micro(scores >= 0.5, targets).f1, "", **about)
    yield first_said(who, judge, free, shown)


def first_said(who: str, judge: Judge, free: Free, shown: Sequence[Tagged]) -> Row:
    firsts = [tags[:FIRST] for tags in shown]
    pairs = zip(free.captions, firsts, strict=True)
    hits, count = sum(judge.said(tag, said) for said, tags in pairs for tag, _ in tags), sum(map(len, firsts))
    note = f"{count / max(len(firsts), 1):.1f} tags an image"
    about = {"images": len(firsts), "words": len({tag for tags in firsts for tag, _ in tags}), "note": note}
    what = f"free tags, {who}: of the first {FIRST} named by a caption"
    return row(what, 100 * hits / max(count, 1), "%", **about)


def free_tags(runner: Runner, judge: Judge, free: Free) -> Iterator[Row]:
    """Ours and theirs. The tagger's list is not in the order of its confidence; both orders are judged."""
    yield from judged("ramatch", judge, free, *tagged(runner, free.data))
    yield from judged("the vendor's tagger", judge, free, free.tagger, by_confidence(free.tagger))
    yield first_said("the vendor's tagger in its own order", judge, free, free.tagger)
