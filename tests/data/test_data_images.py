"""Decoding: every accepted kind of source, and every hazard, has a defined outcome."""

from __future__ import annotations

import contextlib
import io
import os
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from ramatch.data.find import find_images
from ramatch.data.images import ImageError, ImageTooLargeError, load_image
from ramatch.errors import RamatchError

RED = (200, 30, 30)


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that only claims a size: header chunk and the start of a data chunk, no pixels."""
    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + ihdr
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return header + struct.pack(">I", 100) + b"IDAT"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_every_accepted_format(kind: str, tmp_path: Path) -> None:
    picture = Image.new("RGB", (9, 5), RED)
    path = tmp_path / f"x.{kind.lower()}"
    path.write_bytes(encoded(picture, kind))
    stream = io.BytesIO(path.read_bytes())
    for source in (path, str(path), path.read_bytes(), stream):
        loaded = load_image(source)
        assert loaded.mode == "RGB"
        assert loaded.size == (9, 5)
        assert np.abs(np.array(loaded).astype(int)[2, 4] - RED).max() <= 8


def test_format_outside_the_list_is_refused() -> None:
    with pytest.raises(ImageError, match="accepted format"):
        load_image(encoded(Image.new("RGB", (4, 4)), "PPM"))


def test_unseekable_and_text_streams(tmp_path: Path) -> None:
    class Pipe(io.RawIOBase):
        def __init__(self, content: bytes) -> None:
            self.content = content

        def read(self, size: int = -1) -> bytes:
            taken, self.content = self.content, b""
            return taken

    assert load_image(Pipe(encoded(Image.new("RGB", (3, 2), RED), "PNG"))).size == (3, 2)
    (tmp_path / "t.txt").write_text("hello")
    with open(tmp_path / "t.txt") as stream, pytest.raises(ImageError, match="rb"):
        load_image(stream)


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 6), st.integers(1, 6), st.just(3))))
def test_arrays_and_tensors_round_trip(array: np.ndarray) -> None:
    tensor = torch.from_numpy(array).permute(2, 0, 1)
    for source in (array, tensor, array / 255.0, tensor.float() / 255, Image.fromarray(array)):
        assert np.array_equal(np.array(load_image(source)), array)


def test_grey_arrays_and_tensors() -> None:
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    expected = np.repeat(grey[:, :, None], 3, axis=2)
    for source in (grey, grey[:, :, None], torch.from_numpy(grey), torch.from_numpy(grey)[None]):
        assert np.array_equal(np.array(load_image(source)), expected)


def test_bfloat16_tensor() -> None:
    assert load_image(torch.ones(3, 2, 2, dtype=torch.bfloat16)).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((2, 3, 5), np.uint8), "shape"),
        (np.zeros((2, 3, 3), np.int64), "int64"),
        (np.full((2, 2, 3), 2.0), "expected \\[0, 1\\]"),
        (np.full((2, 2, 3), np.nan), "expected \\[0, 1\\]"),
        (torch.zeros(2, 3, 4, 4), "shape"),
        (np.zeros((0, 4, 3), np.uint8), "empty"),
        (12, "cannot make a picture of a int"),
    ],
)
def test_unusable_sources(source: object, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        load_image(source)


def test_exif_orientation_is_applied() -> None:
    picture = Image.new("RGB", (6, 4), (0, 0, 0))
    picture.paste((255, 255, 255), (0, 0, 3, 4))  # left half white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned 90 degrees clockwise: left becomes top
    turned = load_image(encoded(picture, "JPEG", exif=exif, quality=95))
    assert turned.size == (4, 6)
    assert min(turned.getpixel((2, 0))) > 200
    assert max(turned.getpixel((2, 5))) < 60


def test_broken_exif_does_not_lose_the_picture() -> None:
    good = encoded(Image.new("RGB", (6, 4), RED), "JPEG")
    block = b"Exif\x00\x00II*\x00\xff\xff\xff\xff"
    broken = good[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + good[2:]
    assert load_image(broken).size == (6, 4)


def test_cmyk() -> None:
    loaded = load_image(encoded(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG", quality=95))
    r, g, b = loaded.getpixel((1, 1))
    assert r > 200
    assert max(g, b) < 60


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA"])
def test_transparency_becomes_white(mode: str) -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    source = encoded(clear.convert(mode) if mode != "P" else clear.quantize(), "PNG" if mode != "PA" else "TIFF")
    if mode == "PA":
        source = clear.convert("RGB").convert("P")  # no container keeps this mode; the PIL image itself does
        source.putalpha(0)
    assert load_image(source).getpixel((1, 1)) == (255, 255, 255)


def test_half_transparent_is_blended() -> None:
    loaded = load_image(encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 128)), "PNG"))
    assert abs(loaded.getpixel((0, 0))[0] - 127) <= 1


def test_sixteen_bit_grey() -> None:
    ramp = np.array([[0, 32768, 65535]], dtype=np.uint16)
    loaded = np.array(load_image(encoded(Image.fromarray(ramp), "PNG")))[0, :, 0]
    assert loaded.tolist() == [0, 128, 255]


def test_float_tiff() -> None:
    ramp = Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32))
    assert np.array(load_image(encoded(ramp, "TIFF")))[0, :, 0].tolist() == [0, 128, 255]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_gives_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), c) for c in (RED, (0, 0, 250), (0, 250, 0))]
    content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
    assert np.abs(np.array(load_image(content))[4, 4].astype(int) - RED).max() <= 8


def test_pixel_cap_is_checked_from_the_header() -> None:
    bomb = png_header(20_000, 8_000)  # 160 million, within Pillow's own limit of 179
    with pytest.raises(ImageTooLargeError, match="160,000,000 pixels"):
        load_image(bomb)
    with pytest.raises(ImageTooLargeError, match="too many pixels"):
        load_image(png_header(60_000, 60_000), max_pixels=None)
    with pytest.raises(ImageTooLargeError):
        load_image(np.zeros((10, 11, 3), np.uint8), max_pixels=100)
    assert load_image(np.zeros((10, 10, 3), np.uint8), max_pixels=100).size == (10, 10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("depth", [1, 8, 16])
@pytest.mark.parametrize("size", [(1, 99_999_999), (99_999_999, 1), (1, 65_536)])
def test_a_strip_is_refused_from_its_header(size: tuple[int, int], depth: int, tmp_path: Path) -> None:
    """A file of 70 bytes that claims a side no picture has: within the limit of pixels, gigabytes when resized."""
    header = struct.pack(">IIBBBBB", *size, depth, 0, 0, 0, 0)
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(b"\0\0"), b"IEND": b""}
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks.items():
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    (tmp_path / "strip.png").write_bytes(content)
    with pytest.raises(ImageTooLargeError, match=r"strip\.png: .* side of more than 65,535") as caught:
        load_image(tmp_path / "strip.png")
    assert caught.value.name == str(tmp_path / "strip.png")
    with pytest.raises(ImageTooLargeError, match="side of more than"):
        load_image(content, max_pixels=None)


def test_the_longest_side_is_still_read() -> None:
    assert load_image(encoded(Image.new("L", (65_535, 1)), "PNG")).size == (65_535, 1)
    with pytest.raises(ImageTooLargeError, match="side"):
        load_image(np.zeros((65_536, 1, 3), np.uint8))


@pytest.mark.parametrize(
    "error",
    [
        Image.DecompressionBombError("bomb"),
        Image.DecompressionBombWarning("bomb"),
        MemoryError(),
        ValueError("value"),
        struct.error("unpack"),
        OverflowError("overflow"),
        SyntaxError("syntax"),
        RecursionError("deep"),
        IndexError("index"),
        EOFError("end"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("when", ["open", "load", "convert"])
def test_whatever_a_decoder_raises(error: Exception, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(Image.new("L", (4, 4)), "PNG")

    def fail(*args: object, **options: object) -> None:
        raise error

    if when == "open":
        monkeypatch.setattr(Image, "open", fail)
    else:
        monkeypatch.setattr(Image.Image if when == "convert" else PngImageFile, when, fail)
    bomb = type(error).__name__.startswith("DecompressionBomb")
    with pytest.raises(ImageTooLargeError if bomb else ImageError, match=r"x\.png: (too many|corrupt)") as caught:
        load_image(content, name="x.png")
    assert caught.value.reason


def test_palette_with_transparency_in_gif_and_png() -> None:
    picture = Image.new("P", (4, 4), 1)
    picture.putpalette([0, 0, 0, *RED] + [0] * 762)
    picture.putpixel((0, 0), 0)
    for kind in ("GIF", "PNG"):
        loaded = load_image(encoded(picture, kind, transparency=0))
        assert (loaded.getpixel((0, 0)), loaded.getpixel((2, 2))) == ((255, 255, 255), RED), kind


@pytest.mark.parametrize("orientation", [0, 9, 65_535])
def test_orientations_that_do_not_exist(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert load_image(encoded(Image.new("RGB", (6, 4), RED), "JPEG", exif=exif)).size == (6, 4)


def test_the_callers_stream_stays_open() -> None:
    stream = io.BytesIO(encoded(Image.new("RGB", (3, 2)), "GIF"))
    load_image(stream)
    assert not stream.closed


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_truncated_files(kind: str, tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    path = tmp_path / f"cut.{kind.lower()}"
    content = encoded(noise, kind)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ImageError, match=path.name) as caught:
        load_image(path)
    assert caught.value.name == str(path)
    assert caught.value.reason


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 400), byte=st.integers(0, 255), kind=st.sampled_from(["JPEG", "PNG", "WEBP", "GIF"]))
def test_damage_never_escapes_as_another_error(position: int, byte: int, kind: str) -> None:
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 255, (16, 16, 3), dtype=np.uint8))
    content = bytearray(encoded(noise, kind))
    content[position % len(content)] = byte
    with contextlib.suppress(ImageError):
        assert load_image(bytes(content)).mode == "RGB"


def test_missing_folder_and_empty_file(tmp_path: Path) -> None:
    with pytest.raises(RamatchError, match="no such file"):
        load_image(tmp_path / "none.png")
    with pytest.raises(RamatchError, match="folder"):
        load_image(tmp_path)
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(RamatchError, match=r"empty\.jpg"):
        load_image(tmp_path / "empty.jpg")


def test_callers_picture_is_not_changed() -> None:
    picture = Image.new("RGB", (2, 2), RED)
    loaded = load_image(picture)
    loaded.putpixel((0, 0), (1, 2, 3))
    assert picture.getpixel((0, 0)) == RED


def test_find_images(tmp_path: Path) -> None:
    for name in ("img10.png", "img2.JPG", "img1.webp", "sub/deep/x.jpeg", "notes.txt", ".hidden.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    names = [p.relative_to(tmp_path).as_posix() for p in find_images(tmp_path)]
    assert names == ["img1.webp", "img2.JPG", "img10.png", "sub/deep/x.jpeg"]
    assert [p.name for p in find_images(f"{tmp_path}/img*")] == ["img1.webp", "img2.JPG", "img10.png"]
    assert [p.name for p in find_images(str(tmp_path / "**" / "*.jpeg"))] == ["x.jpeg"]
    assert find_images([tmp_path / "img2.JPG", str(tmp_path)])[0].name == "img2.JPG"
    assert len(find_images([tmp_path / "img2.JPG", str(tmp_path)])) == 4  # each once
    assert find_images(tmp_path / "notes.txt") == [tmp_path / "notes.txt"]  # named outright


def test_find_images_with_nothing_to_find(tmp_path: Path) -> None:
    with pytest.raises(RamatchError, match="no images found"):
        find_images(tmp_path)
    with pytest.raises(RamatchError, match="no images found"):
        find_images(str(tmp_path / "*.png"))
    with pytest.raises(RamatchError, match="no such file"):
        find_images(tmp_path / "gone")


def test_name_with_glob_characters_is_taken_literally(tmp_path: Path) -> None:
    (tmp_path / "a[1].png").touch()
    assert [p.name for p in find_images(str(tmp_path / "a[1].png"))] == ["a[1].png"]


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    whole = encoded(Image.new("RGB", (160, 120), (9, 99, 199)), "JPEG", progressive=True)
    scan = whole[whole.rindex(b"\xff\xda") : -2]
    few, many = whole[:-2] + scan * 50 + whole[-2:], whole[:-2] + scan * 20_000 + whole[-2:]
    assert load_image(few).size == (160, 120)
    (tmp_path / "many.jpg").write_bytes(many)
    for source in (many, tmp_path / "many.jpg", io.BytesIO(many)):
        with pytest.raises(ImageTooLargeError, match=r"JPEG of 20,0\d\d scans"):
            load_image(source)
    large = encoded(Image.new("RGB", (8_000, 8_000)), "JPEG", progressive=True)
    scan = large[large.rindex(b"\xff\xda") : -2]
    with pytest.raises(ImageTooLargeError, match="scans"):
        load_image(large[:-2] + scan * 20 + large[-2:])


def test_scans_are_counted_across_the_parts_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoded(Image.new("RGB", (64, 48)), "JPEG", progressive=True)
    monkeypatch.setattr("ramatch.data.images.MAX_SCANS", whole.count(b"\xff\xda") - 1)

    class Bytewise(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(1 if size == 1 << 20 else size)

    with pytest.raises(ImageTooLargeError, match="scans"):
        load_image(Bytewise(whole))


def test_deep_grey_is_converted_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (70, 50), dtype=np.uint16)
    content = encoded(Image.fromarray(values), "PNG")
    whole = load_image(content)
    np.testing.assert_array_equal(np.asarray(whole)[..., 0], np.rint(values * (255 / 65535)))
    monkeypatch.setattr("ramatch.data.images.STRIP", 333)
    assert load_image(content).tobytes() == whole.tobytes()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_what_is_no_file_is_named_and_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "dangling.png").symlink_to("nowhere.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "device.png").symlink_to("/dev/zero")
    (tmp_path / "folder.png").mkdir()
    found = [path.name for path in find_images(tmp_path)]
    assert found == ["dangling.png", "device.png", "loop.png", "pipe.png"]
    for name in (*found, "folder.png"):
        with pytest.raises(ImageError, match=r"pipe or device|no such file|symbolic links|is a folder"):
            load_image(tmp_path / name)


def test_a_folder_a_thousand_deep(tmp_path: Path) -> None:
    deep = str(tmp_path)
    for _ in range(1200):
        deep += "/d"
        os.mkdir(deep)
    Path(deep, "a.png").write_bytes(encoded(Image.new("RGB", (3, 3)), "PNG"))
    try:
        [found] = find_images(tmp_path)
        assert load_image(found).size == (3, 3)
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=False)  # shutil would recurse
