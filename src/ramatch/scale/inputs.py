"""What is to be tagged, cut into units of work: some images of a folder, a tar shard, a row group of a parquet file.

The cut is a function of the input alone, so that a run that is begun again finds the units that are done.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..data.find import OTHER, find
from ..data.images import is_image_name, natural_key
from ..data.prefetch import chunks
from ..data.sources import is_tar_name
from ..errors import RamatchError, require
from .stores import is_address, open_file, open_store

KINDS = IMAGES, TAR, PARQUET = "images", "tar", "parquet"
PART = 256  # images of a part: 38 MB of pixels at 224 px
READERS = 16  # threads that look into parquet files


@dataclass(frozen=True)
class Unit:
    """Images that are read together, and named in the output as they are here. root: the folder or the address that
    names are found from. group: a row group of a parquet file, first: the number of its first row. count: of its
    images, -1 where that is not known before it is read."""

    kind: str
    root: str
    names: tuple[str, ...]
    count: int = -1
    group: int = -1
    first: int = 0

    @property
    def key(self) -> str:
        """The same for the same content, wherever it is read."""
        told = json.dumps([self.kind, *self.names, self.group], ensure_ascii=True)
        return hashlib.blake2b(told.encode(), digest_size=10).hexdigest()


@dataclass
class Listing:
    """units in order; missing: (name, reason) of what was named and cannot be read; skipped: files of no known kind."""

    units: list[Unit] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def known(self) -> int:
        """Images that are counted before the run."""
        return sum(max(unit.count, 0) for unit in self.units)

    def fingerprint(self) -> str:
        keys = hashlib.blake2b(digest_size=16)
        for unit in self.units:
            keys.update(unit.key.encode())
        return keys.hexdigest()


def list_units(names: Iterable[str | os.PathLike], *, part: int = PART, every: float | None = None) -> Listing:
    """Images, tar shards and parquet files among files, folders, globs and addresses, cut into units of at most `part`
    images. `every`: see `find`."""
    given = list(dict.fromkeys(os.fspath(name) for name in names))
    listing = Listing()
    files: dict[tuple[str, str], list[str]] = {}  # (kind, root) → names
    _add_local([name for name in given if not is_address(name)], every, files, listing)
    for address in filter(is_address, given):
        _add_remote(address, files, listing)
    for (kind, root), found in sorted(files.items(), key=lambda entry: KINDS.index(entry[0][0])):
        if kind == IMAGES:
            listing.units += [Unit(IMAGES, root, tuple(some), len(some)) for some in chunks(found, part)]
        elif kind == TAR:
            listing.units += [Unit(TAR, root, (name,)) for name in found]
        else:
            with ThreadPoolExecutor(READERS) as pool:
                for units in pool.map(lambda name, root=root: _row_groups(root, name), found):
                    listing.units += [unit for unit in units if isinstance(unit, Unit)]
                    listing.missing += [unit for unit in units if not isinstance(unit, Unit)]
    return listing


def kind_of(name: str) -> str | None:
    if os.path.basename(name).startswith("."):
        return None
    if name.lower().endswith(".parquet"):
        return PARQUET
    return TAR if is_tar_name(name) else IMAGES if is_image_name(name) else None


def _add_local(given: list[str], every: float | None, files: dict, listing: Listing) -> None:
    shards, rest = [], []
    for name in given:  # `find` knows images only
        hits = glob.glob(name, recursive=True) if glob.has_magic(name) and not os.path.lexists(name) else [name]
        own = [hit for hit in hits if kind_of(hit) in (TAR, PARQUET) and os.path.isfile(hit)]
        shards += own
        if len(own) < len(hits) or not hits:
            rest.append(name)
    found = find(rest, every=every)
    others = [os.fspath(path) for path in found.skipped.pop(OTHER, [])]
    shards += [name for name in others if kind_of(name)]
    listing.skipped += [name for name in others if not kind_of(name)]
    listing.skipped += [os.fspath(path) for paths in found.skipped.values() for path in paths]
    listing.missing += found.missing
    root = os.getcwd()
    if found.paths:
        files[IMAGES, root] = list(map(os.fspath, found.paths))
    for name in sorted(dict.fromkeys(shards), key=natural_key):
        files.setdefault((str(kind_of(name)), root), []).append(name)


def _add_remote(address: str, files: dict, listing: Listing) -> None:
    fs: Any = require("pyarrow.fs", extra="scale")
    store, base = open_store(address)
    info = store.get_file_info(base)
    if info.type == fs.FileType.NotFound:
        listing.missing.append((address, "no such file or folder"))
        return
    paths = [base]
    if info.type == fs.FileType.Directory:
        found = store.get_file_info(fs.FileSelector(base, recursive=True))
        paths = sorted((entry.path for entry in found if entry.is_file), key=natural_key)
    for path in paths:
        name = address + path[len(base) :]
        inside = any(part.startswith(".") for part in path[len(base) :].split("/"))
        kind = None if inside else kind_of(path)
        if kind is None and path != base:
            listing.skipped.append(name)
        else:
            files.setdefault((kind or IMAGES, address), []).append(name)


def _row_groups(root: str, name: str) -> list[Unit | tuple[str, str]]:
    """A unit for each row group, or what is wrong with the file."""
    parquet: Any = require("pyarrow.parquet", extra="scale")
    try:
        with open_file(root, name) as stream:
            about = parquet.ParquetFile(stream).metadata
            sizes = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
    except (OSError, ValueError) as error:
        return [(name, f"not a readable parquet file ({error})")]
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    return [Unit(PARQUET, root, (name,), n, g, s) for g, (n, s) in enumerate(zip(sizes, starts, strict=True))]


def nothing(listing: Listing, given: Iterable[object]) -> RamatchError:
    """Why there is nothing to do."""
    if listing.missing:
        return RamatchError("; ".join(f"{reason}: {name}" for name, reason in listing.missing[:5]))
    return RamatchError(f"no images, tar shards or parquet files found in {', '.join(map(str, given))}")


def image_column(file: Any, where: str) -> str:
    """The column with encoded images in an open parquet file, as `read_row_group` takes it."""
    types: Any = require("pyarrow", extra="scale").types
    for entry in file.schema_arrow:
        if types.is_struct(entry.type) and entry.type.get_field_index("bytes") >= 0:
            return f"{entry.name}.bytes"
        if types.is_binary(entry.type) or types.is_large_binary(entry.type):
            return entry.name
    raise RamatchError(
        f"{where}: no column of images (binary, or bytes and path); it has {', '.join(file.schema_arrow.names)}"
    )


def images_of(unit: Unit) -> Iterator[tuple[str, Any]]:
    """(name, encoded image or what to read it from) of each image, in order, as they are read. What goes wrong with a
    shard is an exception in the place of the image."""
    if unit.kind == IMAGES:
        for name in unit.names:
            yield name, os.path.join(unit.root, name) if not is_address(unit.root) else Remote(unit.root, name)
        return
    try:
        yield from (_members if unit.kind == TAR else _rows)(unit)
    except Exception as error:  # a broken shard makes its parsers raise many kinds
        yield unit.names[0], RamatchError(f"the shard cannot be read on from here: {error or type(error).__name__}")


@dataclass(frozen=True)
class Remote:
    """An image in a store."""

    root: str
    name: str

    def read(self) -> bytes:
        with open_file(self.root, self.name) as stream:
            return stream.read()


def _members(unit: Unit) -> Iterator[tuple[str, bytes]]:
    """Read from the start to the end, compressed or not."""
    import tarfile

    [name] = unit.names
    with open_file(unit.root, name, stream=True) as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            if member.isreg() and is_image_name(member.name) and (content := archive.extractfile(member)) is not None:
                yield f"{name}:{member.name.removeprefix('./')}", content.read()


def _rows(unit: Unit) -> Iterator[tuple[str, bytes]]:
    parquet: Any = require("pyarrow.parquet", extra="scale")
    [name] = unit.names
    with open_file(unit.root, name) as stream:
        file = parquet.ParquetFile(stream)
        column, row = image_column(file, name), unit.first
        for batch in file.iter_batches(batch_size=64, row_groups=[unit.group], columns=[column]):
            values = batch.column(0)
            for cell in (values.field("bytes") if "." in column else values).to_pylist():
                yield f"{name}:row {row}", cell or b""
                row += 1
