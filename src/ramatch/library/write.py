"""Tags written to where other programs find them: a text file or an XMP sidecar beside an image, or the image itself.

Ours are noted apart from those made by hand, so that a later run replaces its own alone, and all of them can be taken
away again. See docs/tagging.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from .. import __version__
from ..data.images import EXTENSIONS, embedded_metadata
from ..data.raw import is_raw_name
from ..errors import RamatchError
from ..files import expect, parse_json, write_atomic
from .exiftool import ExifTool
from .keywords import Keyword, Merged, merge
from .xmp import EMPTY, Name, Packet

SUBJECT = Name("dc", "http://purl.org/dc/elements/1.1/", "subject")
HIERARCHY = Name("lr", "http://ns.adobe.com/lightroom/1.0/", "hierarchicalSubject")
SLASHED = (  # other programs' trees of keywords: only where an image has them already
    Name("digiKam", "http://www.digikam.org/ns/1.0/", "TagsList", ordered=True),
    Name("MicrosoftPhoto", "http://ns.microsoft.com/photo/1.0/", "LastKeywordXMP"),
)
OURS = "ramatch:ns:tags/"
TAGS, REJECTED, MADE = (Name("ramatch", OURS, name) for name in ("tags", "rejected", "made"))

DIGESTED = (".jpg", ".jpeg")
WITH_IPTC = (*DIGESTED, ".tif", ".tiff")
WITH_XMP = (*WITH_IPTC, ".png", ".webp", ".gif", ".heic", ".heif", ".avif")
BARE_IPTC = {"CodedCharacterSet", "EnvelopeRecordVersion", "ApplicationRecordVersion", "SourceFile"}
SEPARATOR = re.compile(r"\s*[,\n]\s*")
RECORD = ".ramatch-tags.jsonl"  # beside text files of tags: which of them are ours
MAX_TEXT = 1 << 20
CHANGED = "changed by another program just now; left as that wrote it"


@dataclass(frozen=True)
class Change:
    """What was, or with `dry_run` would be, done to the tags of an image. target: the file that has them."""

    image: Path
    target: Path
    added: tuple[str, ...]
    removed: tuple[str, ...]
    by_hand: tuple[str, ...]
    written: bool


class TagWriter(Protocol):
    def update(self, image: Path, found: Sequence[Keyword] | None) -> Change:
        """Have these tags of ours at an image, instead of those that an earlier run has left; with None, no more."""

    def close(self) -> None: ...


def _change(image: Path, target: Path, merged: Merged, written: bool) -> Change:
    return Change(image, target, merged.added, merged.removed, merged.by_hand, written)


def _retag(packet: Packet, found: Sequence[Keyword] | None, made: str, others: Sequence[str]) -> tuple[bytes, Merged]:
    """A packet with tags changed, the same if there is nothing to change. others: tags that stand outside of it."""
    before = [Keyword.parse(text) for text in packet.words(TAGS)]
    forms: dict[Name, Callable[[Keyword], str]] = {SUBJECT: lambda k: k.label, HIERARCHY: lambda k: "|".join(k.path)}
    forms |= {name: _slashed for name in SLASHED if packet.has(name)}
    trees = {name: set(packet.words(name)) - {form(k) for k in before} for name, form in forms.items()}
    elsewhere = [_leaf(name, path) for name, paths in trees.items() for path in paths]
    merged = merge(packet.words(SUBJECT), before, packet.words(REJECTED), found, [*others, *elsewhere])
    notes, rejected = [str(keyword) for keyword in merged.after], list(merged.rejected)
    same = packet.words(TAGS) == notes and packet.words(REJECTED) == rejected
    if same and {k.label for k in merged.after} <= set(packet.words(SUBJECT)):
        return packet.content, merged
    changes = {name: ([form(k) for k in before], [form(k) for k in merged.after]) for name, form in forms.items()}
    changes[TAGS] = (packet.words(TAGS), notes)
    changes[REJECTED] = (packet.words(REJECTED), rejected)
    changes[MADE] = (packet.words(MADE), [made] if notes or rejected else [])
    return packet.changed(changes), merged


def _leaf(name: Name, word: str) -> str:
    """The tag itself, of a word in one of the lists."""
    return word if name == SUBJECT else word.rpartition("/" if name in SLASHED else "|")[2]


def _slashed(keyword: Keyword) -> str:
    return "/".join(part.replace("/", "-") for part in keyword.path)


class Sidecars:
    """XMP files beside images: `photo.jpg.xmp`, or `photo.xmp` where there is one or the image is a RAW file."""

    def __init__(self, made: str, *, dry_run: bool = False) -> None:
        self.made, self.dry_run = made, dry_run

    def update(self, image: Path, found: Sequence[Keyword] | None) -> Change:
        target = sidecar_of(image)
        before = target.read_bytes() if target.exists() else None
        packet = Packet(_new_sidecar(image) if before is None else before)
        content, merged = _retag(packet, found, self.made, ())
        written = content != packet.content
        if written and not self.dry_run:
            needless = not merged.after and content == _new_sidecar(image)
            _replace(target, before, None if needless else content)
        return _change(image, target, merged, written)

    def close(self) -> None:
        pass


def _new_sidecar(image: Path) -> bytes:
    """A packet with the tags that are in the image itself, but ours: many programs look at the sidecar instead."""
    content, keywords = embedded_metadata(image)
    try:
        inside = Packet(content or EMPTY)
        ours = {Keyword.parse(text).label for text in inside.words(TAGS)}
    except RamatchError:  # it shall not keep an image from having a sidecar
        inside, ours = Packet(), set()
    lists = {name: inside.words(name) for name in (SUBJECT, HIERARCHY, *SLASHED)}
    lists[SUBJECT] = list(dict.fromkeys([*lists[SUBJECT], *map(_decoded, keywords)]))
    kept = {name: [word for word in words if _leaf(name, word) not in ours] for name, words in lists.items()}
    return Packet().changed({name: ((), words) for name, words in kept.items()})


def _decoded(keyword: bytes) -> str:
    try:
        return keyword.decode()
    except UnicodeDecodeError:
        return keyword.decode("latin-1")


def sidecar_of(image: Path) -> Path:
    """The XMP file that an image has or would get. `photo.xmp` beside photo.nef and photo.jpg is the RAW file's."""
    full, short = image.with_name(f"{image.name}.xmp"), image.with_suffix(".xmp")
    raw = is_raw_name(image)
    for path in (full, short):
        for there in (path, path.with_suffix(".XMP")):
            if there.exists() and (path == full or raw or not _siblings(image)):
                return there
    return short if raw and not _siblings(image, raw_only=True) else full


def _siblings(image: Path, raw_only: bool = False) -> list[str]:
    """Other images beside this one that differ in their ending alone."""
    endings = {e for ending in EXTENSIONS for e in (ending, ending.upper())} - {image.suffix}
    there = [e for e in endings if image.with_suffix(e).exists() and (is_raw_name(e) or not raw_only)]
    return sorted(e for e in there if not image.with_suffix(e).samefile(image))  # where case does not count


def _replace(target: Path, before: bytes | None, content: bytes | None) -> None:
    """Give a file other content, or remove it, unless somebody else has changed it meanwhile."""
    now = target.read_bytes() if target.exists() else None
    if now != before:
        raise RamatchError(f"{target.name}: {CHANGED}")
    if content is None:
        target.unlink()
        return
    mode = None if before is None else target.stat().st_mode
    write_atomic(target, lambda temporary: temporary.write_bytes(content))
    if mode is not None:
        os.chmod(target, mode)


class Images:
    """Tags in the images themselves, through exiftool: XMP, and IPTC keywords in JPEG and TIFF."""

    def __init__(self, made: str, *, dry_run: bool = False) -> None:
        self.made, self.dry_run, self.exiftool = made, dry_run, ExifTool()

    def update(self, image: Path, found: Sequence[Keyword] | None) -> Change:
        if image.suffix.lower() not in WITH_XMP:
            raise RamatchError(f"no tags are written into {image.suffix or 'such'} files; write sidecars (xmp)")
        path = Path(os.path.realpath(image))
        stamp = _stamp(path)
        about = self.exiftool.read(path, "IPTC:all", "XMP-xmpNote:HasExtendedXMP")
        if about.pop("HasExtendedXMP", None):
            raise RamatchError("its XMP lies in several parts; write sidecars (xmp)")
        block = self.exiftool.block(path)
        packet, iptc = Packet(block or EMPTY), about.get("Keywords", [])
        known = list(map(str, iptc if isinstance(iptc, list) else [iptc]))
        content, merged = _retag(packet, found, self.made, known)
        written = content != packet.content
        if written and not self.dry_run:
            if _stamp(path) != stamp:
                raise RamatchError(CHANGED)
            changes = _iptc(path, about, known, merged) if path.suffix.lower() in WITH_IPTC else []
            self.exiftool.write(path, changes, b"" if Packet(content).blank else content)
        return _change(image, image, merged, written)

    def close(self) -> None:
        self.exiftool.close()


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _iptc(path: Path, about: dict[str, Any], known: Sequence[str], merged: Merged) -> list[str]:
    """Arguments that change the keywords. In a JPEG, a digest tells readers that XMP and IPTC agree."""
    out = [k.label for k in merged.before if k.label in known]
    left = [word for word in known if word not in out]
    into = [k.label for k in merged.after]
    others = about.keys() - {"Keywords"} - BARE_IPTC
    digest = path.suffix.lower() in DIGESTED
    if not (left or into or others):
        return ["-IPTC:all=", *(["-IPTCDigest="] if digest else [])] if out else []
    fresh = ["-IPTC:CodedCharacterSet=UTF8"] if not known and not others else []
    changes = [f"-IPTC:Keywords-={word}" for word in out] + [f"-IPTC:Keywords+={word}" for word in into]
    return [*fresh, *changes, *(["-IPTCDigest=new"] if digest else [])]


class TextFiles:
    """`photo.txt` with tags between commas. As a text has no place for notes, a hidden file in each folder says which
    tags are ours."""

    def __init__(self, made: str, *, dry_run: bool = False) -> None:
        self.made, self.dry_run = made, dry_run
        self._folder: Path | None = None
        self._notes: dict[str, dict[str, Any]] = {}
        self._cut: int | None = None  # where the file of notes ends, if a run that was killed left part of a line

    def update(self, image: Path, found: Sequence[Keyword] | None) -> Change:
        if siblings := _siblings(image):
            other = image.with_suffix(siblings[0]).name
            raise RamatchError(f"{other} would have the same text file; write sidecars (xmp)")
        target = image.with_suffix(".txt")
        before = target.read_bytes() if target.exists() else None
        text = _text(target, before)
        there = {word.strip() for word in SEPARATOR.split(text) if word.strip()}
        note = self._noted(image.parent).get(target.name, {})
        ours = [Keyword.parse(line) for line in note.get("tags", [])]
        if "unfinished" in note:  # stopped while it was written: what is missing was never there
            ours = [keyword for keyword in ours if keyword.label in there]
        merged = merge(there, ours, note.get("rejected", []), found)
        new = {"tags": [str(k) for k in merged.after], "rejected": list(merged.rejected)}
        written = "unfinished" in note or new != {name: note.get(name, []) for name in new}
        if written and not self.dry_run:
            all_of_ours = [*dict.fromkeys([*map(str, ours), *new["tags"]])]
            self._note(image.parent, target.name, {**new, "tags": all_of_ours, "unfinished": True})
            own = ", ".join(k.label for k in merged.after)
            _replace(target, before, _with_tags(text, {k.label for k in ours}, own).encode() or None)
            self._note(image.parent, target.name, new)
        return _change(image, target, merged, written)

    def close(self) -> None:
        pass

    def _noted(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Notes of a folder; of several for a file the last one counts."""
        if folder != self._folder:
            self._folder, self._notes, path = folder, {}, folder / RECORD
            content = path.read_bytes() if path.exists() else b""
            end = content.rfind(b"\n") + 1
            self._cut = end if end < len(content) else None
            for line in content[:end].splitlines():
                entry = expect(parse_json(line.decode("utf-8", "replace"), path), dict, path)
                self._notes[expect(entry.get("file"), str, path)] = entry
        return self._notes

    def _note(self, folder: Path, name: str, note: dict[str, Any]) -> None:
        entry = {"file": name, **note, "made": self.made}
        with (folder / RECORD).open("ab") as file:
            if self._cut is not None:
                file.truncate(self._cut)
            file.write(json.dumps(entry).encode() + b"\n")
        self._notes[name], self._cut = note, None


def _with_tags(text: str, out: Container[str], into: str) -> str:
    """A text of tags without some and with others at its end; the rest of it stays as it is."""
    body = text.rstrip("\n")
    end, (word, *rest) = text[len(body) :], re.split(f"({SEPARATOR.pattern})", body)
    kept = "" if word.strip() in out else word
    for separator, word in zip(rest[::2], rest[1::2], strict=True):
        if word.strip() not in out:
            kept += separator + word if kept else word
    return ", ".join(part for part in (kept, into) if part.strip()) + end


def _text(path: Path, content: bytes | None) -> str:
    if content is not None and len(content) > MAX_TEXT:
        raise RamatchError(f"{path.name} is too long for a file of tags")
    try:
        return (content or b"").decode()
    except UnicodeDecodeError:
        raise RamatchError(f"{path.name} is not text in UTF-8") from None


WRITERS: dict[str, Callable[..., TagWriter]] = {"txt": TextFiles, "xmp": Sidecars, "exif": Images}


@contextlib.contextmanager
def open_writer(kind: str, made: str, *, dry_run: bool = False) -> Iterator[TagWriter]:
    """A writer of `WRITERS`. made: what is noted beside our tags (see `made_by`)."""
    writer = WRITERS[kind](made, dry_run=dry_run)
    try:
        yield writer
    finally:
        writer.close()


def made_by(model: str) -> str:
    """Date, program and model."""
    return f"{datetime.now(timezone.utc).isoformat(timespec='seconds')} ramatch {__version__} {model}".strip()
