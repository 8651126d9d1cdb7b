"""The database beside the vectors: what is known of each file; one writer and many readers."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import RamatchError

DATABASE = "library.sqlite"
FORMAT = 1
# photos: one for each content; `row` counts into the vectors. files: one for each path, relative to the folder that
# holds the library, so that both may move together; `error` says why one could not be read.
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value);
CREATE TABLE photos (id INTEGER PRIMARY KEY, row INTEGER UNIQUE NOT NULL, digest BLOB UNIQUE NOT NULL,
                     crc INTEGER NOT NULL, width INTEGER NOT NULL, height INTEGER NOT NULL, taken REAL);
CREATE TABLE files (path BLOB PRIMARY KEY, photo INTEGER REFERENCES photos, size INTEGER, mtime INTEGER, error TEXT);
CREATE INDEX files_photo ON files (photo);
CREATE TABLE thumbnails (photo INTEGER PRIMARY KEY REFERENCES photos, webp BLOB NOT NULL);
INSERT INTO meta VALUES ('format', 1), ('generation', 0);
"""


def connect(folder: Path, *, create: bool) -> sqlite3.Connection:
    """The database of a library; with `create`, made where there is none."""
    path = folder / DATABASE
    if not create and not path.is_file():
        raise RamatchError(f"{folder} is not a photo library; make one: ramatch index FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    if not path.is_file() and any(folder.iterdir()):
        raise RamatchError(f"{folder} holds other files; a library needs a folder of its own (--library)")
    try:
        database = sqlite3.connect(path, timeout=30, isolation_level=None)
        database.execute("PRAGMA page_size = 1024")  # thumbnails are some 3 KB: larger pages would stay half empty
        database.execute("PRAGMA journal_mode = WAL")
        with transaction(database, write=create):
            if create and not database.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in SCHEMA.split(";"):
                    database.execute(statement)
            found = read_meta(database).get("format")
    except sqlite3.DatabaseError as error:
        raise RamatchError(f"{path} is not the database of a photo library: {error}") from None
    if found != FORMAT:
        raise RamatchError(f"{folder} has format {found}, this version of ramatch reads {FORMAT}; index it anew")
    return database


def read_meta(database: sqlite3.Connection) -> dict[str, Any]:
    return dict(database.execute("SELECT key, value FROM meta"))


@contextlib.contextmanager
def transaction(database: sqlite3.Connection, *, write: bool = True) -> Iterator[None]:
    """All of it or nothing; for readers, one moment in time."""
    database.execute("BEGIN IMMEDIATE" if write else "BEGIN")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.OperationalError):  # SQLite may have rolled back by itself
            database.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Only one process writes, and a full disk is said clearly. The lock is SQLite's on a file of its own, so it ends
    with its process, however that ends; a note beside it says who holds it."""
    note = folder / "writer.txt"
    lock = sqlite3.connect(folder / "writer.lock", timeout=0, isolation_level=None)
    try:
        with contextlib.suppress(sqlite3.OperationalError):
            lock.execute("BEGIN EXCLUSIVE")
        if not lock.in_transaction:
            who = note.read_text(encoding="utf-8").strip() if note.is_file() else "another process"
            raise RamatchError(f"{folder} is being written by {who}; wait for it, or end it")
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        note.write_text(f"process {os.getpid()} on {socket.gethostname()} since {since}\n", encoding="utf-8")
        yield
        note.unlink()
    except (OSError, sqlite3.OperationalError) as error:
        if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT) and "disk is full" not in str(error):
            raise
        advice = "what was indexed before is safe; make room and run the same command again"
        raise RamatchError(f"no room left for {folder}: {advice}") from error
    finally:
        lock.close()
