"""Tags at images: ours are replaced and taken away, those made by hand stay, nothing else changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ramatch.errors import RamatchError
from ramatch.library import Keyword, keywords_of, open_writer
from ramatch.library import write as module
from ramatch.library.keywords import merge
from ramatch.library.write import HIERARCHY, SUBJECT, TAGS, sidecar_of
from ramatch.library.xmp import Packet
from ramatch.prediction import Prediction

DOG, CAT, SIZE = Keyword(("animal", "dog"), 0.93), Keyword(("animal", "cat"), 0.71), Keyword(("größe",), 0.8)
HAS_EXIFTOOL = shutil.which("exiftool") is not None
needs_exiftool = pytest.mark.skipif(not HAS_EXIFTOOL, reason="needs exiftool")
KINDS = ["txt", "xmp", pytest.param("exif", marks=needs_exiftool)]


def noise_picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8))


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    noise_picture().save(tmp_path / "photo.jpg")
    return tmp_path / "photo.jpg"


def update(kind: str, photo: Path, *found: Keyword, remove: bool = False, **options: Any) -> module.Change:
    with open_writer(kind, "2026-11-19 ramatch tiny", **options) as writer:
        return writer.update(photo, None if remove else found)


def exiftool(path: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(["exiftool", "-j", *arguments, path], capture_output=True, check=True)
    found = json.loads(done.stdout)[0]
    del found["SourceFile"]
    return found


def words(kind: str, photo: Path) -> list[str]:
    """Tags that another program would see."""
    if kind == "txt":
        path = photo.with_suffix(".txt")
        return [word for word in path.read_text().split(", ") if word] if path.exists() else []
    path = photo if kind == "exif" else sidecar_of(photo)
    if kind == "exif":
        return exiftool(path, "-sep", "\n", "-XMP:Subject").get("Subject", "").splitlines()
    return Packet(path.read_bytes()).words(SUBJECT) if path.exists() else []


def by_hand(kind: str, photo: Path, out: str = "", into: str = "") -> None:
    """What a user does in another program."""
    if kind == "txt":
        there = [word for word in words(kind, photo) if word != out] + ([into] if into else [])
        photo.with_suffix(".txt").write_text(", ".join(there))
        return
    target = photo if kind == "exif" else sidecar_of(photo)
    if kind == "exif":
        changes = [f"-XMP:Subject-={out}"] * bool(out) + [f"-XMP:Subject+={into}"] * bool(into)
        subprocess.run(["exiftool", "-q", "-overwrite_original", *changes, target], check=True)
        return
    packet = Packet(target.read_bytes()) if target.exists() else Packet()
    target.write_bytes(packet.changed({SUBJECT: ([out], [into] if into else [])}))


# ------------------------------------------------------------------------------------ the same for all of them


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_run_replaces_its_own_tags(kind: str, photo: Path) -> None:
    first = update(kind, photo, DOG, SIZE)
    assert (first.added, first.removed, first.written) == (("dog", "größe"), (), True)
    assert words(kind, photo) == ["dog", "größe"]
    again = update(kind, photo, DOG, CAT)
    assert (again.added, again.removed) == (("cat",), ("größe",))
    assert words(kind, photo) == ["dog", "cat"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tags_again_touch_no_file(kind: str, photo: Path) -> None:
    target = update(kind, photo, DOG, SIZE).target
    before = (target.read_bytes(), target.stat().st_mtime_ns, target.stat().st_ino)
    assert not update(kind, photo, DOG, SIZE).written
    assert (target.read_bytes(), target.stat().st_mtime_ns, target.stat().st_ino) == before


@pytest.mark.parametrize("kind", KINDS)
def test_tags_made_by_hand_stay(kind: str, photo: Path) -> None:
    by_hand(kind, photo, into="Rex")
    by_hand(kind, photo, into="Dog")
    change = update(kind, photo, DOG, CAT)
    assert (change.added, change.by_hand) == (("cat",), ("Dog",))
    assert words(kind, photo) == ["Rex", "Dog", "cat"]
    by_hand(kind, photo, into="grandma")
    assert update(kind, photo, SIZE).removed == ("cat",)
    assert sorted(words(kind, photo)) == ["Dog", "Rex", "grandma", "größe"]
    assert update(kind, photo, remove=True).removed == ("größe",)
    assert sorted(words(kind, photo)) == ["Dog", "Rex", "grandma"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tag_that_somebody_removed_stays_away(kind: str, photo: Path) -> None:
    update(kind, photo, DOG, CAT)
    by_hand(kind, photo, out="dog")
    change = update(kind, photo, DOG, CAT)
    assert (change.added, change.removed) == ((), ())
    assert words(kind, photo) == ["cat"]
    update(kind, photo, DOG, SIZE)
    assert words(kind, photo) == ["größe"]
    update(kind, photo, remove=True)  # and after this nothing is remembered
    update(kind, photo, DOG)
    assert words(kind, photo) == ["dog"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_put_in_can_be_taken_away_without_a_trace(kind: str, photo: Path) -> None:
    before = photo.read_bytes()
    update(kind, photo, DOG, SIZE)
    update(kind, photo, remove=True)
    assert photo.read_bytes() == before
    left = {path.name for path in photo.parent.iterdir()} - {photo.name, module.RECORD}
    assert left == set()
    assert not update(kind, photo, remove=True).written


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_says_it_and_does_nothing(kind: str, photo: Path) -> None:
    before = photo.read_bytes()
    change = update(kind, photo, DOG, dry_run=True)
    assert (change.added, change.written) == (("dog",), True)
    assert [path.name for path in photo.parent.iterdir()] == [photo.name]
    assert photo.read_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_no_tags_at_all_make_no_file(kind: str, photo: Path) -> None:
    assert not update(kind, photo).written
    assert [path.name for path in photo.parent.iterdir()] == [photo.name]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_meanwhile_is_not_overwritten(
    kind: str, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = module.merge

    def slow(*arguments: Any) -> Any:
        by_hand(kind, photo, into="Rex")
        return inner(*arguments)

    monkeypatch.setattr(module, "merge", slow)
    with pytest.raises(RamatchError, match="changed by another program"):
        update(kind, photo, DOG)
    assert words(kind, photo) == ["Rex"]


@pytest.mark.parametrize("kind", ["txt", "xmp"])
def test_a_full_disk_leaves_what_was(kind: str, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand(kind, photo, into="Rex")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        update(kind, photo, DOG)
    monkeypatch.undo()
    assert words(kind, photo) == ["Rex"]
    update(kind, photo, DOG)  # what was never there has not been removed by somebody
    assert words(kind, photo) == ["Rex", "dog"]


# ---------------------------------------------------------------------------------------------------- text files


def test_a_text_of_tags_keeps_its_form(photo: Path) -> None:
    text = photo.with_suffix(".txt")
    text.write_text("1girl ,  long hair\nsolo\n")
    update("txt", photo, DOG, CAT)
    assert text.read_text() == "1girl ,  long hair\nsolo, dog, cat\n"
    text.write_text("dog, 1girl ,  long hair\ncat\nsolo\n")
    update("txt", photo, remove=True)
    assert text.read_text() == "1girl ,  long hair\nsolo\n"


def test_a_note_that_was_cut_short_is_cut_away(photo: Path) -> None:
    update("txt", photo, DOG)
    record = photo.with_name(module.RECORD)
    whole = record.read_bytes()
    record.write_bytes(whole + b'{"file": "photo.txt", "ta\xc3')
    assert not update("txt", photo, DOG).written
    assert update("txt", photo, CAT).removed == ("dog",)
    assert record.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in record.read_text().splitlines())
    record.write_text("what is this\n")
    with pytest.raises(RamatchError, match="not valid JSON"):
        update("txt", photo, DOG)


def test_text_files_that_are_not_touched(photo: Path) -> None:
    photo.with_suffix(".txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RamatchError, match=r"photo\.txt is not text"):
        update("txt", photo, DOG)
    photo.with_suffix(".txt").unlink()
    noise_picture().save(photo.with_suffix(".png"))
    with pytest.raises(RamatchError, match=r"photo\.png would have the same text file"):
        update("txt", photo, DOG)


# ------------------------------------------------------------------------------------------------------ sidecars


@pytest.mark.parametrize(
    ("image", "there", "expected"),
    [
        ("a.jpg", "", "a.jpg.xmp"),
        ("a.jpg", "a.xmp", "a.xmp"),
        ("a.jpg", "a.XMP", "a.XMP"),
        ("a.jpg", "a.xmp a.jpg.xmp", "a.jpg.xmp"),
        ("a.jpg", "a.nef a.xmp", "a.jpg.xmp"),  # the short one is the RAW file's
        ("a.nef", "a.jpg a.xmp", "a.xmp"),
        ("a.nef", "a.nef.xmp", "a.nef.xmp"),
        ("a.nef", "", "a.xmp"),
        ("a.nef", "a.dng", "a.nef.xmp"),
        ("a.b.jpg", "", "a.b.jpg.xmp"),
    ],
)
def test_which_sidecar(image: str, there: str, expected: str, tmp_path: Path) -> None:
    for name in (image, *there.split()):
        (tmp_path / name).touch()
    assert sidecar_of(tmp_path / image).name == expected


def test_a_sidecar_keeps_its_permissions(photo: Path) -> None:
    target = update("xmp", photo, DOG).target
    target.chmod(0o600)
    update("xmp", photo, CAT)
    assert target.stat().st_mode & 0o777 == 0o600


def test_trees_of_other_programs_are_served_where_there_are_any(photo: Path) -> None:
    digikam = module.SLASHED[0]
    sidecar_of(photo).write_bytes(Packet().changed({digikam: ((), ["Pets/Rex"])}))
    update("xmp", photo, DOG)
    assert Packet(sidecar_of(photo).read_bytes()).words(digikam) == ["Pets/Rex", "animal/dog"]
    update("xmp", photo, remove=True)
    assert Packet(sidecar_of(photo).read_bytes()).words(digikam) == ["Pets/Rex"]


def test_a_tree_made_by_hand_counts_too(photo: Path) -> None:
    sidecar_of(photo).write_bytes(before := Packet().changed({HIERARCHY: ((), ["animal|dog", "Pets|Cat"])}))
    assert update("xmp", photo, DOG, CAT, SIZE).by_hand == ("dog", "Cat")
    assert Packet(sidecar_of(photo).read_bytes()).words(SUBJECT) == ["größe"]
    update("xmp", photo, remove=True)
    assert sidecar_of(photo).read_bytes() == before


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_a_new_sidecar_takes_over_the_tags_in_the_image(kind: str, tmp_path: Path) -> None:
    """Programs that find a sidecar do not look into the image any more."""
    inside = Packet().changed({SUBJECT: ((), ["Rex", "Dog"]), HIERARCHY: ((), ["Pets|Rex", "Dog"])})
    photo = tmp_path / f"photo.{kind.lower()}"
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", inside.decode())
    options = {"PNG": {"pnginfo": text}, "TIFF": {"tiffinfo": {700: inside}}}
    noise_picture().save(photo, kind, **options.get(kind, {"xmp": inside}))
    change = update("xmp", photo, DOG, SIZE)
    assert (change.added, change.by_hand) == (("größe",), ("Dog",))
    packet = Packet(sidecar_of(photo).read_bytes())
    assert packet.words(SUBJECT) == ["Rex", "Dog", "größe"]
    assert packet.words(HIERARCHY) == ["Pets|Rex", "Dog", "größe"]
    update("xmp", photo, remove=True)
    assert not sidecar_of(photo).exists()


@needs_exiftool
def test_a_new_sidecar_takes_over_keywords_but_not_ours(photo: Path) -> None:
    subprocess.run(["exiftool", "-q", "-overwrite_original", "-IPTC:Keywords=Müller", photo], check=True)
    update("exif", photo, DOG)
    update("xmp", photo, CAT)
    assert Packet(sidecar_of(photo).read_bytes()).words(SUBJECT) == ["Müller", "cat"]


def test_a_broken_image_can_have_a_sidecar(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff broken")
    assert update("xmp", tmp_path / "a.jpg", DOG).added == ("dog",)


def test_notes_that_somebody_changed_are_an_error_in_words(photo: Path) -> None:
    sidecar_of(photo).write_bytes(Packet().changed({TAGS: ((), ["what is this"])}))
    with pytest.raises(RamatchError, match="was changed: what is this"):
        update("xmp", photo, DOG)


@needs_exiftool
def test_another_program_reads_and_rewrites_the_sidecar(photo: Path) -> None:
    target = update("xmp", photo, DOG, SIZE).target
    found = exiftool(target, "-XMP:all")
    assert found["Subject"] == ["dog", "größe"]
    assert found["HierarchicalSubject"] == ["animal|dog", "größe"]
    assert found["Tags"] == ["0.93 animal|dog", "0.80 größe"]
    assert found["Made"] == "2026-11-19 ramatch tiny"
    subprocess.run(["exiftool", "-q", "-overwrite_original", "-XMP:Rating=4", "-XMP:Subject+=Rex", target], check=True)
    update("xmp", photo, CAT)
    found = exiftool(target, "-XMP:all")
    assert found["Rating"] == 4
    assert found["Subject"] == ["Rex", "cat"]
    assert found["HierarchicalSubject"] == "animal|cat"


# -------------------------------------------------------------------------------------------------------- images


@needs_exiftool
@pytest.mark.parametrize("ending", ["jpg", "tif", "png", "webp", "gif", "avif", "heic"])
def test_every_kind_of_image_keeps_its_pixels(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"-größe #1.{ending}"  # names that exiftool could take for something else
    if ending == "heic":
        heif = pytest.importorskip("pillow_heif")
        heif.from_pillow(noise_picture()).save(path)
        heif.register_heif_opener()
    else:
        noise_picture().save(path)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    update("exif", path, DOG, SIZE)
    found = exiftool(path, "-XMP:all", "-IPTC:all", "-charset", "filename=utf8")
    assert found["Subject"] == ["dog", "größe"]
    assert found.get("Keywords") == (["dog", "größe"] if ending in ("jpg", "tif") else None)
    update("exif", path, remove=True)
    assert exiftool(path, "-XMP:all", "-IPTC:all") == {}
    with Image.open(path) as picture:
        assert np.array_equal(np.asarray(picture.convert("RGB")), pixels)


@needs_exiftool
def test_everything_else_in_an_image_stays(photo: Path) -> None:
    hand = ["-IPTC:Keywords=Rex", "-IPTC:Keywords=Dog", "-IPTC:City=Köln", "-XMP:Subject=grandma", "-XMP:Rating=3"]
    hand += ["-EXIF:Artist=me", "-XMP:Title=a title"]
    subprocess.run(["exiftool", "-q", "-overwrite_original", *hand, photo], check=True)
    groups = ("-XMP:all", "-IPTC:all", "-EXIF:all")
    before = exiftool(photo, *groups)
    change = update("exif", photo, DOG, SIZE)
    assert change.by_hand == ("Dog",)
    after = exiftool(photo, *groups)
    assert after["Keywords"] == ["Rex", "Dog", "größe"]
    assert after["Subject"] == ["grandma", "größe"]
    assert {name: after[name] for name in ("City", "Rating", "Artist", "Title")} == {
        name: before[name] for name in ("City", "Rating", "Artist", "Title")
    }
    digests = exiftool(photo, "-IPTCDigest", "-CurrentIPTCDigest")
    assert digests["IPTCDigest"] == digests["CurrentIPTCDigest"]
    update("exif", photo, remove=True)
    assert exiftool(photo, *groups) == before


@needs_exiftool
def test_a_link_stays_a_link_and_a_mode_a_mode(photo: Path) -> None:
    photo.chmod(0o640)
    link = photo.with_name("link.jpg")
    link.symlink_to(photo.name)
    update("exif", link, DOG)
    assert link.is_symlink()
    assert words("exif", photo) == ["dog"]
    assert photo.stat().st_mode & 0o777 == 0o640


@needs_exiftool
def test_images_that_are_not_written_into(photo: Path, tmp_path: Path) -> None:
    for name in ("a.nef", "a.bmp"):
        (tmp_path / name).touch()
        with pytest.raises(RamatchError, match=r"no tags are written into \.(nef|bmp) files; write sidecars"):
            update("exif", tmp_path / name, DOG)
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(RamatchError, match=r"exiftool|format"):
        update("exif", tmp_path / "broken.jpg", DOG)
    assert (tmp_path / "broken.jpg").read_bytes() == b"no picture"
    photo.rename(tmp_path / "line\nbreak.jpg")
    with pytest.raises(RamatchError, match="line break"):
        update("exif", tmp_path / "line\nbreak.jpg", DOG)


@needs_exiftool
def test_xmp_in_several_parts_is_left_alone(photo: Path) -> None:
    long = photo.with_name("long.txt")
    long.write_text("word " * 20_000)
    subprocess.run(["exiftool", "-q", "-overwrite_original", f"-XMP:Description<={long}", photo], check=True)
    before = photo.read_bytes()
    with pytest.raises(RamatchError, match=r"several parts; write sidecars \(xmp\)"):
        update("exif", photo, DOG)
    assert photo.read_bytes() == before


@needs_exiftool
def test_keywords_in_latin_1_stay_readable(photo: Path) -> None:
    hand = ["-IPTC:Keywords=Müller", "-IPTC:City=Köln"]
    subprocess.run(["exiftool", "-q", "-overwrite_original", *hand, photo], check=True)
    assert b"M\xfcller" in photo.read_bytes()
    update("exif", photo, SIZE)
    assert exiftool(photo, "-IPTC:Keywords", "-IPTC:City") == {"Keywords": ["Müller", "größe"], "City": "Köln"}
    assert update("exif", photo, Keyword(("müller",), 0.9)).by_hand == ("Müller",)


@needs_exiftool
def test_one_broken_image_does_not_end_exiftool(photo: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no picture")
    with open_writer("exif", "made") as writer:
        with pytest.raises(RamatchError):
            writer.update(tmp_path / "broken.jpg", [DOG])
        assert writer.update(photo, [DOG]).added == ("dog",)


@needs_exiftool
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_exiftool_ends_with_us_however_we_end(photo: Path) -> None:
    code = "import os, sys; from pathlib import Path; from ramatch.library.exiftool import ExifTool; tool = ExifTool()"
    code += "; print(tool.run('-n', sys.argv[1]), flush=True); os.kill(os.getpid(), 9)"
    marked = {**os.environ, "RAMATCH_TEST_MARK": str(photo), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, photo], env=marked, capture_output=True)
    assert (done.returncode, b"File Name" in done.stdout) == (-9, True), done.stderr
    until = time.monotonic() + 30
    while left := [p for p in Path("/proc").glob("[0-9]*/environ") if _mentions(p, os.fsencode(photo))]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def _mentions(environ: Path, mark: bytes) -> bool:
    try:
        return b"RAMATCH_TEST_MARK=" + mark in environ.read_bytes()
    except OSError:  # it has ended, or is not ours
        return False


def test_without_exiftool_it_is_said_how_to_get_it(photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RamatchError, match=r"libimage-exiftool-perl.*sidecars \(xmp, txt\) need nothing"):
        update("exif", photo, DOG)


# ------------------------------------------------------------------------------------------------------ keywords


def prediction(calibrated: bool = True, **values: float) -> Prediction:
    labels = tuple(name.replace("_", " ") for name in values)
    numbers = np.array(list(values.values()))
    trust = np.array([0.1 if name == "kite" else 1.0 for name in values])
    return Prediction(labels, numbers, numbers, calibrated, (1, 1), trust=trust)


def test_sure_tags_with_what_stands_above_them() -> None:
    found = keywords_of(prediction(dog=0.9, kite=0.95, zorgblat=0.8, cat=0.2), threshold=0.5)
    assert [k.label for k in found] == ["dog", "zorgblat"]  # of a kite the model can only guess
    assert found[0].path[-2:] != ("dog", "dog")
    assert "animal" in found[0].path
    assert found[1] == Keyword(("zorgblat",), 0.8)
    assert [k.label for k in keywords_of(prediction(dog=0.9, kite=0.95, cat=0.2), top=2)] == ["dog", "cat"]
    assert keywords_of(prediction(dog=0.9), under="auto")[0].path[0] == "auto"


def test_scores_that_are_no_probabilities_are_not_noted_as_such() -> None:
    [found] = keywords_of(prediction(calibrated=False, zorgblat=0.9))
    assert str(found) == "- zorgblat"
    assert Keyword.parse("- zorgblat") == found
    assert Keyword.parse("0.93 animal|dog") == DOG


def test_what_separates_is_taken_out_of_labels() -> None:
    one = Prediction(("a|b, c\nd\x1b",), np.ones(1), np.ones(1), True, (1, 1))
    assert [k.label for k in keywords_of(one)] == ["a b c d"]


def test_words_are_the_same_in_any_case_and_composition() -> None:
    merged = merge(["CAFE\u0301"], [], [], [Keyword(("café",), 0.9), DOG, DOG])
    assert merged.by_hand == ("CAFE\u0301",)
    assert merged.added == ("dog",)
    assert merge(["Dog"], [], ["dog"], [DOG]).rejected == ()  # somebody wants it after all
