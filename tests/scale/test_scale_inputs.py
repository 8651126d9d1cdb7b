"""Units of work: what is found, how it is cut, and what is read from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scale_helpers import put_parquet, put_tar

from ramatch.errors import RamatchError
from ramatch.modeling.preprocess import Preprocess
from ramatch.scale.inputs import Unit, list_units
from ramatch.scale.pieces import Piece, from_table, read_unit, to_table
from ramatch.scale.stores import Folder, open_store

SMALL = Preprocess((16, 16))


def read(units: list[Unit], part: int = 4) -> list[Piece]:
    return [piece for unit in units for piece in read_unit(unit, SMALL, part)]


def names(pieces: list[Piece]) -> list[str]:
    return [name for piece in pieces for name in piece.names]


def test_images_are_cut_in_order_and_named_as_they_were_given(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos.parent)
    listing = list_units(["photos"], part=4)
    assert [unit.count for unit in listing.units] == [4, 4, 3]
    assert listing.known == 11
    found = read(listing.units)
    assert names(found)[:3] == ["photos/broken.jpg", "photos/img0.png", "photos/img1.png"]
    assert [piece.last for piece in found] == [True] * 3
    assert "not a picture" in str(found[0].found[0])
    assert found[0].pixels.shape == (3, 3, 16, 16)
    again = list_units(["photos"], part=4)
    assert again.fingerprint() == listing.fingerprint()
    (photos / "img0.png").unlink()
    assert list_units(["photos"], part=4).fingerprint() != listing.fingerprint()


@pytest.mark.parametrize(("ending", "mode"), [("tar", "w"), ("tar.gz", "w:gz")])
def test_a_tar_shard_gives_the_pixels_of_its_images(photos: Path, ending: str, mode: str) -> None:
    files = sorted(photos.glob("img*.png"))
    put_tar(photos.parent / f"a.{ending}", files, mode)
    listing = list_units([photos.parent / f"a.{ending}"])
    assert [(unit.kind, unit.count) for unit in listing.units] == [("tar", -1)]
    found = read(listing.units)
    assert [(piece.number, piece.last, len(piece.names)) for piece in found] == [
        (0, False, 4),
        (1, False, 4),
        (2, True, 1),
    ]
    assert [name.rpartition(":")[2] for name in names(found)] == [file.name for file in files]
    plain = read(list_units(files).units, part=256)
    np.testing.assert_array_equal(np.concatenate([piece.pixels for piece in found]), plain[0].pixels)


@pytest.mark.parametrize("nested", [True, False])
def test_row_groups_of_parquet_are_units(photos: Path, nested: bool) -> None:
    files = sorted(photos.glob("img*.png"))
    put_parquet(photos.parent / "a.parquet", files, nested=nested)
    listing = list_units([photos.parent / "*.parquet"])
    assert [(unit.group, unit.first, unit.count) for unit in listing.units] == [(0, 0, 4), (1, 4, 4), (2, 8, 1)]
    found = read(listing.units, part=3)
    assert [name.rpartition(":")[2] for name in names(found)] == [f"row {row}" for row in range(9)]
    plain = read(list_units(files).units, part=256)
    np.testing.assert_array_equal(np.concatenate([piece.pixels for piece in found]), plain[0].pixels)


def test_pieces_that_are_done_are_passed_over(photos: Path) -> None:
    put_tar(photos.parent / "a.tar", sorted(photos.glob("img*.png")))
    [unit] = list_units([photos.parent / "a.tar"]).units
    assert [piece.number for piece in read_unit(unit, SMALL, 4, done={0, 2})] == [1]


def test_what_is_wrong_with_a_shard_is_a_row(photos: Path) -> None:
    whole = photos.parent / "a.tar"
    put_tar(whole, sorted(photos.glob("img*.png")))
    cut = photos.parent / "cut.tar"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 3])
    rubbish = photos.parent / "rubbish.tar"
    rubbish.write_bytes(b"rubbish" * 1000)
    found = read(list_units([cut, rubbish]).units, part=256)
    assert [isinstance(what, str) for what in found[0].found][-1]
    assert not isinstance(found[0].found[0], str)  # what comes before is kept
    assert found[1].names == (str(rubbish),)
    assert "cannot be read" in str(found[1].found[0])


def test_a_shard_without_images_has_one_empty_piece(tmp_path: Path) -> None:
    put_tar(tmp_path / "a.tar", [])
    [piece] = read(list_units([tmp_path / "a.tar"]).units)
    assert (piece.names, piece.last, piece.pixels.shape) == ((), True, (0, 3, 16, 16))


def test_folders_mix_and_the_rest_is_told(photos: Path) -> None:
    put_tar(photos / "more" / "a.tar", [photos / "img0.png"])
    put_parquet(photos / "b.parquet", [photos / "img1.png"])
    (photos / "bad.parquet").write_bytes(b"PAR1rubbish")
    (photos / "notes.txt").write_text("x")
    listing = list_units([photos, photos / "nowhere.jpg"])
    assert [unit.kind for unit in listing.units] == ["images", "tar", "parquet"]
    assert [Path(name).name for name in listing.skipped] == ["notes.txt"]
    assert {Path(name).name: reason[:20] for name, reason in listing.missing} == {
        "bad.parquet": "not a readable parqu",
        "nowhere.jpg": "no such file or fold",
    }


def test_a_parquet_file_without_images_says_what_it_has(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": [1], "text": ["x"]}), tmp_path / "a.parquet")
    [piece] = read(list_units([tmp_path / "a.parquet"]).units)
    assert "it has id, text" in str(piece.found[0])


def test_addresses_give_what_the_disk_gives(photos: Path) -> None:
    put_tar(photos / "a.tar", [photos / "img0.png"])
    put_parquet(photos / "b.parquet", [photos / "img1.png"])
    address = photos.as_uri()
    here, there = list_units([photos]), list_units([address])
    assert [unit.kind for unit in there.units] == [unit.kind for unit in here.units]
    a, b = read(here.units), read(there.units)
    assert [name.removeprefix(address) for name in names(b)] == [name.removeprefix(str(photos)) for name in names(a)]
    assert [piece.found for piece in a] == [piece.found for piece in b]
    np.testing.assert_array_equal(a[0].pixels, b[0].pixels)
    [one] = list_units([f"{address}/img4.png"]).units
    assert one.names == (f"{address}/img4.png",)
    assert list_units([f"{address}/nowhere"]).missing == [(f"{address}/nowhere", "no such file or folder")]


def test_a_store_that_only_fsspec_knows(photos: Path) -> None:
    pytest.importorskip("fsspec")
    store, _ = open_store("memory://photos")
    store.create_dir("/photos/.hidden")
    for name in ("img10.png", "img2.png", ".hidden/a.png"):
        with store.open_output_stream(f"/photos/{name}") as file:
            file.write((photos / "img0.png").read_bytes())
    listing = list_units(["memory://photos"])
    assert [name for unit in listing.units for name in unit.names] == [
        "memory://photos/img2.png",
        "memory://photos/img10.png",
    ]
    assert read(listing.units)[0].found == ((48, 40), (48, 40))
    folder = Folder("memory://out/here")
    folder.write("a.txt", b"one")
    folder.write("a.txt", b"two")  # in the place of the other
    assert folder.names() == ["a.txt"]
    assert folder.open("a.txt").read() == b"two"


def test_a_store_that_nobody_knows_is_said() -> None:
    with pytest.raises(RamatchError, match="no store that can be read"):
        list_units(["nosuch://a/b"])


def test_pieces_survive_arrow() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 4), dtype=np.uint8)
    piece = Piece("k", 3, True, ("a", "b", "c"), ((4, 4), "broken", (5, 5)), pixels)
    empty = Piece("k", 4, True, (), (), np.zeros((0, 3, 4, 4), np.uint8))
    for before in (piece, empty):
        [after] = from_table(to_table(before))
        np.testing.assert_array_equal(after.pixels, before.pixels)
        assert after.pixels.shape == before.pixels.shape
        assert (after.names, after.found, after.last, after.number) == (
            before.names,
            before.found,
            before.last,
            before.number,
        )
