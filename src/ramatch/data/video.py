"""Frames of videos as pictures with names of their own: `clip.mp4#t=2.5` is the frame 2.5 seconds from the start.

Such a name is all that is needed to read the frame again, so frames go through lists, reports and resumed runs like
files. FFmpeg reads them, by PyAV (extra `video`).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from ..errors import RamatchError, require

ENDINGS = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".mts", ".m2ts", ".3gp", ".wmv")
MAX_FRAMES = 100_000  # of one video; a file may claim to last for years
MAX_PIXELS = 100_000_000
NAME = re.compile(r"(?P<path>.+)#t=(?P<time>\d+(?:\.\d+)?)", re.DOTALL)


def is_video_name(name: str | os.PathLike) -> bool:
    base = os.path.basename(name)
    return not base.startswith(".") and base.lower().endswith(ENDINGS)


def split_name(name: str | os.PathLike) -> tuple[str, float] | None:
    """Video and seconds of a frame's name; None if it is no such name."""
    found = NAME.fullmatch(os.fspath(name))
    return (found["path"], float(found["time"])) if found and is_video_name(found["path"]) else None


def frame_names(path: Path | str, every: float) -> list[str]:
    """Names of the frames `every` so many seconds, from the first on."""
    with _opened(path) as (container, stream):
        seconds = _seconds(container, stream)
    count = max(1, math.ceil(seconds / every - 1e-6))
    if count > MAX_FRAMES:
        raise RamatchError(f"{path}: {count:,} frames, more than {MAX_FRAMES:,}; take fewer with a longer interval")
    return [f"{path}#t={round(i * every, 3):.10g}" for i in range(count)]


def read_frame(path: Path | str, time: float) -> Image.Image:
    """The frame shown at `time`, upright; of a time after the end, the last one."""
    with _opened(path) as (container, stream):
        if stream.width * stream.height > MAX_PIXELS:
            raise RamatchError(f"a video of {stream.width}x{stream.height}, which is larger than any camera's")
        start = stream.start_time or 0
        wanted = start + round(time / float(stream.time_base))
        container.seek(wanted, stream=stream)  # to the last key frame before
        shown = None
        for frame in container.decode(stream):
            if shown is not None and frame.pts is not None and frame.pts > wanted:
                break
            shown = frame
        if shown is None:
            raise RamatchError(f"no frame at {time:g} s")
        picture = shown.to_image()
        return picture.rotate(shown.rotation, expand=True) if shown.rotation else picture


@contextlib.contextmanager
def _opened(path: Path | str) -> Iterator[tuple[Any, Any]]:
    av = require("av", "video")
    try:
        with av.open(os.fspath(path)) as container:
            if not container.streams.video:
                raise RamatchError("no video in it")
            yield container, container.streams.video[0]
    except av.FFmpegError as error:
        raise RamatchError(f"not a video that can be read: {error.strerror or error}") from None


def _seconds(container: Any, stream: Any) -> float:
    """How long it lasts. Streams that were recorded live do not say so; then the packets do."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    if container.duration:
        return container.duration / 1_000_000
    times = [packet.pts for packet in container.demux(stream) if packet.pts is not None]
    return float((max(times) - min(times)) * stream.time_base) if times else 0.0
