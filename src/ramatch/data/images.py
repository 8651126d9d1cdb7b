"""Safe image decoding: one door through which every picture enters.

A picture may come from a stranger, so the format is on an allow-list, the size is read from the header and
checked before a pixel is decoded, and whatever a broken file makes the decoder raise becomes one clear error.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, BinaryIO, cast

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.IptcImagePlugin import getiptcinfo
from PIL.JpegImagePlugin import JpegImageFile

from ..errors import RamatchError, require
from . import raw, video
from .jpeg import read_header

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif"),
    *raw.ENDINGS,
)
MAX_PIXELS = 100_000_000  # that are decoded
MAX_SIDE = 65_535  # JPEG's own limit; a strip of one pixel by millions is no picture, and resizing it needs gigabytes
MAX_SCANS = 300  # of a JPEG; encoders write about ten, and a hostile file of 2 MB holds a decoder for minutes with more
MAX_WORK = 1_000_000_000  # scans x pixels: the largest picture in ten scans
STRIP = 1 << 22  # pixels that are converted to RGB at a time
_KEYWORDS = (2, 25)  # IPTC
FULL_SIZE = "full_size"  # in `info` of a picture that was scaled down while it was decoded
_HELD = "held"  # in `info` of a RAW file's preview: how the camera was
_TURNS = {  # by EXIF's number
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_EDGE = (5, 6, 7, 8)


class ImageError(RamatchError):
    """A picture that cannot be used; `name` says which one and `reason` why."""

    def __init__(self, message: str, *, name: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.reason = reason or message


class ImageTooLargeError(ImageError):
    """A picture with more pixels or a longer side than allowed, found from its header, before decoding."""


def load_image(
    source: Any, *, max_pixels: int | None = MAX_PIXELS, shrink: bool = False, name: str | None = None
) -> Image.Image:
    """Turn `source` into an upright RGB picture.

    source: path, PIL image, bytes, binary file object, array (H, W), (H, W, 1|3|4) or tensor (1|3|4, H, W) or
        (H, W); arrays and tensors are uint8, or floating point within [0, 1]. Of a camera's RAW file the preview inside
        is taken, of a video (`clip.mp4#t=2.5`) that frame.
    max_pixels: limit on width x height (None: only Pillow's own limit, about 179 million).
    shrink: have a JPEG above the limit decoded at a half, a quarter or an eighth instead of refusing it; `full_size`
        tells what it was. Other formats can only be decoded whole.
    name: what to call the picture in error messages; by default its path.

    EXIF rotation is applied, of an animation the first frame is taken, transparency is laid on white, 16-bit
    grey is scaled to 8 bits. Raises `ImageError` (a `RamatchError`) that names the picture and the reason.
    """
    name = name or name_of(source) or f"<{type(source).__name__}>"

    def named(reason: str, kind: type[ImageError] = ImageError) -> ImageError:
        return kind(f"{name}: {reason}", name=name, reason=reason)

    try:
        shrink = shrink and not isinstance(source, Image.Image)  # which is not ours to change
        with nullcontext(source) if isinstance(source, Image.Image) else _open(source, name, shrink) as picture:
            size = picture.size
            if shrink and max_pixels is not None and isinstance(picture, JpegImageFile):
                _shrink(picture, max_pixels)
            shrunk = picture.size != size
            _check_size(*picture.size, max_pixels)
            if isinstance(picture, JpegImageFile) and picture.fp is not None:
                _check_scans(picture, *size)
            picture.load()
            orientation = _orientation(picture)
            out = _upright(_to_rgb(picture), orientation)
            if shrunk:
                out.info[FULL_SIZE] = size[::-1] if orientation in _ON_EDGE else size
            return out
    except ImageError as error:
        raise named(error.reason, type(error)) from error.__cause__
    except RamatchError as error:  # a package is missing
        raise named(str(error)) from None
    except UnidentifiedImageError:
        reason = f"not a picture in an accepted format ({', '.join(FORMATS)}), or its header is broken"
        raise named(reason) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise named(f"too many pixels: {error}", ImageTooLargeError) from None
    except Exception as error:  # a hostile file can make a decoder raise anything, MemoryError and SyntaxError too
        reason = getattr(error, "strerror", None) or f"corrupt or truncated: {error or type(error).__name__}"
        raise named(reason) from error


def full_size(picture: Image.Image) -> tuple[int, int]:
    """Width and height before a picture from `load_image` was scaled down, if it was."""
    return picture.info.get(FULL_SIZE, picture.size)


def natural_key(text: str | os.PathLike) -> list[tuple[int, int, str, str]]:
    """Sort key that puts img2 before img10. Numbers are compared as text: they may have thousands of digits."""
    parts = re.split(r"(\d+)", str(text).casefold())
    numbers = (p.lstrip("0") for p in parts)
    return [(0, len(n), n, p) if p.isdecimal() else (1, 0, p, p) for p, n in zip(parts, numbers, strict=True)]


def is_image_name(name: str | os.PathLike) -> bool:
    """True for a file name with a picture's extension that is not hidden."""
    base = os.path.basename(name)
    return not base.startswith(".") and base.lower().endswith(EXTENSIONS)


def _open(source: Any, name: str, shrink: bool) -> Image.Image:
    """A PIL image of any source, not yet decoded if it is a file."""
    if isinstance(source, (str, os.PathLike)):
        try:
            mode = os.stat(source).st_mode  # before opening: a pipe would never answer
        except FileNotFoundError:
            if (frame := video.split_name(source)) is None:
                raise ImageError("no such file") from None
            return video.read_frame(*frame)
        if stat.S_ISDIR(mode):
            readable = os.access(source, os.R_OK | os.X_OK)
            raise ImageError("is a folder, not an image" if readable else "is a folder that may not be entered")
        if not stat.S_ISREG(mode):
            raise ImageError("is a pipe or device, not a file")
        if video.is_video_name(source):
            raise ImageError(f"a video; its frames have names: {os.path.basename(source)}#t=2 is that at 2 seconds")
        return _raw(raw.read_file(source)) if raw.is_raw_name(source) else _identify(source, shrink)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _raw(bytes(source)) if raw.is_raw_name(name) else _identify(io.BytesIO(source), shrink)
    if callable(getattr(source, "read", None)):
        return _identify(_seekable(source), shrink)
    if callable(getattr(source, "detach", None)):  # a torch tensor, recognised without importing torch
        return _from_tensor(source)
    if isinstance(source, np.ndarray):
        return _from_array(source)
    kinds = "a path, PIL image, array, tensor, bytes or file object"
    raise ImageError(f"cannot make a picture of a {type(source).__name__}; give {kinds}")


def _identify(file: Any, shrink: bool) -> Image.Image:
    """A picture by its first bytes."""
    try:
        return Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError:
        if shrink and _beginning(file).startswith(b"\xff\xd8\xff"):
            return JpegImageFile(file)  # so that Pillow does not judge the size that it will not be decoded at
        raise
    except UnidentifiedImageError:
        start = _beginning(file)
        if start[4:8] != b"ftyp" or start[8:12] not in HEIF_BRANDS:
            raise
        require("pillow_heif", "heif").register_heif_opener()
        return Image.open(file, formats=("HEIF",))


def _beginning(file: Any) -> bytes:
    if isinstance(file, (str, os.PathLike)):
        with open(file, "rb") as stream:
            return stream.read(12)
    file.seek(0)
    start = file.read(12)
    file.seek(0)
    return start


def _raw(content: bytes) -> Image.Image:
    """The preview in a camera's file, which is to be turned as the file says if the preview does not."""
    found = raw.preview(content)
    if found is None:
        raise ImageError("no preview in this RAW file")
    picture = Image.open(io.BytesIO(found), formats=("JPEG",))
    if _orientation(picture) == 1:
        picture.info[_HELD] = raw.orientation(content)
    return picture


def _seekable(stream: Any) -> Any:
    if callable(getattr(stream, "seekable", None)) and stream.seekable():
        if isinstance(stream, io.TextIOBase):
            raise ImageError("the file object is open in text mode; open it with 'rb'")
        return stream
    content = stream.read()
    if not isinstance(content, bytes):
        raise ImageError("the file object does not give bytes; open it with 'rb'")
    return io.BytesIO(content)


def _from_tensor(tensor: Any) -> Image.Image:
    if tensor.ndim == 3 and tensor.shape[0] in (1, 3, 4):
        tensor = tensor.permute(1, 2, 0)
    elif tensor.ndim != 2:
        raise ImageError(f"a tensor of shape {tuple(tensor.shape)}; expected (3, H, W), (1, H, W) or (H, W)")
    tensor = tensor.detach().cpu()
    return _from_array((tensor.float() if tensor.is_floating_point() else tensor).numpy())  # numpy knows no bfloat16


def _from_array(array: np.ndarray) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise ImageError(f"an array of shape {array.shape}; expected (H, W, 3) or (H, W)")
    _check_size(array.shape[1], array.shape[0])
    if np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not (low >= -1e-4 and high <= 1 + 1e-4):  # also catches NaN; a little slack for interpolation
            raise ImageError(f"float values from {low:.3g} to {high:.3g}; expected [0, 1] (not normalised)")
        array = np.clip(np.rint(array * 255.0), 0, 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise ImageError(f"values of type {array.dtype}; expected uint8, or floats within [0, 1]")
    return Image.fromarray(np.ascontiguousarray(array))


def _check_size(width: int, height: int, max_pixels: int | None = None) -> None:
    if width < 1 or height < 1:
        raise ImageError(f"empty picture ({width}x{height})")
    if max_pixels is not None and width * height > max_pixels:
        pixels = f"{width * height:,} pixels, more than the limit of {max_pixels:,}"
        raise ImageTooLargeError(f"{width}x{height} is {pixels}")
    if max(width, height) > MAX_SIDE:
        raise ImageTooLargeError(f"{width}x{height} has a side of more than {MAX_SIDE:,} pixels")


def _check_scans(picture: JpegImageFile, width: int, height: int) -> None:
    """Refuse a JPEG that is decoded again and again: each scan goes over all pixels, however few bytes it has."""
    stream, scans, last = cast(BinaryIO, picture.fp), 0, b""
    place = stream.tell()
    stream.seek(0)
    while chunk := stream.read(1 << 20):
        scans += chunk.count(b"\xff\xda") + (last + chunk[:1] == b"\xff\xda")  # in coded data a 0 follows each 255
        last = chunk[-1:]
    stream.seek(place)
    if scans > MAX_SCANS or scans * width * height > MAX_WORK:
        size = f"{width}x{height} pixels"
        raise ImageTooLargeError(f"a JPEG of {scans:,} scans of {size}, more than a picture has; save it again")


def name_of(source: Any) -> str | None:
    """What to call this image: its path, or the name that a file object or PIL image carries."""
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    inner = getattr(source, "filename", None) or getattr(source, "name", None)
    return inner if isinstance(inner, str) and inner else None


def embedded_metadata(path: str | os.PathLike) -> tuple[bytes, list[bytes]]:
    """The XMP packet in an image file and its IPTC keywords, as they are; empty where there is nothing to be read."""
    try:
        with _identify(path, shrink=True) as picture:
            iptc = getiptcinfo(cast(ImageFile, picture)) or {}
            found, packet = iptc.get(_KEYWORDS, []), picture.info.get("xmp") or b""
            return packet if isinstance(packet, bytes) else packet.encode(), found if isinstance(found, list) else [
                found
            ]
    except Exception:  # as in load_image
        return b"", []


def _orientation(picture: Image.Image) -> int:
    """How the camera was held; nonsense in the EXIF block is no reason to lose a good picture."""
    try:
        return picture.info.get(_HELD) or picture.getexif().get(raw.ORIENTATION, 1)
    except Exception:
        return 1


def _upright(picture: Image.Image, orientation: int) -> Image.Image:
    turn = _TURNS.get(orientation)
    return picture if turn is None else picture.transpose(turn)


def _shrink(picture: JpegImageFile, max_pixels: int) -> None:
    """Have a JPEG decoded at a half, a quarter or an eighth of its sides, if only so it keeps to the limit. One of
    several scans would have to be held whole meanwhile."""
    header = read_header(cast(BinaryIO, picture.fp))
    if picture.width * picture.height <= max_pixels or header is None or not header.one_pass:
        return
    for part in (2, 4, 8):
        if -(-picture.width // part) * -(-picture.height // part) <= max_pixels:
            picture.draft(None, (picture.width // part, picture.height // part))
            return


def _to_rgb(picture: Image.Image) -> Image.Image:
    """A new picture. In strips, since two or three wide copies of the largest one would take gigabytes."""
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture.copy()
    scale = _deep_scale(picture) if picture.mode == "F" or picture.mode.startswith("I") else None
    out = Image.new("RGB", picture.size)
    for top, strip in _strips(picture):
        out.paste(_flat(strip) if scale is None else _deep_grey(strip, scale), (0, top))
    return out


def _strips(picture: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Rows of about `STRIP` pixels, each with the number of its first."""
    step = max(1, STRIP // picture.width)
    for top in range(0, picture.height, step):
        yield top, picture.crop((0, top, picture.width, min(top + step, picture.height)))


def _flat(picture: Image.Image) -> Image.Image:
    """8 bits to RGB, what is transparent on white."""
    if picture.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        rgba = picture.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, rgba)
    return picture.convert("RGB")


def _deep_scale(picture: Image.Image) -> float:
    """What 16-bit integer or floating-point grey is multiplied with, by range: 65535 or 1.0 is white."""
    top = 0.0
    for _, strip in _strips(picture):
        found = np.fmax.reduce(np.asarray(strip), axis=None)  # ignores NaN
        top = max(top, float(np.nan_to_num(found, posinf=255.0)))
    if picture.mode == "F":
        return 255.0 if top <= 1.0 else 1.0
    if top > 65535:
        return 255.0 / top
    return 255.0 / 65535.0 if picture.mode.startswith("I;16") or top > 255 else 1.0


def _deep_grey(picture: Image.Image, scale: float) -> Image.Image:
    values = np.nan_to_num(np.asarray(picture).astype(np.float64), nan=0.0, posinf=255.0, neginf=0.0)
    return Image.fromarray(np.clip(np.rint(values * scale), 0, 255).astype(np.uint8)).convert("RGB")
