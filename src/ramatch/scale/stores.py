"""Where files are: a local disk, or a store with an address (s3://, gs://, file://, any that fsspec knows)."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, BinaryIO

from ..errors import RamatchError, require
from ..files import write_atomic

SCHEME = "://"


def is_address(name: str | os.PathLike) -> bool:
    return SCHEME in os.fspath(name)


@lru_cache(maxsize=64)
def open_store(address: str) -> tuple[Any, str]:
    """A pyarrow file system and the path in it; once for each address and process, since a store may be asked for its
    region. Of a local name, its absolute path."""
    stores: Any = require("pyarrow.fs", extra="scale")
    if not is_address(address):
        return stores.LocalFileSystem(), os.path.abspath(address)
    try:
        return stores.FileSystem.from_uri(address)
    except ValueError as error:  # a scheme that pyarrow does not know, or no address at all
        fsspec: Any = require("fsspec", extra="scale")
        try:
            system, path = fsspec.core.url_to_fs(address)
        except (ValueError, ImportError) as other:
            raise RamatchError(f"{address}: no store that can be read ({other or error})") from None
        return stores.PyFileSystem(stores.FSSpecHandler(system)), path
    except OSError as error:
        raise RamatchError(f"{address}: {error}") from error


def place_of(root: str, name: str) -> tuple[Any, str]:
    """The file system and path of a file that is called `name`: below `root`, a folder or an address."""
    store, base = open_store(root)
    return store, base + name.removeprefix(root) if is_address(root) else os.path.join(base, name)


def open_file(root: str, name: str, *, stream: bool = False) -> BinaryIO:
    """To be read from any place, or with `stream` from the start to the end only."""
    store, path = place_of(root, name)
    return store.open_input_stream(path, compression=None) if stream else store.open_input_file(path)


class Folder:
    """A folder on a disk or in a store, whose files appear whole or not at all."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/") or address

    @property
    def local(self) -> bool:
        return not is_address(self.address)

    def _place(self, name: str = "") -> tuple[Any, str]:
        store, base = open_store(self.address)
        return store, f"{base.rstrip('/')}/{name}" if name else base

    def names(self) -> list[str]:
        """Of its files, in no order."""
        fs: Any = require("pyarrow.fs", extra="scale")
        store, path = self._place()
        found = store.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return [info.base_name for info in found if info.is_file]

    def write(self, name: str, content: bytes) -> None:
        store, path = self._place(name)
        if self.local:
            write_atomic(path, lambda temporary: temporary.write_bytes(content))
            return
        store.create_dir(self._place()[1], recursive=True)
        hidden = self._place(f".{name}.{os.urandom(6).hex()}.tmp")[1]
        with store.open_output_stream(hidden) as file:
            file.write(content)
        store.move(hidden, path)

    def open(self, name: str) -> BinaryIO:
        store, path = self._place(name)
        return store.open_input_file(path)

    def clean(self) -> None:
        """Remove what was being written when somebody pulled the plug."""
        store, _ = self._place()
        for name in self.names():
            if name.startswith(".") and name.endswith(".tmp"):
                store.delete_file(self._place(name)[1])

    def remove(self) -> None:
        store, path = self._place()
        fs: Any = require("pyarrow.fs", extra="scale")
        if store.get_file_info(path).type == fs.FileType.Directory:
            store.delete_dir(path)
