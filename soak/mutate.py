"""Damage to bytes, drawn from a seeded generator."""

from __future__ import annotations

import random
from collections.abc import Callable

Damage = Callable[[random.Random, bytes], bytes]


def _truncated(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _flipped(rng: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8, 64)) if found else 0):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def _early_flip(rng: random.Random, content: bytes) -> bytes:
    """In the first 64 bytes, where headers are."""
    found = bytearray(content)
    for _ in range(rng.randint(1, 3) if found else 0):
        found[rng.randrange(min(64, len(found)))] = rng.randrange(256)
    return bytes(found)


def _extreme(rng: random.Random, content: bytes) -> bytes:
    """A number somewhere becomes the largest or smallest of its width."""
    width = rng.choice((2, 4, 8))
    at = rng.randrange(max(1, min(len(content), 512)))
    value = rng.choice(
        (b"\xff" * width, b"\x00" * width, b"\x7f" + b"\xff" * (width - 1), b"\x80" + b"\x00" * (width - 1))
    )
    return content[:at] + value + content[at + width :]


def _dropped(rng: random.Random, content: bytes) -> bytes:
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return content[:a] + content[min(b, a + 4096) :]


def _repeated(rng: random.Random, content: bytes) -> bytes:
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return content[:b] + content[a:b] * rng.choice((1, 1, 8)) + content[b:]


def _noise(rng: random.Random, content: bytes) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.randbytes(rng.choice((1, 16, 300))) + content[at:]


def _whole(rng: random.Random, content: bytes) -> bytes:
    return content


DAMAGES: dict[str, Damage] = {
    "truncated": _truncated,
    "flipped": _flipped,
    "header": _early_flip,
    "extreme": _extreme,
    "dropped": _dropped,
    "repeated": _repeated,
    "noise": _noise,
    "whole": _whole,
}


def damaged(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    """The kind of damage, and the bytes after it."""
    name = rng.choice(list(DAMAGES))
    return name, DAMAGES[name](rng, content)


def text_damaged(rng: random.Random, text: str) -> str:
    """The same for text formats: tokens exchanged for others a reader may not expect."""
    tokens = [
        "null",
        "true",
        "-1",
        "1e999",
        "NaN",
        "[]",
        "{}",
        '""',
        "[[[[",
        "}",
        "\\ud800",
        "\x00",
        "é",
        "0" * 400,
        ",",
    ]
    for _ in range(rng.randint(1, 3)):
        a = rng.randrange(len(text) + 1)
        b = min(len(text), a + rng.choice((0, 1, 1, 4, 12)))
        text = text[:a] + rng.choice(tokens) + text[b:]
    return text
