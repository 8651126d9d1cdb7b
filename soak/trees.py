"""Folders that are awkward to walk: links, pipes, modes, names and depth. Entries are numbered n000000."""

from __future__ import annotations

import os
from pathlib import Path

from soak.pictures import encode, noise

PICTURE = encode(noise(), "PNG")


def links(folder: Path) -> int:
    """Good, dangling and circular links, pipes, sockets' cousins, modes. Number of entries with a picture's name."""
    (folder / "n000000.png").write_bytes(PICTURE)
    (folder / "n000001-link.png").symlink_to("n000000.png")
    (folder / "n000002-dangling.png").symlink_to("nowhere.png")
    (folder / "n000003-loop.png").symlink_to("n000003-loop.png")
    os.mkfifo(folder / "n000004-pipe.png")
    (folder / "n000005-mode.png").write_bytes(PICTURE)
    (folder / "n000005-mode.png").chmod(0)
    (folder / "n000006-empty.png").write_bytes(b"")
    (folder / "n000007-device.png").symlink_to("/dev/zero")
    return 8


def loops(folder: Path) -> int:
    """Folders that link to themselves and to each other, and one that may not be entered, which must be named."""
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / f"n00000{'ab'.index(name)}.png").write_bytes(PICTURE)
    (folder / "a" / "up").symlink_to("..")
    (folder / "a" / "b").symlink_to("../b")
    (folder / "b" / "a").symlink_to("../a")
    (folder / "n000002-locked").mkdir()
    (folder / "n000002-locked" / "inside.png").write_bytes(PICTURE)
    (folder / "n000002-locked").chmod(0)
    return 3


def names(folder: Path) -> int:
    """Names with bytes that are no UTF-8, control and escape characters, quotes, 255 bytes, other scripts."""
    odd = [
        b"caf\xe9\xff",
        b"\x1b[31mred\x1b[0m",
        b"\x1b]0;title\x07",
        b"new\nline",
        b"tab\tbell\x07",
        b"cr\rback\x08",
        b"quote\"'`$(id)",
        b"--labels",
        b"a" * 240,
        "ünï漢字🐕".encode(),
        b"\xed\xa0\x80",
        b"percent%s%n{0}",
        b"*[a]?",
        "\u202egnp.".encode(),
        b"<b>bold&amp;",
        b" spaces ",
        b"\xc2\x9b31m",
    ]
    for i, name in enumerate(odd):
        with open(os.path.join(os.fsencode(folder), b"n%06d-" % i + name + b".png"), "wb") as file:
            file.write(PICTURE if i % 2 == 0 else b"broken")
    return len(odd)


def deep(folder: Path, depth: int = 1000) -> int:
    """One picture at the top and one `depth` folders down."""
    (folder / "n000000.png").write_bytes(PICTURE)
    bottom = str(folder)
    for _ in range(depth):  # one by one: pathlib and os would recurse
        bottom += "/d"
        os.mkdir(bottom)
    Path(bottom, "n000001.png").write_bytes(PICTURE)
    return 2


def make_removable(folder: Path) -> None:
    """Give back the modes that were taken, so that the folder can be deleted."""
    for name in ("n000002-locked", "n000005-mode.png"):
        if (folder / name).exists():
            (folder / name).chmod(0o755)
