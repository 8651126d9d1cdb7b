"""Camera RAW files by the preview that is in them: cameras put a JPEG as they would develop it beside the raw data.

Every maker has a structure of their own, but a JPEG looks the same in all of them: the largest one is taken that has a
sound header and is not lossless, as raw data themselves may be.
"""

from __future__ import annotations

import io
import os

from PIL import Image

from ..errors import RamatchError
from .jpeg import BASELINE, read_header

ENDINGS = (".dng", ".nef", ".nrw", ".cr2", ".cr3", ".arw", ".srf", ".sr2", ".raf", ".orf", ".rw2", ".pef", ".srw")
MAX_BYTES = 1 << 30
CANDIDATES = 200  # places that look like the start of a JPEG; in noise there is one in 16 MB
PROGRESSIVE = 0xC2
ORIENTATION = 0x0112  # EXIF


def is_raw_name(name: str | os.PathLike | None) -> bool:
    return name is not None and os.fspath(name).lower().endswith(ENDINGS)


def preview(content: bytes) -> bytes | None:
    """The largest JPEG inside, None if there is none."""
    stream, best, found = io.BytesIO(content), 0, None
    at = -1
    for _ in range(CANDIDATES):
        if (at := content.find(b"\xff\xd8\xff", at + 1)) < 0:
            break
        header = read_header(stream, at)
        if header is None or header.frame not in (*BASELINE, PROGRESSIVE) or header.width * header.height <= best:
            continue
        end = content.find(b"\xff\xd9", header.coded)
        if end > 0:
            best, found = header.width * header.height, content[at : end + 2]
    return found


def orientation(content: bytes) -> int:
    """How the camera was held, by the file's own EXIF; makers change the first bytes of what is a TIFF."""
    start = content.find(b"CMT1", 0, 1 << 20) + 4 if content[4:12] == b"ftypcrx " else 0  # Canon's CR3: in a box
    order = content[start : start + 2]
    if order not in (b"II", b"MM"):
        return 1
    exif = Image.Exif()
    exif.load((b"II*\0" if order == b"II" else b"MM\0*") + content[start + 4 :])
    return exif.get(ORIENTATION, 1)


def read_file(path: str | os.PathLike) -> bytes:
    """A RAW file, if it is not larger than one can be."""
    with open(path, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise RamatchError(f"a RAW file of more than {MAX_BYTES >> 20} MB")
    return content
