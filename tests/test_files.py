"""Files are replaced whole or not at all."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ramatch.errors import RamatchError
from ramatch.files import (
    expect,
    expect_numbers,
    parse_json,
    read_json,
    read_lines,
    whole_folder,
    write_atomic,
    write_json,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_text_and_json(tmp_path):
    write_text(tmp_path / "new" / "deep" / "a.txt", "größe\n")
    assert (tmp_path / "new" / "deep" / "a.txt").read_bytes() == "größe\n".encode()
    write_json(tmp_path / "a.json", {"é": [1, 2.5, None]})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"é": [1, 2.5, None]}
    write_text(tmp_path / "a.json", "shorter")
    assert (tmp_path / "a.json").read_text() == "shorter"
    assert names(tmp_path) == ["a.json", "new"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, error):
    target = tmp_path / "a.txt"
    target.write_text("old")

    def half(path: Path) -> None:
        path.write_text("ne")
        raise error

    with pytest.raises(type(error)):
        write_atomic(target, half)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_the_new_content_is_not_seen_before_it_is_complete(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")

    def write(path: Path) -> None:
        assert path.parent == tmp_path  # same disk, so that renaming is one step
        path.write_text("new")
        assert target.read_text() == "old"

    write_atomic(target, write)
    assert target.read_text() == "new"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions and devices")
def test_permissions_links_and_devices(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a.txt", "a")
        write_atomic(tmp_path / "a.safetensors", lambda path: save_file({"x": torch.zeros(1)}, path))
    finally:
        os.umask(before)
    for name in ("a.txt", "a.safetensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640  # what the user's umask says
    (tmp_path / "link").symlink_to("a.txt")
    write_text(tmp_path / "link", "b")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a.txt").read_text() == "b"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(tmp_path / "pipe", "through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)  # a device or pipe is written to, not replaced


def test_a_folder_in_the_way(tmp_path):
    with pytest.raises(IsADirectoryError) as caught:
        write_text(tmp_path, "a")
    assert caught.value.filename == str(tmp_path)
    assert names(tmp_path) == []


def test_reading_says_which_file_and_what(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf one \r\n\r\n two\n")
    assert read_lines(tmp_path / "a.txt") == ["one", "two"]
    (tmp_path / "b.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(RamatchError, match=r"b\.json: not UTF-8 text \(invalid start byte at byte 7\)"):
        read_json(tmp_path / "b.json")
    (tmp_path / "b.json").write_text('{\n"a": }')
    with pytest.raises(RamatchError, match=r"b\.json: not valid JSON \(line 2: "):
        read_json(tmp_path / "b.json")
    with pytest.raises(RamatchError, match=r"none\.json: No such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(RamatchError, match="Is a directory"):
        read_lines(tmp_path)


def test_json_of_strangers():
    assert parse_json('{"a": "\\ud83d\\ude00", "b": "\\ud83d"}', "x") == {"a": "\U0001f600", "b": "?"}
    for text in ("[" * 100_000, "9" * 10_000):
        with pytest.raises(RamatchError, match="x: not usable JSON"):
            parse_json(text, "x")


def test_values_are_of_the_kind_expected():
    assert expect({"a": 1}, dict, "x") == {"a": 1}
    with pytest.raises(RamatchError, match=r"x is \[1\]; expected an object"):
        expect([1], dict, "x")
    assert expect_numbers(("1", 2), "x") == [1.0, 2.0]
    for wrong in ("a", None, [], float("nan"), "inf", 10**400):
        with pytest.raises(RamatchError, match=r"x is .*; expected numbers"):
            expect_numbers([1, wrong], "x")


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    leftover = target.parent / ".model.tmp"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("of one that was killed")
    with pytest.raises(ZeroDivisionError), whole_folder(target) as folder:
        1 / len(list(folder.iterdir()))  # it is empty
    assert list(target.parent.iterdir()) == []
    target.mkdir()  # an empty one may be there
    with whole_folder(target) as folder:
        (folder / "a.json").write_text("{}")
        assert list(target.iterdir()) == []
    assert [p.name for p in target.parent.iterdir()] == ["model"]
    assert [p.name for p in target.iterdir()] == ["a.json"]
    with pytest.raises(RamatchError, match="not an empty folder"), whole_folder(target):
        pass
    assert (target / "a.json").exists()
