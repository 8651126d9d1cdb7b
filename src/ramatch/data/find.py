"""Pictures on disk by names of files, folders and patterns; what is left out is told."""

from __future__ import annotations

import glob
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path

from ..errors import RamatchError
from .images import is_image_name, natural_key
from .video import frame_names, is_video_name, split_name

HIDDEN_FOLDERS, HIDDEN_FILES, VIDEOS, OTHER = "hidden folders", "hidden files", "videos", "other files"


@dataclass
class Found:
    """paths: pictures, each once, folders in natural order. missing: (name, reason). skipped: by kind, the folders and
    files that were met and left out."""

    paths: list[Path] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    skipped: dict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))


def find_images(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Path]:
    """All pictures named by files, folders and glob patterns (`**` allowed), each once, in natural order.

    A file named outright is taken whatever its extension (decoding decides); folders and patterns give files
    with a picture's extension, hidden ones left out. What bears such a name but is no readable file (a dangling link, a
    pipe), and a folder that may not be entered, are named too: decoding says what is wrong. Nothing found is an error.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found = find(given)
    if found.missing:
        name, reason = found.missing[0]
        raise RamatchError(f"{reason}: {name}")
    if not found.paths:
        raise nothing_found(given)
    return found.paths


def nothing_found(given: Iterable[object]) -> RamatchError:
    return RamatchError(f"no images found in {', '.join(map(str, given)) or 'an empty list'}")


def find(
    names: Iterable[str | os.PathLike], *, listed: Iterable[str | os.PathLike] = (), every: float | None = None
) -> Found:
    """As `find_images`, without an error: what is missing is named. `listed`: further names, which are no patterns;
    `every`: of videos, frames this many seconds apart are taken, under names that `load_image` knows."""
    found, taken = Found(), dict[Path, None]()
    for name, may_match in chain(product(names, [True]), product(listed, [False])):
        path = Path(os.path.expanduser(name))
        if path.is_dir():
            hits = _in_order(_walk(path, found.skipped))
        elif os.path.lexists(path) or ((frame := split_name(path)) and os.path.lexists(frame[0])):
            hits = [path]
        elif may_match and glob.has_magic(str(path)):
            hits = _in_order(_matching(str(path), found.skipped))
            if not hits:
                found.missing.append((str(name), "no images found"))
        else:
            hits = []
            found.missing.append((str(name), "no such file or folder"))
        for hit in hits:
            if not is_video_name(hit):
                taken[hit] = None
            elif every is None:
                found.skipped[VIDEOS].append(hit)
            else:
                _add_frames(hit, every, taken, found.missing)
    found.paths = list(taken)
    return found


def _add_frames(video: Path, every: float, taken: dict[Path, None], missing: list[tuple[str, str]]) -> None:
    try:
        taken.update(dict.fromkeys(map(Path, frame_names(video, every))))
    except RamatchError as error:
        missing.append((str(video), str(error)))


def _in_order(hits: Iterable[Path]) -> list[Path]:
    """Without folders, but for those that cannot be listed."""
    return sorted((p for p in hits if not p.is_dir() or not os.access(p, os.R_OK | os.X_OK)), key=natural_key)


def _matching(pattern: str, skipped: dict[str, list[Path]]) -> Iterator[Path]:
    for hit in map(Path, glob.iglob(pattern, recursive=True)):
        if is_image_name(hit) or is_video_name(hit):
            yield hit
        elif not hit.is_dir():
            skipped[OTHER].append(hit)


def _walk(folder: Path, skipped: dict[str, list[Path]]) -> Iterator[Path]:
    """Entries with a picture's or video's name and folders that cannot be listed. With a list of its own instead of
    recursion, since a folder may be thousands deep; links to folders are not followed, since they may lead in
    circles."""
    waiting = [str(folder)]
    while waiting:
        inside = waiting.pop()
        try:
            with os.scandir(inside) as entries:
                for entry in entries:
                    hidden, is_folder = entry.name.startswith("."), entry.is_dir(follow_symlinks=False)
                    if hidden:
                        skipped[HIDDEN_FOLDERS if is_folder else HIDDEN_FILES].append(Path(entry.path))
                    elif is_folder:
                        waiting.append(entry.path)
                    elif is_image_name(entry.name) or is_video_name(entry.name):
                        yield Path(entry.path)
                    else:
                        skipped[OTHER].append(Path(entry.path))
        except OSError:
            yield Path(inside)
