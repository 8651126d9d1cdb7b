"""Safe image decoding: one door through which every picture enters.

A picture may come from a stranger, so the format is on an allow-list, the size is read from the header and
checked before a pixel is decoded, and whatever a broken file makes the decoder raise becomes one clear error.
"""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ramatch.errors import RamatchError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
MAX_PIXELS = 100_000_000


class ImageError(RamatchError):
    """A picture that cannot be used; `name` says which one and `reason` why."""

    def __init__(self, message: str, *, name: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.reason = reason or message


class ImageTooLargeError(ImageError):
    """A picture with more pixels than allowed, found from its header, before decoding."""


def load_image(source: Any, *, max_pixels: int | None = MAX_PIXELS, name: str | None = None) -> Image.Image:
    """Turn `source` into an upright RGB picture.

    source: path, PIL image, bytes, binary file object, array (H, W), (H, W, 1|3|4) or tensor (1|3|4, H, W) or
        (H, W); arrays and tensors are uint8, or floating point within [0, 1].
    max_pixels: limit on width x height (None: only Pillow's own limit, about 179 million).
    name: what to call the picture in error messages; by default its path.

    EXIF rotation is applied, of an animation the first frame is taken, transparency is laid on white, 16-bit
    grey is scaled to 8 bits. Raises `ImageError` (a `RamatchError`) that names the picture and the reason.
    """
    name = name or _name_of(source)
    if isinstance(source, Image.Image):
        _check_size(source.size, max_pixels, name)
        return _finish(source, name)
    if isinstance(source, (str, os.PathLike)):
        return _from_path(Path(source), max_pixels, name)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _from_stream(io.BytesIO(source), max_pixels, name)
    if callable(getattr(source, "read", None)):
        return _from_stream(_seekable(source, name), max_pixels, name)
    if callable(getattr(source, "detach", None)):  # a torch tensor, recognised without importing torch
        return _from_tensor(source, max_pixels, name)
    if isinstance(source, np.ndarray):
        return _from_array(source, max_pixels, name)
    raise _error(name, f"cannot make a picture of a {type(source).__name__}; give a path, PIL image, "
                       "array, tensor, bytes or file object")  # fmt: skip


def find_images(paths: str | os.PathLike | Iterable[str | os.PathLike], recursive: bool = True) -> list[Path]:
    """All pictures named by files, folders and glob patterns (`**` allowed), each once, in natural order.

    A file named outright is taken whatever its extension (decoding decides); folders and patterns give files
    with a picture's extension, hidden ones left out. Nothing found is an error.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found: dict[Path, None] = {}
    for item in given:
        found.update(dict.fromkeys(_expand(Path(os.path.expanduser(item)), recursive)))
    if not found:
        raise RamatchError(
            f"no images found in {', '.join(map(str, given)) or 'an empty list'} (looked for {' '.join(EXTENSIONS)})"
        )
    return list(found)


def natural_key(text: str | os.PathLike) -> list[tuple[int, int, str]]:
    """Sort key that puts img2 before img10."""
    parts = re.split(r"(\d+)", str(text).casefold())
    return [(0, int(p), p) if p.isdecimal() else (1, 0, p) for p in parts]


def is_image_name(name: str | os.PathLike) -> bool:
    """True for a file name with a picture's extension that is not hidden."""
    base = os.path.basename(name)
    return not base.startswith(".") and base.lower().endswith(EXTENSIONS)


# ------------------------------------------------------------------------------------------------ finding


def _expand(path: Path, recursive: bool) -> list[Path]:
    if path.is_dir():
        walk = path.rglob("*") if recursive else path.glob("*")
        return sorted((p for p in walk if is_image_name(p) and p.is_file()), key=natural_key)
    if path.exists():
        return [path]
    if glob.has_magic(str(path)):
        hits = (Path(p) for p in glob.iglob(str(path), recursive=recursive))
        return sorted((p for p in hits if is_image_name(p) and p.is_file()), key=natural_key)
    raise RamatchError(f"no such file or folder: {path}")


# ----------------------------------------------------------------------------------------------- decoding


def _from_path(path: Path, max_pixels: int | None, name: str) -> Image.Image:
    try:
        stream = open(path, "rb")  # noqa: SIM115 (closed below, after a separate message for opening)
    except FileNotFoundError:
        raise _error(name, "no such file") from None
    except IsADirectoryError:
        raise _error(name, "is a folder, not an image") from None
    except OSError as error:
        raise _error(name, error.strerror or str(error)) from error
    with stream:
        return _from_stream(stream, max_pixels, name)


def _from_stream(stream: Any, max_pixels: int | None, name: str) -> Image.Image:
    try:
        picture = Image.open(stream, formats=FORMATS)
    except UnidentifiedImageError:
        raise _error(
            name, f"not a picture in an accepted format ({', '.join(FORMATS)}), or its header is broken"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _error(name, f"too many pixels: {error}", ImageTooLargeError) from None
    except Exception as error:  # a hostile header can make a plugin raise anything
        raise _error(name, f"unreadable header: {error}") from error
    with picture:
        _check_size(picture.size, max_pixels, name)
        return _finish(picture, name)


def _finish(picture: Image.Image, name: str) -> Image.Image:
    """Decode, turn upright, convert to RGB; the caller's own picture is left as it was."""
    try:
        picture.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _error(name, f"too many pixels: {error}", ImageTooLargeError) from None
    except Exception as error:
        raise _error(name, f"corrupt or truncated: {error}") from error
    try:
        upright = ImageOps.exif_transpose(picture)
    except Exception:  # nonsense in the EXIF block is no reason to lose a good picture
        upright = picture
    try:
        rgb = _to_rgb(upright)
    except Exception as error:
        raise _error(name, f"cannot convert mode {picture.mode} to RGB: {error}") from error
    return rgb.copy() if rgb is picture else rgb


def _to_rgb(picture: Image.Image) -> Image.Image:
    mode = picture.mode
    if mode == "RGB" and "transparency" not in picture.info:
        return picture
    if mode == "F" or mode.startswith("I"):
        return _deep_grey(picture)
    if mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in picture.info:
        rgba = picture.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return picture.convert("RGB")


def _deep_grey(picture: Image.Image) -> Image.Image:
    """16-bit integer or floating-point grey to 8 bits, by range: 65535 or 1.0 is white."""
    values = np.asarray(picture).astype(np.float64)
    values = np.nan_to_num(values, nan=0.0, posinf=255.0, neginf=0.0)
    top = values.max(initial=0.0)
    if picture.mode == "F":
        scale = 255.0 if top <= 1.0 else 1.0
    else:
        scale = 255.0 / 65535.0 if picture.mode.startswith("I;16") or top > 255 else 1.0
        if top > 65535:
            scale = 255.0 / top
    grey = np.clip(np.rint(values * scale), 0, 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")


# ---------------------------------------------------------------------------------------- arrays, tensors


def _from_tensor(tensor: Any, max_pixels: int | None, name: str) -> Image.Image:
    if tensor.ndim == 3 and tensor.shape[0] in (1, 3, 4):
        tensor = tensor.permute(1, 2, 0)
    elif tensor.ndim != 2:
        raise _error(name, f"a tensor of shape {tuple(tensor.shape)}; expected (3, H, W), (1, H, W) or (H, W)")
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.float()  # numpy knows no bfloat16
    return _from_array(tensor.numpy(), max_pixels, name)


def _from_array(array: np.ndarray, max_pixels: int | None, name: str) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
        raise _error(name, f"an array of shape {array.shape}; expected (H, W, 3) or (H, W)")
    _check_size((array.shape[1], array.shape[0]), max_pixels, name)
    if array.dtype != np.uint8:
        array = _unit_to_uint8(array, name)
    return _to_rgb(Image.fromarray(np.ascontiguousarray(array))).copy()


def _unit_to_uint8(array: np.ndarray, name: str) -> np.ndarray:
    if not np.issubdtype(array.dtype, np.floating):
        raise _error(name, f"values of type {array.dtype}; expected uint8, or floats within [0, 1]")
    low, high = float(array.min()), float(array.max())
    if not (low >= -1e-4 and high <= 1 + 1e-4):  # also catches NaN; a little slack for interpolation
        raise _error(name, f"float values from {low:.3g} to {high:.3g}; expected [0, 1] (not normalised)")
    return np.clip(np.rint(array * 255.0), 0, 255).astype(np.uint8)


# ----------------------------------------------------------------------------------------------- helpers


def _check_size(size: Sequence[int], max_pixels: int | None, name: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise _error(name, f"empty picture ({width}x{height})")
    if max_pixels is not None and width * height > max_pixels:
        raise _error(
            name,
            f"{width}x{height} is {width * height:,} pixels, more than the limit of {max_pixels:,}",
            ImageTooLargeError,
        )


def _seekable(stream: Any, name: str) -> Any:
    if callable(getattr(stream, "seekable", None)) and stream.seekable():
        if isinstance(stream, io.TextIOBase):
            raise _error(name, "the file object is open in text mode; open it with 'rb'")
        return stream
    content = stream.read()
    if not isinstance(content, bytes):
        raise _error(name, "the file object does not give bytes; open it with 'rb'")
    return io.BytesIO(content)


def _name_of(source: Any) -> str:
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    inner = getattr(source, "filename", None) or getattr(source, "name", None)
    return inner if isinstance(inner, str) and inner else f"<{type(source).__name__}>"


def _error(name: str, reason: str, kind: type[ImageError] = ImageError) -> ImageError:
    return kind(f"{name}: {reason}", name=name, reason=reason)
