"""Pictures of every kind, sound and hostile, made without any file of ours."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from soak.mutate import damaged

EXTENSIONS = {"JPEG": ".jpg", "PNG": ".png", "GIF": ".gif", "WEBP": ".webp", "BMP": ".bmp", "TIFF": ".tif"}


def noise(mode: str = "RGB", size: tuple[int, int] = (40, 28), seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    picture = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    return picture if mode == "RGB" else picture.convert(mode)


def encode(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, depth: int = 8, colour: int = 0, *more: bytes) -> bytes:
    """A PNG's header and whatever chunks follow."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(more)


def sound() -> dict[str, tuple[str, bytes]]:
    """Name → (format, bytes): the usual modes and some unusual ones."""
    rgb, exif = noise(), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    deep = Image.fromarray(np.random.default_rng(1).integers(0, 65536, (24, 24), dtype=np.uint16))
    real = Image.fromarray(np.random.default_rng(2).random((24, 24), dtype=np.float32))
    frames = [noise(seed=i) for i in range(4)]
    icc = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    moving = {"save_all": True, "append_images": frames, "duration": 20}
    made: dict[str, tuple[str, Image.Image, dict[str, Any]]] = {
        "jpeg": ("JPEG", rgb, {}),
        "jpeg-progressive": ("JPEG", rgb, {"progressive": True}),
        "jpeg-cmyk": ("JPEG", noise("CMYK"), {}),
        "jpeg-grey": ("JPEG", noise("L"), {}),
        "jpeg-exif": ("JPEG", rgb, {"exif": exif}),
        "jpeg-icc": ("JPEG", rgb, {"icc_profile": icc}),
        "png": ("PNG", rgb, {}),
        "png-alpha": ("PNG", noise("RGBA"), {}),
        "png-palette": ("PNG", noise("P"), {"transparency": 3}),
        "png-16": ("PNG", deep, {}),
        "png-1": ("PNG", noise("1"), {}),
        "png-icc": ("PNG", rgb, {"icc_profile": icc}),
        "gif": ("GIF", noise("P"), {}),
        "gif-moving": ("GIF", rgb, moving),
        "webp": ("WEBP", rgb, {}),
        "webp-moving": ("WEBP", rgb, moving),
        "webp-alpha": ("WEBP", noise("RGBA"), {"lossless": True}),
        "bmp": ("BMP", rgb, {}),
        "tiff": ("TIFF", rgb, {}),
        "tiff-deflate": ("TIFF", rgb, {"compression": "tiff_deflate"}),
        "tiff-16": ("TIFF", deep, {}),
        "tiff-float": ("TIFF", real, {}),
        "tiff-cmyk": ("TIFF", noise("CMYK"), {}),
        "tiff-pages": ("TIFF", rgb, {"save_all": True, "append_images": frames}),
    }
    return {name: (kind, encode(picture, kind, **options)) for name, (kind, picture, options) in made.items()}


def lies() -> dict[str, tuple[str, bytes]]:
    """Name → (extension's format, bytes): headers that lie, wrong types."""
    jpeg = encode(noise(), "JPEG")
    sizes = struct.pack("<IiiHHIIiiII", 40, 2**31 - 1, -(2**31) + 1, 1, 24, 0, 0, 0, 0, 0, 0)
    strips = struct.pack("<2sHI", b"II", 42, 8) + struct.pack("<H", 2)
    strips += struct.pack("<HHII", 256, 4, 1, 2**31) + struct.pack("<HHII", 257, 4, 1, 2**31) + struct.pack("<I", 8)
    turned = b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x01\x00\x12\x01\x03\x00\xff\xff\xff\xff\x09\x00"
    return {
        "gif-screen": ("GIF", b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0x80, 0, 0) + b"\x00" * 6 + b","),
        "bmp-sizes": ("BMP", b"BM" + struct.pack("<IHHI", 70, 0, 0, 54) + sizes),
        "tiff-loop": ("TIFF", strips),
        "exif-broken": ("JPEG", jpeg[:2] + b"\xff\xe1\x00\x10Exif\x00\x00MM\x00*\xff\xff\xff\xff" + jpeg[2:]),
        "exif-nonsense": ("JPEG", jpeg[:2] + b"\xff\xe1\x00\x1e" + turned + jpeg[2:]),
        "icc-broken": ("JPEG", jpeg[:2] + b"\xff\xe2\x00\x14ICC_PROFILE\x00\x09\x01\x00\x00" + jpeg[2:]),
        "text": ("JPEG", b"not a picture at all\n" * 9),
        "html": ("PNG", b"<html><script>alert(1)</script></html>"),
        "svg": ("PNG", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'),
        "zip": ("JPEG", b"PK\x03\x04" + b"\x00" * 60),
        "postscript": ("PNG", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n"),
        "empty": ("GIF", b""),
        "other-type": ("PNG", jpeg),
    }


def bombs(side: int = 9_999) -> dict[str, Callable[[], bytes]]:
    """Small files that ask for much memory or time; those with side² pixels, and some more, pass a limit just above."""
    few, end = chunk(b"IDAT", zlib.compress(b"\x00" * 40)), chunk(b"IEND", b"")

    def inflating(kind: bytes) -> bytes:
        return png(8, 8, 8, 0, chunk(kind, b"a\x00\x00" + zlib.compress(b"\x00" * (1 << 26), 9)), few, end)

    def flat(mode: str) -> bytes:
        return encode(Image.new(mode, (side, side)), "PNG", compress_level=9)

    return {
        "bomb-header": lambda: png(1, side * side, 8, 0, few),
        "bomb-header-wide": lambda: png(side * side, 1, 16, 0, few),
        "bomb-header-alpha": lambda: png(side, side, 8, 6, few),
        "bomb-too-large": lambda: png(2**31 - 1, 2**31 - 1, 8, 2, few),
        "bomb-text": lambda: inflating(b"zTXt"),
        "bomb-icc": lambda: inflating(b"iCCP"),
        "bomb-grey": lambda: flat("L"),
        "bomb-alpha": lambda: flat("RGBA"),
        "bomb-deep": lambda: flat("I;16"),
        "bomb-scans": lambda: many_scans(2_000_000),
    }


def many_scans(size: int) -> bytes:
    """A progressive JPEG whose last scans are repeated until it has so many bytes."""
    whole = encode(noise(size=(1200, 900)).resize((40, 30)).resize((2400, 1800)), "JPEG", progressive=True, quality=20)
    starts = [i for i in range(len(whole) - 1) if whole[i : i + 2] == b"\xff\xda"]
    last = whole[starts[-1] : -2]  # from the last start of scan to the end of the image
    tables = whole.rfind(b"\xff\xc4", starts[-2], starts[-1])
    scan = whole[tables:-2] if tables > 0 else last
    return whole[:-2] + scan * max(1, (size - len(whole)) // len(scan)) + whole[-2:]


def mutated(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` files as (name, bytes), numbered in their names: lies once, damage to sound pictures for the rest."""
    rng = random.Random(seed)
    first = [(name, *made) for name, made in lies().items()]
    base = sound()
    kinds = list(base)
    for i in range(count):
        if i < len(first):
            name, kind, content = first[i]
        else:
            name = rng.choice(kinds)
            kind, whole = base[name]
            how, content = damaged(rng, whole)
            name = f"{name}-{how}"
            if rng.random() < 0.05:  # wrong extension
                kind = rng.choice(list(EXTENSIONS))
        yield f"n{i:06d}-{name}{EXTENSIONS[kind]}", content
