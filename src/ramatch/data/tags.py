"""Tags mined from captions: words and two-word phrases that many images share, as multi-label targets.

No stemmer or tagger is used on purpose: counts over images find the words worth knowing in any domain.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STOP = frozenset(
    """
    a about above across after against all along also am among an and another any are around as at away back be
    because been before behind being below beneath beside besides between beyond both but by can could did do does
    doing down during each either else ever every few for from full gets getting give go goes going had has have
    having he her here hers herself him himself his how i if in inside into is it its itself just kind left like lot
    lots made make makes making many may me more most much must my near nearby next no nor not of off on one ones
    onto or other others our out outside over own part past per picture photo image photograph piece put right s
    same set several shall she should shown showing shows side so some someone something sort such t take taken
    takes taking than that the their theirs them themselves then there these they this those three through to
    together too toward towards two type under until up upon us use used using various very via view was way we well
    were what when where which while who whom whose why will with within without would yet you your four five six
    seven eight nine ten first second third different it's there's
    """.split()
)
WORD = re.compile(r"[a-z][a-z'\-]*[a-z]|[a-z]")
SAME = """
    people skis jeans shorts glasses sunglasses scissors grass bus dress glass tennis cross goggles pants clothes stairs
    series
""".split()  # not plurals, or only so
PLURALS = """
    men man women woman children child feet foot geese goose teeth tooth mice mouse knives knife leaves leaf
    shelves shelf wolves wolf loaves loaf scarves scarf calves calf buses bus
""".split()
IRREGULAR = dict(zip(PLURALS[::2], PLURALS[1::2], strict=True)) | {word: word for word in SAME}


def singular(word: str, known: Counter[str]) -> str:
    """The singular if the captions use it too; the word itself otherwise."""
    if word in IRREGULAR:
        return IRREGULAR[word]
    if len(word) < 4 or not word.endswith("s") or word.endswith("ss"):
        return word
    candidates = [word[:-1], word[:-2] if word.endswith("es") else "", f"{word[:-3]}y" if word.endswith("ies") else ""]
    best = max(candidates, key=lambda candidate: known[candidate])  # "hors" is a slip, "horse" the word
    return best if known[best] else word


@dataclass(frozen=True)
class Tags:
    """names: T tags, most frequent first; targets: bool (images, T), whether any caption of the image has the tag."""

    names: tuple[str, ...]
    targets: Tensor


def mine_tags(captions: Sequence[Sequence[str]], *, min_images: int = 20, max_tags: int = 3000) -> Tags:
    """Tags of images from their captions (one list of captions per image)."""
    words = [[WORD.findall(c.lower()) for c in texts] for texts in captions]
    known = Counter(w for texts in words for w in {w for c in texts for w in c})
    found: list[set[str]] = []
    for texts in words:
        tags: set[str] = set()
        for caption in texts:
            for i, word in enumerate(caption):
                if word in STOP or len(word) < 2:
                    continue
                tags.add(singular(word, known))
                if i + 1 < len(caption) and caption[i + 1] not in STOP and len(caption[i + 1]) > 1:
                    tags.add(f"{word} {singular(caption[i + 1], known)}")
        found.append(tags)
    counts = Counter(tag for tags in found for tag in tags)
    names = tuple(t for t, n in sorted(counts.items(), key=lambda p: (-p[1], p[0])) if n >= min_images)[:max_tags]
    index = {name: i for i, name in enumerate(names)}
    targets = torch.zeros(len(captions), len(names), dtype=torch.bool)
    for row, tags in enumerate(found):
        columns = [index[t] for t in tags if t in index]
        targets[row, columns] = True
    return Tags(names, targets)
