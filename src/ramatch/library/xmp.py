"""Lists of words in XMP packets, changed in place: every byte that is not ours stays as it was.

A packet is RDF in XML: `rdf:Description` elements whose children are properties, of which a list is one with an
`rdf:Bag` or `rdf:Seq` of `rdf:li`. Items are cut out and put in where they stand, instead of writing the whole packet
anew from what was understood of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.parsers import expat
from xml.sax.saxutils import escape

from ..errors import RamatchError

RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
MAX_BYTES = 1 << 26
TAG = re.compile(rb"""<[^\s/>]+(?:\s+[^\s=/>]+\s*=\s*(?:"[^"]*"|'[^']*'))*\s*(?P<empty>/?)>""")
INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # no XML can hold these
EMPTY = b"""<?xpacket begin="\xef\xbb\xbf" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/" x:xmptk="ramatch">
 <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
  <rdf:Description rdf:about="">
  </rdf:Description>
 </rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>
"""


class Name(NamedTuple):
    """A property: the prefix that is usual for it, its namespace, its own name, and whether its order counts."""

    prefix: str
    space: str
    local: str
    ordered: bool = False


Span = tuple[int, int]


@dataclass
class _List:
    """Where a property and what is in it stand, in bytes. prefix: of RDF's own names there; end: of the Bag's or Seq's
    content, None where there is none of them, -1 where it is an empty tag."""

    span: Span
    prefix: bytes = b"rdf:"
    end: int | None = None
    items: list[tuple[Span, str]] = field(default_factory=list)


class Packet:
    """A packet and where its lists are, as Python's expat finds them; its limits hold off small files that grow."""

    def __init__(self, content: bytes = EMPTY) -> None:
        self.content, self.codec = _as_utf8(content)
        self.descriptions: list[tuple[Span, bool]] = []  # what is between the tags; of an empty tag, the tag
        self.lists: dict[tuple[str, str], _List] = {}
        self.attributes: set[tuple[str, str]] = set()  # properties too, of a single value
        self._open: list[tuple[str, str, int]] = []  # elements from rdf:RDF on: namespace, name, place
        self._text: list[str] = []
        self._array = _List((0, 0))
        self._parser = expat.ParserCreate("UTF-8", " ")
        try:
            self._parse()
        except expat.ExpatError as error:
            raise RamatchError(f"XMP that cannot be read ({error})") from None
        if not self.descriptions:
            raise RamatchError("XMP without an rdf:Description")

    def _parse(self) -> None:
        parser = self._parser
        parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
        parser.CharacterDataHandler = self._text.append
        parser.StartDoctypeDeclHandler = self._refuse
        parser.Parse(self.content, True)

    def _refuse(self, *_: object) -> None:
        raise RamatchError("XMP with a document type, which XMP does not have")

    def _start(self, full: str, attributes: dict[str, str]) -> None:
        space, name = _split(full)
        if self._open or (space, name) == (RDF, "RDF"):
            self._open.append((space, name, self._parser.CurrentByteIndex))
            if len(self._open) == 2:
                self.attributes |= {key for key in map(_split, attributes) if key[0] not in ("", RDF)}
        self._text.clear()

    def _end(self, full: str) -> None:
        if not self._open:
            return
        space, name, start = self._open.pop()
        opened = TAG.match(self.content, start)
        if opened is None:
            raise RamatchError("XMP with a tag that cannot be read")
        closing = -1 if opened["empty"] else self._parser.CurrentByteIndex
        end = opened.end() if closing < 0 else self.content.index(b">", closing) + 1
        depth, is_rdf = len(self._open), space == RDF
        if depth == 1 and is_rdf and name == "Description":
            self.descriptions.append(((start, end), True) if closing < 0 else ((opened.end(), closing), False))
        elif depth == 2:
            self._array.span, self.lists[space, name] = (start, end), self._array
            self._array = _List((0, 0))
        elif depth == 3 and is_rdf and name in ("Bag", "Seq"):
            self._array.end, self._array.prefix = closing, opened[0][1 : opened[0].index(name.encode())]
        elif depth == 4 and is_rdf and name == "li":
            self._array.items.append(((start, end), "".join(self._text).strip()))
        if depth != 4:
            self._text.clear()

    def words(self, name: Name) -> list[str]:
        """Items of a list; none if there is no such list."""
        found = self.lists.get(name[1:3])
        return [text for _, text in found.items] if found else []

    def has(self, name: Name) -> bool:
        return name[1:3] in self.lists

    @property
    def blank(self) -> bool:
        """A packet of our own with nothing in it."""
        return not self.attributes and not self.lists and b'x:xmptk="ramatch"' in self.content

    def changed(self, changes: Mapping[Name, tuple[Iterable[str], Sequence[str]]]) -> bytes:
        """The packet with these words taken out of its lists and those put in: `{name: (out, in)}`. A list that this
        leaves empty goes too: nothing remains of what was put in."""
        edits: list[tuple[int, int, bytes]] = []
        fresh: list[bytes] = []
        for name, (out, into) in changes.items():
            found, gone = self.lists.get(name[1:3]), set(out)
            if name[1:3] in self.attributes or (found and found.end is None):
                raise RamatchError(f"XMP whose {name.prefix}:{name.local} is no list")
            if found is None:
                fresh += [_property(name, into)] if into else []
                continue
            lines = [_item(word, found.prefix) for word in into]
            cut = [span for span, text in found.items if text in gone]
            if not lines and cut and len(cut) == len(found.items):
                edits.append((*self._with_space(found.span), b""))
                continue
            edits += [(*self._with_space(span), b"") for span in cut]
            if lines and found.end == -1:
                edits.append((*found.span, _property(name, into).strip()))
            elif lines:
                at = found.items[-1][0][1] if found.items else found.end or 0
                edits.append((at, at, b"".join(lines)))
        if fresh:
            edits.append(self._new_properties(b"".join(fresh)))
        content = self.content
        for start, end, text in sorted(edits, reverse=True):
            content = content[:start] + text + content[end:]
        return content if self.codec == "utf-8" else content.decode().encode(self.codec)

    def _with_space(self, span: Span) -> Span:
        """A span and the line break and indentation before it."""
        before = self.content[: span[0]]
        bare = before.rstrip(b" \t")
        start = len(bare) - 1 - bare.endswith(b"\r\n") if bare.endswith(b"\n") else span[0]
        return start, span[1]

    def _new_properties(self, text: bytes) -> tuple[int, int, bytes]:
        (start, end), empty = self.descriptions[0]
        if not empty:
            return start, start, text
        tag = self.content[start:end]
        name = tag[1:].split(None, 1)[0].rstrip(b"/>")
        return start, end, tag[: tag.rindex(b"/")] + b">" + text + b"\n  </" + name + b">"


def _split(name: str) -> tuple[str, str]:
    space, _, local = name.rpartition(" ")
    return space, local


def _as_utf8(content: bytes) -> tuple[bytes, str]:
    """A packet in UTF-8 and the encoding it was in. Packets in images may be followed by zeros."""
    if len(content) > MAX_BYTES:
        raise RamatchError(f"XMP of more than {MAX_BYTES >> 20} MB")
    start = content.lstrip(b"\xef\xbb\xbf")[:2]
    codec = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"<\0": "utf-16-le", b"\0<": "utf-16-be"}.get(start, "utf-8")
    try:
        return content.decode(codec).rstrip("\0").encode(), codec
    except UnicodeDecodeError as error:
        raise RamatchError(f"XMP that is no text ({error.reason})") from None


def _property(name: Name, words: Iterable[str]) -> bytes:
    """With its namespaces, so that it may stand in any packet."""
    array = "rdf:Seq" if name.ordered else "rdf:Bag"
    head = f'\n   <{name.prefix}:{name.local} xmlns:{name.prefix}="{name.space}" xmlns:rdf="{RDF}">\n    <{array}>'
    tail = f"\n    </{array}>\n   </{name.prefix}:{name.local}>"
    return b"".join([head.encode(), *(_item(word) for word in words), tail.encode()])


def _item(word: str, prefix: bytes = b"rdf:") -> bytes:
    return b"\n     <%sli>%s</%sli>" % (prefix, escape(INVALID.sub("", word)).encode(), prefix)
