"""Bodies that are huge, slow to read or odd."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from soak.pictures import encode, noise
from soak.servers import FORM, form

LIMIT = 20 * 1024 * 1024  # max_body_bytes


@dataclass(frozen=True)
class BodyCase:
    """One request."""

    name: str
    body: bytes
    path: str = "/v1/tag/batch"
    kind: str = "application/json"
    method: str = "POST"


def huge_bodies(short: bool) -> list[BodyCase]:
    """JSON just below the limit that says little."""

    def fill(before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
        return before + unit * ((size - len(before) - len(after)) // len(unit)) + after

    small, large = 2_000_000, LIMIT - 1024
    if short:
        return [BodyCase("2 MB of zeros", fill(b'{"images":[', b"0,", b"0]}", small))]
    return [
        BodyCase("2 MB of zeros", fill(b'{"images":[', b"0,", b"0]}", small)),
        BodyCase("20 MB of zeros", fill(b'{"images":[', b"0,", b"0]}", large)),
        BodyCase("20 MB of objects", fill(b'{"images":[', b"{},", b"{}]}", large)),
        BodyCase("20 MB of labels", fill(b'{"image":"","labels":[', b'"",', b'""]}', large), "/v1/tag"),
        BodyCase("20 MB of fields", b"{" + b",".join(b'"%d":0' % i for i in range(1_600_000)) + b"}", "/v1/tag"),
        BodyCase("20 MB of brackets", b"[" * large, "/v1/tag"),
        BodyCase("20 MB of digits", fill(b'{"image":"","top":', b"9", b"}", large), "/v1/tag"),
        BodyCase("too large", b"0" * (LIMIT + 1), "/v1/tag"),
    ]


def odd_bodies() -> list[BodyCase]:
    """Fields that a parser may choke on, around a sound picture."""
    picture = encode(noise(), "PNG")
    image = base64.b64encode(picture).decode()

    def tag(name: str, raw: str, path: str = "/v1/tag") -> BodyCase:
        return BodyCase(name, f'{{"image": "{image}", {raw}}}'.encode("utf-8", "surrogatepass"), path)

    digits = "9" * 400
    return [
        tag("surrogate in labels", '"labels": ["\\ud800 cat"]'),
        tag("surrogate in name", '"labels": ["cat"], "name": "\\ud800.jpg"'),
        tag("surrogate in vocabulary", '"vocabulary": "\\ud800"'),
        tag("surrogate in a key", '"\\ud800": 1'),
        tag("surrogate in matcher", '"labels": ["cat"], "matcher": "\\udfff"'),
        tag("raw surrogate", '"labels": ["\ud800"]'),
        tag("deadline of 400 digits", f'"labels": ["cat"], "deadline_ms": {digits}'),
        tag("deadline 1e308", '"labels": ["cat"], "deadline_ms": 1e308'),
        tag("negative deadline", '"labels": ["cat"], "deadline_ms": -1'),
        tag("top of 400 digits", f'"labels": ["cat"], "top": {digits}'),
        tag("top of 5,000 digits", f'"labels": ["cat"], "top": {"9" * 5000}'),
        tag("threshold NaN", '"labels": ["cat"], "threshold": NaN'),
        tag("threshold Infinity", '"labels": ["cat"], "threshold": Infinity'),
        tag("NUL in a label", '"labels": ["a\\u0000b"]'),
        tag("escape in a label", '"labels": ["\\u001b[31m"]'),
        tag("an image twice", f'"image": "{image}", "labels": ["cat"]'),
        BodyCase("image is a list", b'{"image": [], "labels": ["cat"]}', "/v1/tag"),
        BodyCase("not base64", '{"image": "é\\ud800", "labels": ["cat"]}'.encode(), "/v1/tag"),
        BodyCase("UTF-16", json.dumps({"image": image, "labels": ["cat"]}).encode("utf-16"), "/v1/tag"),
        BodyCase("no JSON", b"\xff\xfe\x00", "/v1/tag"),
        BodyCase("form, deadline", form(picture, labels="cat", deadline_ms=digits), "/v1/tag", FORM),
        BodyCase(
            "form, surrogate bytes", form(picture, labels="cat").replace(b"cat", b"\xed\xa0\x80"), "/v1/tag", FORM
        ),
        BodyCase(
            "form, file name", form(picture, labels="cat").replace(b"p.jpg", b"\xff\xed\xa0\x80"), "/v1/tag", FORM
        ),
        BodyCase("form without an end", form(picture, labels="cat")[:-30], "/v1/tag", FORM),
        BodyCase("form, no boundary", form(picture, labels="cat"), "/v1/tag", "multipart/form-data"),
        BodyCase("form, odd charset", form(picture, labels="cat"), "/v1/tag", FORM + "; charset=nonsense"),
        BodyCase("register a surrogate", b'{"labels": ["\\ud800"]}', "/v1/vocabularies/odd", method="PUT"),
        BodyCase("register nothing", b'{"labels": [" "]}', "/v1/vocabularies/odd", method="PUT"),
        BodyCase("odd vocabulary name", b'{"labels": ["cat"]}', "/v1/vocabularies/%00%ff", method="PUT"),
        BodyCase("unknown method", b"{}", "/v1/tag", method="BREW"),
    ]
