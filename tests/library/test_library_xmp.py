"""XMP packets: words go in and out, and every other byte stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramatch.errors import RamatchError
from ramatch.library.write import HIERARCHY, SLASHED, SUBJECT
from ramatch.library.xmp import EMPTY, Packet

HEAD = '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
DC, LR = SUBJECT.space, HIERARCHY.space
LIGHTROOM = f"""<x:xmpmeta xmlns:x="adobe:ns:meta/" x:xmptk="Adobe XMP Core 7.0">
 {HEAD}
  <rdf:Description rdf:about=""
    xmlns:xmp="http://ns.adobe.com/xap/1.0/"
    xmlns:dc="{DC}"
    xmlns:crs="http://ns.adobe.com/camera-raw-settings/1.0/"
   xmp:Rating="4"
   crs:Note="a &gt; b &#xA; &quot;c&quot;">
   <!-- a comment -->
   <dc:subject>
    <rdf:Bag>
     <rdf:li>Rex &amp; me</rdf:li>
     <rdf:li>dog</rdf:li>
    </rdf:Bag>
   </dc:subject>
   <dc:title><rdf:Alt><rdf:li xml:lang="x-default">dog</rdf:li></rdf:Alt></dc:title>
  </rdf:Description>
 </rdf:RDF>
</x:xmpmeta>
""".encode()
ATTRIBUTES_ONLY = f"""{HEAD}<rdf:Description rdf:about='' xmlns:xmp='http://ns.adobe.com/xap/1.0/' xmp:Label='a>b'/>
</rdf:RDF>""".encode()
OTHER_PREFIX = f"""<R:RDF xmlns:R="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:d="{DC}">
<R:Description R:about=""><d:subject><R:Bag/></d:subject></R:Description></R:RDF>""".encode()
ONE_LINE = f"""{HEAD}<rdf:Description xmlns:dc="{DC}"><dc:subject><rdf:Bag><rdf:li>a</rdf:li></rdf:Bag></dc:subject>
</rdf:Description></rdf:RDF>""".encode()
WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1), unique=True)


def test_words_of_a_list() -> None:
    packet = Packet(LIGHTROOM)
    assert packet.words(SUBJECT) == ["Rex & me", "dog"]
    assert packet.words(HIERARCHY) == []
    assert Packet(EMPTY).words(SUBJECT) == []


def test_only_what_is_asked_for_changes() -> None:
    changed = Packet(LIGHTROOM).changed({SUBJECT: (["dog"], ["cat <3"]), HIERARCHY: ((), ["animal|cat"])})
    packet = Packet(changed)
    assert (packet.words(SUBJECT), packet.words(HIERARCHY)) == (["Rex & me", "cat <3"], ["animal|cat"])
    before, after = LIGHTROOM.decode().splitlines(), changed.decode().splitlines()
    assert [line for line in before if line not in after] == ["     <rdf:li>dog</rdf:li>"]
    restored = packet.changed({SUBJECT: (["cat <3"], ["dog"]), HIERARCHY: (["animal|cat"], ())})
    assert restored == LIGHTROOM


@pytest.mark.parametrize("content", [EMPTY, LIGHTROOM, ONE_LINE, LIGHTROOM.replace(b"\n", b"\r\n")], ids=len)
@given(words=WORDS)
def test_what_is_put_in_can_be_taken_out_without_a_trace(content: bytes, words: list[str]) -> None:
    there = Packet(content).words(SUBJECT)
    words = [word for word in words if word not in there]
    changed = Packet(Packet(content).changed({SUBJECT: ((), words), HIERARCHY: ((), words)}))
    assert changed.words(SUBJECT) == [*there, *words]
    assert changed.words(HIERARCHY) == words
    assert changed.changed({SUBJECT: (words, ()), HIERARCHY: (words, ())}) == content


def test_an_empty_tag_is_opened() -> None:
    changed = Packet(ATTRIBUTES_ONLY).changed({SUBJECT: ((), ["dog"])})
    assert Packet(changed).words(SUBJECT) == ["dog"]
    assert b"xmp:Label='a>b'>" in changed
    gone = Packet(changed).changed({SUBJECT: (["dog"], ())})
    assert b"subject" not in gone
    assert b"xmp:Label='a>b'" in gone


def test_a_description_with_a_single_empty_property_is_not_empty() -> None:
    content = f'{HEAD}<rdf:Description><a:b xmlns:a="c:"/></rdf:Description></rdf:RDF>'.encode()
    changed = Packet(content).changed({SUBJECT: ((), ["dog"])})
    assert Packet(changed).words(SUBJECT) == ["dog"]
    assert b'<a:b xmlns:a="c:"/></rdf:Description>' in changed


def test_an_empty_list_under_another_prefix() -> None:
    changed = Packet(OTHER_PREFIX).changed({SUBJECT: ((), ["dog"])})
    assert Packet(changed).words(SUBJECT) == ["dog"]
    more = Packet(changed).changed({SUBJECT: ((), ["cat"])})
    assert Packet(more).words(SUBJECT) == ["dog", "cat"]
    filled = OTHER_PREFIX.replace(b"<R:Bag/>", b"<R:Bag><R:li>a</R:li></R:Bag>")
    assert b"<R:li>dog</R:li>" in Packet(filled).changed({SUBJECT: ((), ["dog"])})


def test_a_tree_whose_order_counts() -> None:
    assert b"<rdf:Seq>" in Packet().changed({SLASHED[0]: ((), ["animal/dog"])})


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_other_encodings_are_kept(codec: str) -> None:
    content = LIGHTROOM.decode().encode(codec)
    changed = Packet(content).changed({SUBJECT: ((), ["größe"])})
    assert changed.decode(codec).startswith("<x:xmpmeta")
    assert changed[:2] == content[:2]
    assert Packet(changed).words(SUBJECT)[-1] == "größe"


def test_zeros_after_a_packet_in_an_image() -> None:
    assert Packet(LIGHTROOM + b"\0\0").words(SUBJECT) == ["Rex & me", "dog"]


LAUGHS = b'<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]>'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LAUGHS + LIGHTROOM, "document type"),
        (LIGHTROOM[:300], "cannot be read"),
        (b"", "cannot be read"),
        (b"\xff\xff\xff", "no text"),
        (b"<a/>", "without an rdf:Description"),
        (f"{HEAD}</rdf:RDF>".encode(), "without an rdf:Description"),
    ],
)
def test_what_is_no_packet(content: bytes, message: str) -> None:
    with pytest.raises(RamatchError, match=message):
        Packet(content)


@pytest.mark.parametrize(
    "inner",
    [
        f'<rdf:Description xmlns:dc="{DC}" dc:subject="dog"/>',
        f'<rdf:Description xmlns:dc="{DC}"><dc:subject>dog</dc:subject></rdf:Description>',
    ],
)
def test_a_subject_that_is_no_list_is_left_alone(inner: str) -> None:
    with pytest.raises(RamatchError, match="dc:subject is no list"):
        Packet(f"{HEAD}{inner}</rdf:RDF>".encode()).changed({SUBJECT: ((), ["cat"])})


@given(st.binary(max_size=60), st.integers(0, len(LIGHTROOM)))
def test_damage_never_escapes_as_another_error(noise: bytes, at: int) -> None:
    try:
        packet = Packet(LIGHTROOM[:at] + noise + LIGHTROOM[at + 7 :])
        changed = packet.changed({SUBJECT: ((), ["kite"])})
    except RamatchError:
        return
    assert "kite" in Packet(changed).words(SUBJECT)
