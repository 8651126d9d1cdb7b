"""What a JPEG says of itself before its pixels."""

from __future__ import annotations

from typing import BinaryIO, NamedTuple

SEGMENTS = 1024  # of a header; cameras write some tens, long XMP hundreds
BASELINE = (0xC0, 0xC1)  # lines of blocks, one after the other; other kinds go over the picture several times
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class Header(NamedTuple):
    """frame: the marker that tells baseline, progressive, lossless, …; one_pass: all is in a single scan of baseline,
    so that a decoder need not hold it; coded: where its coded data begin."""

    width: int
    height: int
    frame: int
    one_pass: bool
    coded: int


def read_header(stream: BinaryIO, start: int = 0) -> Header | None:
    """The header of the JPEG that begins at `start`; None if none does. The stream is left where it was."""
    before = stream.tell()
    try:
        stream.seek(start)
        return _read(stream) if stream.read(2) == b"\xff\xd8" else None
    finally:
        stream.seek(before)


def _read(stream: BinaryIO) -> Header | None:
    frame = width = height = parts = 0
    for _ in range(SEGMENTS):
        head = stream.read(4)
        if len(head) < 4 or head[0] != 0xFF or (length := int.from_bytes(head[2:], "big")) < 2:
            return None
        marker = head[1]
        if marker in FRAMES:
            about = stream.read(6)
            if len(about) < 6:
                return None
            frame, height, width, parts = marker, *_sides(about), about[5]
            stream.seek(length - 8, 1)
        elif marker == 0xDA:
            in_scan = stream.read(1)
            if not in_scan or not width * height:
                return None
            one_pass = frame in BASELINE and in_scan[0] == parts
            return Header(width, height, frame, one_pass, stream.tell())
        else:
            stream.seek(length - 2, 1)
    return None


def _sides(about: bytes) -> tuple[int, int]:
    return int.from_bytes(about[1:3], "big"), int.from_bytes(about[3:5], "big")
