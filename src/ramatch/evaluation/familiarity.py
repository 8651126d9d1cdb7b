"""What a model needs to say how familiar a label is: the words it learned with, and strings that mean nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ..labels import merge_labels
from ..modeling.known import LEAST, Known, signs
from ..modeling.ram import RAM
from ._logistic import fit_logistic, moments

KEYS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


@torch.no_grad()
def known_words(ram: RAM, words: Sequence[str]) -> Known:
    """The words' features, and weights by which a learned word (each left out in turn) differs from nonsense."""
    names = merge_labels(words).names
    silly = meaningless(names, max(len(names), LEAST))
    unit = ram.encode_labels([*names, *silly]).unit[: len(names) + len(silly)].float().cpu()
    unit, other = unit[: len(names)], unit[len(names) :]
    x = torch.cat([signs(unit, unit, torch.arange(len(unit))), signs(other, unit)])[:, None]
    targets = torch.cat([torch.ones(len(unit)), torch.zeros(len(other))])[:, None]
    mean, scale = moments(x)
    theta = fit_logistic(x, targets, mean, scale)
    slope = theta[:-1] / scale
    return Known(unit, torch.cat([slope, (theta[-1] - slope @ mean)[None]]).float())


def meaningless(words: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """Strings without meaning: words with their letters shuffled, syllables, slips over the keys, consonants, numbers,
    signs; as many of each, the same for the same words."""
    draw = random.Random(seed)
    known, found = {word.casefold() for word in words}, dict[str, None]()

    def some(letters: str, low: int, high: int) -> str:
        return "".join(draw.choices(letters, k=draw.randint(low, high)))

    def slip() -> str:
        row = draw.choice(KEYS)
        start = draw.randrange(len(row) - 3)
        return row[start : start + draw.randint(3, 5)]

    kinds = (
        lambda: "".join(draw.sample(word := draw.choice(words).replace(" ", ""), len(word))),
        lambda: "".join(some("bcdfghjklmnpqrstvwxz", 1, 1) + some("aeiou", 1, 1) for _ in range(draw.randint(2, 4))),
        lambda: " ".join(slip() for _ in range(draw.randint(1, 3))),
        lambda: some("bcdfghjklmnpqrstvwxz", 4, 8),
        lambda: some("0123456789", 1, 8),
        lambda: some("!?#$%&*+=~^<>/", 2, 6),
    )
    for turn in range(100 * count):  # words of one letter give few strings
        if len(found) == count:
            break
        if (text := kinds[turn % len(kinds)]()).casefold() not in known:
            found.setdefault(text)
    return list(found)
