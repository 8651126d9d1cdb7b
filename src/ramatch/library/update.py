"""Bring a library in line with a folder: what is new, changed, moved or gone. A batch is in it whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ..data.find import HIDDEN_FOLDERS, find
from ..data.images import full_size, load_image
from ..data.prefetch import ahead, chunks
from ..errors import RamatchError
from ..modeling.preprocess import Preprocess
from ..recognizer import Recognizer
from .features import Encoder
from .store import transaction
from .vectors import Vectors, checksum, quantize

THUMBNAIL = 160  # pixels of the longer side


@dataclass(frozen=True)
class Update:
    """What an update found. moved: content known from a path that is gone. copies: content known from a path that is
    still there, or that went earlier. encoded: seen by the model. failed: (path, reason), also of earlier updates."""

    new: int
    changed: int
    moved: int
    copies: int
    unchanged: int
    deleted: int
    encoded: int
    hidden_folders: int
    failed: list[tuple[str, str]]


# pixels, or what another process made of them (see `Here.features`); thumbnail; width, height, time it was taken
Decoded = tuple[Any, bytes, tuple[int, int, float | None]]


class Entry(NamedTuple):
    """A file as it was read. digest: of its content; decoded: unless the library knows that; error: why it failed."""

    key: bytes
    size: int
    mtime: int
    digest: bytes = b""
    decoded: Decoded | None = None
    error: str | None = None


@dataclass(frozen=True)
class Reader:
    """Reads and decodes one file, in a thread or a process of its own. base: the folder that keys are relative to.
    known: digests of what the library has already, which is not decoded."""

    base: Path
    preprocess: Preprocess
    known: Collection[bytes]

    def key(self, path: str) -> bytes:
        return os.fsencode(os.path.relpath(path, self.base))

    def __call__(self, path: str) -> Entry:
        entry = Entry(self.key(path), -1, -1)
        try:
            size, mtime = _stamp(path)
            content = Path(path).read_bytes()
            entry = Entry(entry.key, size, mtime, hashlib.blake2b(content, digest_size=16).digest())
            if entry.digest in self.known:
                return entry
            picture = load_image(content, name=path, shrink=True)
            about, pixels = (*full_size(picture), _taken(content)), self.preprocess.resize(picture)
            picture.thumbnail((THUMBNAIL, THUMBNAIL))
            picture.save(buffer := io.BytesIO(), "WEBP", quality=50)
            return entry._replace(decoded=(pixels, buffer.getvalue(), about))
        except (RamatchError, OSError) as error:
            return entry._replace(
                error=getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            )


class Here:
    """How files become features: read by threads, encoded in this process. Another way has the same two functions."""

    def __init__(self, recognizer: Recognizer, batch_size: int) -> None:
        self.encoder, self.batch_size = Encoder(recognizer), batch_size

    def entries(self, reader: Reader, paths: Sequence[str]) -> Iterator[Entry]:
        return ahead(reader, paths, 2 * self.batch_size)

    def features(self, decoded: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Of what entries have in the place of pixels: global features (B, D) and kept regions (B, K, D)."""
        return self.encoder(torch.stack(list(decoded)))


class Updater:
    """One update. `base`: the folder that paths in the database are relative to. `way`: see `Here`."""

    def __init__(
        self, database: sqlite3.Connection, vectors: Vectors, preprocess: Preprocess, base: Path, way: Here
    ) -> None:
        self.database, self.vectors, self.base, self.way = database, vectors, base, way
        self.photos: dict[bytes, int] = dict(database.execute("SELECT digest, id FROM photos"))
        self.reader = Reader(base, preprocess, self.photos)
        self.key = self.reader.key
        self.rows = database.execute("SELECT COALESCE(MAX(row) + 1, 0) FROM photos").fetchone()[0]
        self.known = {path: rest for path, *rest in database.execute("SELECT path, size, mtime, photo FROM files")}
        self.gone: dict[bytes, int | None] = {}  # path → photo of what was there and is not
        self.counts: Counter[str] = Counter()

    def run(self, folder: Path, skip: Path, *, batch_size: int, progress: bool) -> Update:
        from tqdm import tqdm  # comes with transformers

        found = find([folder])
        paths = [str(path) for path in found.paths if path.is_file() and not path.is_relative_to(skip)]
        seen, hidden = {self.key(path): path for path in paths}, len(found.skipped[HIDDEN_FOLDERS])
        if not seen:  # also where there were some: rather a drive that is not mounted than an order to forget them all
            raise RamatchError(f"no images in {folder} ({hidden} hidden folders were not looked into)")
        self.gone = {k: v[2] for k, v in self.known.items() if k not in seen and self.is_inside(k, folder)}
        work = [path for key, path in seen.items() if self.known.get(key, ())[:2] != _stamp(path)]
        entries = self.way.entries(self.reader, work)
        bar = tqdm(entries, total=len(work), unit="img", disable=not progress, leave=False)
        for batch in chunks(bar, batch_size):
            self.commit(batch)
        with transaction(self.database):
            self.database.executemany("DELETE FROM files WHERE path = ?", [(key,) for key in self.gone])
        self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # the log's room is given back, unless somebody reads
        rows = self.database.execute("SELECT path, error FROM files WHERE error IS NOT NULL ORDER BY path").fetchall()
        kinds = {kind: self.counts[kind] for kind in ("new", "changed", "moved", "copies", "encoded")}
        return Update(
            **kinds,
            unchanged=len(seen) - len(work),
            deleted=len(self.gone),
            hidden_folders=hidden,
            failed=[(seen[key], error) for key, error in rows if key in seen],
        )

    def is_inside(self, key: bytes, folder: Path) -> bool:
        return Path(os.path.normpath(self.base / os.fsdecode(key))).is_relative_to(folder)

    def commit(self, batch: list[Entry]) -> None:
        """Encode what is new, put its vectors on the disk, then all that refers to them into the database at once."""
        fresh = {e.digest: e.decoded for e in batch if e.decoded is not None and e.digest not in self.photos}
        added, counts, gone = dict[bytes, int](), Counter(encoded=len(fresh)), dict(self.gone)
        if fresh:
            arrays = quantize(*self.way.features([pixels for pixels, _, _ in fresh.values()]))
            self.vectors.append(self.rows, arrays)
        with transaction(self.database):
            for i, (digest, (_, webp, about)) in enumerate(fresh.items()):
                values = (self.rows + i, digest, checksum(arrays, i), *about)
                insert = "INSERT INTO photos (row, digest, crc, width, height, taken) VALUES (?, ?, ?, ?, ?, ?)"
                added[digest] = self.database.execute(insert, values).lastrowid or 0
                self.database.execute("INSERT INTO thumbnails VALUES (?, ?)", (added[digest], webp))
            origins = {photo: key for key, photo in gone.items() if photo}
            for e in batch:
                photo = None if e.error else self.photos.get(e.digest) or added[e.digest]
                kind = "changed" if e.key in self.known else "new" if e.digest in fresh else "copies"
                if kind == "copies" and photo in origins:
                    kind, old = "moved", origins.pop(photo)
                    del gone[old]
                    self.database.execute("DELETE FROM files WHERE path = ?", (old,))
                counts[kind] += e.error is None
                row = (e.key, photo, e.size, e.mtime, e.error)
                self.database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", row)
        # only now is it true
        self.photos.update(added)
        self.gone, self.rows = gone, self.rows + len(fresh)
        self.counts += counts


def _stamp(path: str) -> list[int]:
    """Size and time of a file; the same for both means that it has not changed."""
    try:
        stat = os.stat(path)
    except OSError:  # gone since it was listed; reading it will say so
        return [-1, -1]
    return [stat.st_size, stat.st_mtime_ns]


def _taken(content: bytes) -> float | None:
    """When the camera says that it took this photo, in seconds since 1970."""
    with contextlib.suppress(Exception):  # EXIF blocks hold any nonsense
        exif = Image.open(io.BytesIO(content)).getexif()
        text = exif.get_ifd(0x8769).get(0x9003) or exif[0x0132]
        return time.mktime(time.strptime(text.strip("\0 "), "%Y:%m:%d %H:%M:%S"))
    return None
