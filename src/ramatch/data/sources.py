"""Where a picture's bytes are: a file, a slice of a tar shard or Arrow file, a parquet cell; and how to find it.

A source is a small frozen value that opens what it needs on each read. It holds no file handle, so it can be
pickled, forked and used from threads without care.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ramatch.data.images import EXTENSIONS, is_image_name, natural_key
from ramatch.errors import RamatchError, require

MAX_WALK = 2_000_000  # pictures looked at under a root before giving up on repairing names
MAX_FOLDERS = 64  # of a name, tried as roots of another machine


@dataclass(frozen=True, slots=True)
class FileImage:
    """A picture that is a file, or the `size` bytes at `offset` of one (a tar shard, an Arrow file), called `name`."""

    path: str
    offset: int = 0
    size: int = -1
    name: str = ""

    def read(self) -> bytes:
        try:
            with open(self.path, "rb", buffering=0) as stream:
                stream.seek(self.offset)
                content = stream.read(self.size)
        except OSError as error:
            raise RamatchError(f"{self}: {error.strerror or error}") from error
        if content is None or len(content) < self.size:
            raise RamatchError(f"{self}: the file ends early; it changed or was cut short after indexing")
        return content

    def __str__(self) -> str:
        return f"{self.path}:{self.name}" if self.name else self.path


@dataclass(frozen=True, slots=True)
class ParquetImage:
    """A picture in row `row` of row group `group` of a parquet file; a few groups are kept decoded."""

    path: str
    group: int
    row: int
    column: str

    def read(self) -> bytes:
        try:
            return _parquet_group(self.path, os.stat(self.path).st_mtime_ns, self.group, self.column)[self.row]
        except (OSError, ValueError, LookupError, NotImplementedError, MemoryError) as error:
            raise RamatchError(f"{self}: {error}") from error

    def __str__(self) -> str:
        return f"{self.path}:group {self.group}, row {self.row}"


ImageSource = FileImage | ParquetImage  # gives an encoded picture and, as text, where it is


@lru_cache(maxsize=4)
def _parquet_group(path: str, _mtime: int, group: int, column: str) -> list[bytes]:
    parquet = require("pyarrow.parquet", extra="data")
    return [cell or b"" for cell in parquet_column(parquet.ParquetFile(path), group, column)]


def parquet_column(file: Any, group: int, column: str) -> list[Any]:
    """Values of a column, or of one field of its structures (`image.bytes`), in a row group of an open file."""
    return file.read_row_group(group, columns=[column]).flatten().column(0).to_pylist()


def tar_index(path: str | os.PathLike) -> dict[str, tuple[int, int]]:
    """Member name -> (offset, size) of the regular files in an uncompressed tar; kept in memory."""
    stat = os.stat(path)
    return _tar_index(os.fspath(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1024)
def _tar_index(path: str, _mtime: int, size: int) -> dict[str, tuple[int, int]]:
    index: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isreg() and not member.issparse():
                    if not 0 <= member.size <= size - member.offset_data:
                        raise tarfile.ReadError(f"{member.name!r} reaches beyond the end of the file")
                    index[member.name.removeprefix("./")] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise RamatchError(
            f"{path}: not a plain tar file ({error}); a compressed shard cannot be read in place: unpack it first"
        ) from error
    return index


def is_tar_name(name: str | os.PathLike) -> bool:
    return os.fspath(name).lower().endswith((".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2"))


def find_tars(folder: Path) -> list[Path]:
    """The tar shards directly in `folder`, in natural order."""
    return sorted((p for p in folder.iterdir() if is_tar_name(p) and p.is_file()), key=natural_key)


class Locator:
    """Finds pictures by the names an annotation file uses, under folders and in the tar shards lying in them.

    roots: folders or tar files, tried in order. A name is tried as it stands; then, if it carries the root of
    another machine (`/data/coco/train/1.jpg`, `C:\\pics\\1.jpg`), without its leading folders one by one; last
    by its bare name among all pictures under the roots, when only one picture has it. A name that leads out of
    the roots is not followed: annotation files come from strangers. Links that lie in a root are its owner's own.
    """

    def __init__(self, roots: Iterable[str | os.PathLike], prefer: str = "") -> None:
        self.roots: list[Path] = []
        self.tars: list[Path] = []
        for root in (Path(os.path.abspath(r)) for r in roots):
            if root.is_dir():
                self.roots.append(root)
                self.tars += find_tars(root)
            elif is_tar_name(root) and root.is_file():
                self.tars.append(root)
            else:
                raise RamatchError(f"no such folder (or tar file) of images: {root}")
        # shards named after the split come first and the others are only indexed when something is missing
        self.tars = sorted(dict.fromkeys(self.tars), key=lambda tar: not _shares_word(tar.name, prefer))
        self._unread = list(self.tars)
        self._members: dict[str, tuple[str, int, int]] = {}
        self._by_name: dict[str, list[str]] | None = None

    def find(self, name: str) -> tuple[ImageSource | None, str]:
        """(source or None, the name it was found by: `name` itself unless that had to be repaired)."""
        # some lists give identifiers only: `000123` for 000123.jpg
        for extension in ("",) if is_image_name(name) else ("", *EXTENSIONS):
            if name and (source := self.exact(name + extension)) is not None:
                return source, name
        parts = [p for p in re.split(r"[\\/]+", name) if p not in ("", ".")]
        for start in range(max(0, len(parts) - MAX_FOLDERS), len(parts)):
            suffix = "/".join(parts[start:])
            if suffix != name and (source := self.exact(suffix)) is not None:
                return source, suffix
        return self._by_bare_name(parts[-1]) if parts else (None, name)

    def exact(self, name: str) -> ImageSource | None:
        """The picture that has exactly this name."""
        for root in self.roots:
            path = os.path.normpath(os.path.join(root, name))  # an absolute name replaces the root
            if path.startswith(os.path.join(root, "")) and os.path.isfile(path):  # never outside: names are strangers'
                return FileImage(path)
        member = self._member(name.removeprefix("./"))
        return FileImage(*member, name) if member else None

    def _member(self, name: str) -> tuple[str, int, int] | None:
        while name not in self._members and self._unread:
            tar = self._unread.pop(0)
            for member, (offset, size) in tar_index(tar).items():
                self._members.setdefault(member, (str(tar), offset, size))
        return self._members.get(name)

    def _by_bare_name(self, bare: str) -> tuple[ImageSource | None, str]:
        if self._by_name is None:
            self._by_name = {}
            on_disk = (
                os.path.relpath(os.path.join(folder, name), root)
                for root in self.roots
                for folder, _, names in os.walk(root)
                for name in names
                if is_image_name(name)
            )
            for name in dict.fromkeys([*filter(is_image_name, self._members), *islice(on_disk, MAX_WALK)]):
                self._by_name.setdefault(os.path.basename(name), []).append(name)
        hits = self._by_name.get(bare, [])
        return (self.exact(hits[0]), hits[0]) if len(hits) == 1 else (None, bare)

    def describe(self) -> str:
        """The places searched, for messages."""
        places = [str(r) for r in self.roots] + [str(t) for t in self.tars]
        return ", ".join(places[:6]) + (f" and {len(places) - 6} more" if len(places) > 6 else "")


def _shares_word(tar: str, split: str) -> bool:
    words = re.split(r"[^a-z]+", tar.lower())
    return any(word and word in words for word in re.split(r"[^a-z]+", split.lower()))
