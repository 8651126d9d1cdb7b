"""The door for strangers' bytes: bodies counted while they stream, images checked before they are decoded."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from ramatch.data.images import ImageError, ImageTooLargeError, load_image
from ramatch.serve.errors import ApiError
from ramatch.serve.settings import ServeSettings

# TIFF is left out on purpose: browsers don't show it and its decoder has the longest list of holes.
_MAGIC = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|BM|RIFF....WEBP", re.DOTALL)
FORMATS = "JPEG, PNG, WebP, GIF or BMP"
# Queued images are kept no larger than this; models look at a few hundred pixels, and a full queue must fit in memory.
_KEEP_SIDE = 1536
MIN_RATE = 20_000  # bytes per second of an upload


@dataclass
class Upload:
    """An image as it came: encoded bytes, or base64 text not yet decoded."""

    content: bytes | str
    name: str | None = None


@dataclass
class Picture:
    """A decoded, upright RGB image and the size it had."""

    image: Image.Image
    name: str | None
    size: tuple[int, int]


class ClientGone(Exception):
    """The client hung up; nobody waits for an answer."""


async def read_body(request: Request, settings: ServeSettings, charge: Callable[[int], None]) -> bytes:
    """The body, refused as soon as it is known to be too large, too slow or gone; `charge` hears of each chunk and may
    refuse it."""
    cap, close = settings.max_body_bytes, {"Connection": "close"}
    too_large = ApiError("body_too_large", f"the request is larger than {cap:,} bytes", headers=close)
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal():
        raise ApiError("bad_length", "Content-Length is not a number")
    if len(declared) > 15 or int(declared) > cap:
        raise too_large

    body, stream, start = bytearray(), request.stream(), time.monotonic()
    try:
        while True:
            left = min(settings.body_s, start + settings.deadline_s - time.monotonic())
            chunk = await asyncio.wait_for(anext(stream, None), left)
            if chunk is None:
                return bytes(body)
            if len(body) + len(chunk) > cap:
                raise too_large
            charge(len(chunk))
            body += chunk
            if chunk and len(body) < MIN_RATE * (time.monotonic() - start - settings.body_s):
                raise asyncio.TimeoutError
    except asyncio.TimeoutError:
        slow = f"the body came at less than {MIN_RATE // 1000} kB/s, or not within {settings.deadline_s:g} s"
        raise ApiError("upload_too_slow", slow, headers=close) from None
    except ClientDisconnect:
        raise ClientGone from None


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


async def read_form(
    headers: Headers, body: bytes, settings: ServeSettings
) -> tuple[list[Upload], dict[str, list[str]]]:
    """Files of a multipart body and its other fields, in order."""

    async def stream():  # type: ignore[no-untyped-def]
        yield body

    limits = {"max_files": settings.max_images, "max_fields": settings.max_labels + 16}
    parser = MultiPartParser(headers, stream(), **limits, max_part_size=settings.max_body_bytes)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        message = getattr(error, "message", str(error))[:120]
        raise ApiError("bad_form", f"the multipart body cannot be read: {message}") from None
    uploads: list[Upload] = []
    fields: dict[str, list[str]] = {}
    try:
        for key, value in form.multi_items():
            if not isinstance(value, UploadFile):
                fields.setdefault(key, []).append(value)
            elif key in ("image", "images", "file", "files"):
                uploads.append(Upload(await value.read(), (value.filename or "")[:255] or None))
            else:
                hint = "send images as 'image'; read a labels file yourself and send 'labels'"
                raise ApiError("bad_field", f"'{key[:80]}' is not a field for a file", hint=hint)
    finally:
        await form.close()
    return uploads, fields


def decode(upload: Upload, settings: ServeSettings) -> Picture:
    """Upright RGB image, or an ApiError; runs in a thread."""
    content = upload.content
    if isinstance(content, str):
        content = _from_base64(content)
    if not content:
        raise ApiError("empty_image", "the image is empty")
    if not _MAGIC.match(content):
        raise ApiError("unsupported_format", f"the image is not {FORMATS}")
    try:
        image = load_image(content, max_pixels=settings.max_pixels, name=upload.name or "image")
    except ImageTooLargeError as error:
        raise ApiError("too_many_pixels", error.reason) from None
    except ImageError as error:
        raise ApiError("unreadable_image", f"the image cannot be decoded: {error.reason[:160]}") from None
    size = image.size
    if max(size) > _KEEP_SIDE:
        image.thumbnail((_KEEP_SIDE, _KEEP_SIDE), Image.Resampling.BICUBIC)
    return Picture(image, upload.name, size)


def _from_base64(text: str) -> bytes:
    if re.match(r"\s*(https?|ftp|file)://", text[:32], re.IGNORECASE):
        raise ApiError("no_url_fetching", "this server does not fetch URLs")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text.encode("ascii").translate(None, b" \t\r\n\v\f"), validate=True)
    except (binascii.Error, ValueError):
        raise ApiError("bad_base64", "'image' is not base64") from None
