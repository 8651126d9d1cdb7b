"""Updates: every way a folder can change, interrupted anywhere."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import put_photos
from library_helpers import agree, answers, content
from PIL import Image

from ramatch.errors import RamatchError
from ramatch.library import Library, Update
from ramatch.recognizer import Recognizer

ZEROS = dict.fromkeys(("new", "changed", "moved", "copies", "unchanged", "deleted", "encoded"), 0)
NOTHING = ZEROS | {"hidden_folders": 1, "failed": []}


@pytest.fixture
def library(photos: Path) -> Library:
    return Library.open(photos / ".ramatch", create=True)


def test_new_then_unchanged(library: Library, photos: Path, recognizer: Recognizer) -> None:
    assert library.update(photos, recognizer, batch_size=3) == Update(**NOTHING | {"new": 8, "encoded": 8})
    assert library.update(photos, recognizer) == Update(**NOTHING | {"unchanged": 8})
    assert len(content(library)) == 8


def test_a_library_says_what_it_holds(library: Library, photos: Path, recognizer: Recognizer) -> None:
    assert repr(library) == f"Library({photos / '.ramatch'}: 0 photos, no model yet)"
    library.update(photos, recognizer)
    assert repr(library) == f"Library({photos / '.ramatch'}: 8 photos, model)"
    with library:
        pass
    assert repr(library) == f"Library({photos / '.ramatch'}: closed)"


def test_changed_file_is_encoded_again(library: Library, photos: Path, recognizer: Recognizer) -> None:
    library.update(photos, recognizer)
    before = content(library)
    Image.new("RGB", (30, 30), "red").save(photos / "img0.png")
    assert library.update(photos, recognizer) == Update(**NOTHING | {"changed": 1, "encoded": 1, "unchanged": 7})
    after = content(library)
    assert after["img0.png"][0] != before["img0.png"][0]
    del before["img0.png"], after["img0.png"]
    assert before == after


def test_touched_file_keeps_its_features(library: Library, photos: Path, recognizer: Recognizer) -> None:
    library.update(photos, recognizer)
    os.utime(photos / "img0.png", (1, 1))
    assert library.update(photos, recognizer) == Update(**NOTHING | {"changed": 1, "unchanged": 7})


def test_moved_renamed_folder_and_copies_are_not_encoded(
    library: Library, photos: Path, recognizer: Recognizer
) -> None:
    library.update(photos, recognizer)
    (photos / "img0.png").rename(photos / "more" / "z.png")
    (photos / "more").rename(photos / "less")
    shutil.copy(photos / "img1.png", photos / "copy.png")
    found = library.update(photos, recognizer)
    assert found == Update(**NOTHING | {"moved": 3, "copies": 1, "unchanged": 5})
    names = set(content(library))
    assert names == {"copy.png", "less/a.png", "less/b.png", "less/z.png", *(f"img{i}.png" for i in range(1, 6))}
    assert library.status()["photos"] == 8


def test_copies_that_are_new_together_are_encoded_once(library: Library, photos: Path, recognizer: Recognizer) -> None:
    shutil.copy(photos / "img1.png", photos / "img1b.png")
    assert library.update(photos, recognizer).encoded == 8
    assert content(library)["img1.png"][0] == content(library)["img1b.png"][0]


def test_deleted_photo_is_not_found_and_costs_nothing_when_it_returns(
    library: Library, photos: Path, recognizer: Recognizer, tmp_path: Path
) -> None:
    library.update(photos, recognizer)
    (photos / "img0.png").rename(tmp_path / "away.png")
    assert library.update(photos, recognizer) == Update(**NOTHING | {"deleted": 1, "unchanged": 7})
    assert len(library.search("dog", recognizer, top=None)) == 7
    (tmp_path / "away.png").rename(photos / "img0.png")
    assert library.update(photos, recognizer) == Update(**NOTHING | {"copies": 1, "unchanged": 7})
    assert len(library.search("dog", recognizer, top=None)) == 8


def test_remove_missing_gives_back_room_and_changes_no_answer(
    library: Library, photos: Path, recognizer: Recognizer
) -> None:
    library.update(photos, recognizer)
    for name in ("img0.png", "img3.png"):
        (photos / name).unlink()
    library.update(photos, recognizer)
    reader = Library.open(library.path)
    before = {hit.path: hit.probability for hit in reader.search("dog -cat", recognizer, top=None)}
    size = library.status()["bytes"]
    assert library.remove_missing() == 2
    assert library.remove_missing() == 0
    assert library.status()["photos"] == 6
    assert library.status()["bytes"] < size
    for one in (library, reader):
        assert {hit.path: hit.probability for hit in one.search("dog -cat", recognizer, top=None)} == before
    assert len(content(library)) == 6
    put_photos(photos, "x.png", "y.png", "new.png")
    Image.new("RGB", (9, 9), "blue").save(photos / "new.png")
    assert library.update(photos, recognizer).encoded == 2  # x and y are img0, forgotten, and img1, known
    assert len(content(library)) == 9


def test_part_of_a_folder_is_updated_alone(library: Library, photos: Path, recognizer: Recognizer) -> None:
    library.update(photos, recognizer)
    (photos / "img0.png").unlink()
    (photos / "more" / "a.png").unlink()
    assert library.update(photos / "more", recognizer).deleted == 1
    assert "img0.png" in content(library)
    assert library.update(photos, recognizer).deleted == 1


def test_whole_folder_may_move_with_its_library(photos: Path, recognizer: Recognizer) -> None:
    with Library.open(photos / ".ramatch", create=True) as library:
        library.update(photos, recognizer)
    moved = photos.rename(photos.parent / "elsewhere")
    with Library.open(moved / ".ramatch") as library:
        assert library.update(moved, recognizer).unchanged == 8
        assert all(hit.path.is_file() for hit in library.search("dog", recognizer))


def test_library_inside_the_folder(photos: Path, recognizer: Recognizer) -> None:
    library = Library.open(photos / "more" / "index", create=True)
    assert library.update(photos, recognizer).new == 8
    (photos / "more" / "a.png").unlink()
    assert library.update(photos, recognizer).deleted == 1


def test_library_elsewhere_with_two_folders(tmp_path: Path, photos: Path, recognizer: Recognizer) -> None:
    put_photos(tmp_path / "other", *(f"{i}.png" for i in range(9)))
    library = Library.open(tmp_path / "index", create=True)
    library.update(photos, recognizer)
    assert library.update(tmp_path / "other", recognizer).encoded == 1  # eight are copies
    assert library.update(photos, recognizer).deleted == 0
    assert len(library.search("dog", recognizer, top=None)) == 17


def test_unreadable_files_are_named_each_time_and_hidden_ones_left(
    library: Library, photos: Path, recognizer: Recognizer
) -> None:
    (photos / "bad.jpg").write_bytes(b"junk")
    put_photos(photos / ".secret", "x.png")
    put_photos(photos, ".hidden.png")
    for new in (8, 0):
        found = library.update(photos, recognizer)
        assert (found.new, found.hidden_folders) == (new, 2)  # .secret and .ramatch
        assert [Path(path).name for path, _ in found.failed] == ["bad.jpg"]
        assert "not a picture" in found.failed[0][1]
    shutil.copy(photos / "img0.png", photos / "bad.jpg")
    assert library.update(photos, recognizer).failed == []
    assert library.status()["unreadable"] == 0


def test_file_that_breaks_is_no_longer_found(library: Library, photos: Path, recognizer: Recognizer) -> None:
    library.update(photos, recognizer)
    (photos / "img0.png").write_bytes(b"junk")
    assert len(library.update(photos, recognizer).failed) == 1
    assert len(library.search("dog", recognizer, top=None)) == 7


def test_name_that_is_not_text(library: Library, photos: Path, recognizer: Recognizer) -> None:
    name = os.fsencode(photos) + b"/caf\xe9.png"
    shutil.copy(os.fsencode(photos / "img0.png"), name)
    library.update(photos, recognizer)
    assert name in [os.fsencode(hit.path) for hit in library.search("dog", recognizer)]


def test_errors_say_what_to_do(tmp_path: Path, photos: Path, recognizer: Recognizer, library: Library) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RamatchError, match=r"no images in .*empty"):
        library.update(tmp_path / "empty", recognizer)
    library.update(photos / "more", recognizer)
    for path in (photos / "more").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(RamatchError, match=r"no images in .*more"):
        library.update(photos / "more", recognizer)
    assert len(content(library)) == 2
    with pytest.raises(RamatchError, match="not a folder"):
        library.update(tmp_path / "nowhere", recognizer)
    with pytest.raises(RamatchError, match="not a photo library"):
        Library.open(tmp_path / "nowhere")
    with pytest.raises(RamatchError, match="holds other files"):
        Library.open(photos, create=True)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "library.sqlite").write_bytes(b"no database at all" * 100)
    with pytest.raises(RamatchError, match="not the database of a photo library"):
        Library.open(tmp_path / "odd")
    with pytest.raises(RamatchError, match="has no photo yet"):
        Library.open(tmp_path / "fresh", create=True).search("dog", recognizer)


def test_another_model_is_refused(library: Library, photos: Path, recognizer: Recognizer) -> None:
    from tiny_models import tiny_ram

    library.update(photos, recognizer)
    other = Recognizer(tiny_ram(visual_prompts=2), cache=0, name="other")
    for call in (lambda: library.update(photos, other), lambda: library.search("dog", other)):
        with pytest.raises(RamatchError, match="made with the model 'model'; 'other' has other features"):
            call()
    torch.manual_seed(0)
    again = Recognizer(tiny_ram(), cache=0)
    assert library.update(photos, again).unchanged == 8


def test_second_writer_is_refused_and_told_who_writes(
    library: Library, photos: Path, recognizer: Recognizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ramatch.library import update

    def while_writing(*_: object) -> None:
        with (
            Library.open(library.path) as second,
            pytest.raises(RamatchError, match=f"written by process {os.getpid()} "),
        ):
            second.update(photos, recognizer)
        raise KeyboardInterrupt

    monkeypatch.setattr(update.Updater, "commit", while_writing)
    with pytest.raises(KeyboardInterrupt):
        library.update(photos, recognizer)
    monkeypatch.undo()
    assert library.update(photos, recognizer).new == 8


@pytest.mark.parametrize("where", ["fsync", "sqlite"])
def test_full_disk_leaves_what_was_there(
    where: str, library: Library, photos: Path, recognizer: Recognizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.update(photos / "more", recognizer)
    before = content(library)
    if where == "fsync":

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
    else:
        pages = library.database.execute("PRAGMA page_count").fetchone()[0]
        library.database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(RamatchError, match=r"no room left .* safe"):
        library.update(photos, recognizer)
    monkeypatch.undo()
    assert content(library) == before
    library.database.execute("PRAGMA max_page_count = 1000000")
    assert library.update(photos, recognizer).new == 6


def test_reader_sees_whole_batches_while_another_writes(
    library: Library, photos: Path, recognizer: Recognizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ramatch.library import update

    library.update(photos / "more", recognizer)
    reader, counts, commit = Library.open(library.path), [], update.Updater.commit

    def commit_then_read(self: update.Updater, batch: list) -> None:
        counts.append(len(reader.search("dog", recognizer, top=None)))
        commit(self, batch)
        counts.append(len(reader.search("dog", recognizer, top=None)))

    monkeypatch.setattr(update.Updater, "commit", commit_then_read)
    library.update(photos, recognizer, batch_size=2)
    assert counts == [2, 4, 4, 6, 6, 8]


def test_damaged_features_are_found_and_encoded_anew(library: Library, photos: Path, recognizer: Recognizer) -> None:
    library.update(photos, recognizer)
    before = content(library), answers(library, recognizer)
    with open(library.path / "regions.0", "r+b") as file:
        file.seek(700)  # 16 regions of 32 numbers: in the second row
        file.write(bytes([99] * 8))
    (problem,) = library.verify()
    assert "damaged" in problem
    assert library.update(photos, recognizer).encoded == 1
    assert content(library) == before[0]
    agree(before[1], answers(library, recognizer))
    os.truncate(library.path / "regions.0", 100)
    assert any("cut short" in problem for problem in library.verify())


INDEX = """
import os, signal, sys
sys.path[:0] = sys.argv[4:]
import torch
from tiny_models import tiny_ram
from ramatch.library import Library
from ramatch.recognizer import Recognizer
torch.manual_seed(0)
recognizer = Recognizer(tiny_ram(), cache=0)
left, fsync = int(sys.argv[3]), os.fsync
def count(file):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(file)
os.fsync = count
print("ready", flush=True)
Library.open(sys.argv[1], create=True).update(sys.argv[2], recognizer, batch_size=2)
"""


def test_kill_at_any_moment_leaves_a_whole_library(tmp_path: Path, recognizer: Recognizer) -> None:
    put_photos(tmp_path / "photos", *(f"{i}.png" for i in range(60)))
    whole = Library.open(tmp_path / "whole", create=True)
    start = time.perf_counter()
    whole.update(tmp_path / "photos", recognizer, batch_size=2)
    seconds, wanted, scores = time.perf_counter() - start, content(whole), answers(whole, recognizer)
    random.seed(0)
    sizes = [0]
    for syncs in (1, 5, 12, 0):  # each batch syncs three files: killed between them, and once at any moment
        command = [sys.executable, "-c", INDEX, tmp_path / "killed", tmp_path / "photos", str(syncs), *sys.path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            if not syncs:
                time.sleep(random.uniform(0.1, 0.6) * seconds)
                process.send_signal(signal.SIGKILL)
        with Library.open(tmp_path / "killed", create=True) as library:
            found = content(library)
            agree(answers(library, recognizer), scores)
        assert found == {name: wanted[name] for name in found}
        sizes.append(len(found))
    assert sizes[:4] == [0, 0, 2, 8]
    assert sizes[4] >= 8
    with Library.open(tmp_path / "killed", create=True) as library:
        library.update(tmp_path / "photos", recognizer, batch_size=2)
        assert content(library) == wanted
        agree(scores, answers(library, recognizer))


def test_torn_tail_is_ignored_and_overwritten(library: Library, photos: Path, recognizer: Recognizer) -> None:
    library.update(photos / "more", recognizer)
    before = content(library)
    for name in ("image", "regions", "scales"):
        with open(library.path / f"{name}.0", "ab") as file:
            file.write(np.random.default_rng(0).bytes(333))
    assert content(library) == before
    assert len(library.search("dog", recognizer)) == 2
    assert library.update(photos, recognizer).new == 6
    assert len(content(library)) == 8


def test_lock_of_a_dead_process_is_taken_over(library: Library, photos: Path, recognizer: Recognizer) -> None:
    def die(path: Path) -> None:
        from ramatch.library.store import writing

        with writing(path):
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=die, args=(library.path,))
    child.start()
    child.join()
    assert (library.path / "writer.txt").is_file()
    assert library.update(photos, recognizer).new == 8
    assert not (library.path / "writer.txt").exists()
