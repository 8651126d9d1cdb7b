"""What cameras and phones write: HEIC, AVIF, RAW, pictures of hundreds of megapixels, videos."""

from __future__ import annotations

import builtins
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from ramatch.data import raw, video
from ramatch.data.images import ImageError, ImageTooLargeError, full_size, load_image
from ramatch.data.jpeg import read_header
from ramatch.errors import RamatchError

RED = (200, 30, 30)


def encoded(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    picture.save(buffer := io.BytesIO(), kind, **options)
    return buffer.getvalue()


def gradient(width: int, height: int) -> Image.Image:
    """Dark at the left, red at the top: no two turns of it look alike."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(255, 0, height))
    return Image.fromarray(np.stack([y, x, np.zeros_like(x)], axis=-1).astype(np.uint8))


def close(found: Image.Image, expected: Image.Image) -> bool:
    same = found.size == expected.size
    return same and np.abs(np.asarray(found, int) - np.asarray(expected, int)).mean() < 4


# ------------------------------------------------------------------------------------------------ HEIC and AVIF


def test_avif(tmp_path: Path) -> None:
    (tmp_path / "a.avif").write_bytes(encoded(gradient(40, 30), "AVIF", quality=95))
    assert close(load_image(tmp_path / "a.avif"), gradient(40, 30))


def heic(picture: Image.Image, **options: Any) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif")
    pillow_heif.from_pillow(picture).save(buffer := io.BytesIO(), quality=95, **options)
    return buffer.getvalue()


def test_heic_from_files_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.heic").write_bytes(content := heic(gradient(64, 48)))
    for source in (tmp_path / "a.heic", content, io.BytesIO(content)):
        assert close(load_image(source), gradient(64, 48))
    with pytest.raises(ImageTooLargeError, match="more than the limit"):
        load_image(content, max_pixels=1000)
    with pytest.raises(ImageError, match="corrupt"):
        load_image(content[: len(content) // 2])


def test_heic_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    there = builtins.__import__

    def missing(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("pillow_heif"):
            raise ImportError(name)
        return there(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ImageError, match=r"photo.heic: this needs .*pip install 'ramatch\[heif\]'"):
        load_image(b"\0\0\0\x18ftypheic" + bytes(64), name="photo.heic")
    with pytest.raises(ImageError, match="accepted format"):  # another file that begins like that
        load_image(b"\0\0\0\x18ftypqt  " + bytes(64))


# --------------------------------------------------------------------------------------------------------- RAW


def raw_file(*parts: bytes, order: str = "<", orientation: int = 1, magic: bytes = b"II*\0") -> bytes:
    """What RAW files of many makers have in common: a TIFF directory, then anything, JPEGs among it."""
    entry = struct.pack(order + "HHIHH", raw.ORIENTATION, 3, 1, orientation, 0)
    noise = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    return magic + struct.pack(order + "IH", 8, 1) + entry + bytes(4) + noise + noise.join(parts) + noise


@pytest.mark.parametrize("ending", ["NEF", "dng", "cr2", "arw", "orf"])
def test_the_largest_preview_is_taken_and_turned_as_the_file_says(ending: str, tmp_path: Path) -> None:
    small, large = encoded(gradient(16, 12)), encoded(gradient(80, 60), quality=95)
    magic = b"IIRO" if ending == "orf" else b"II*\0"
    (tmp_path / f"a.{ending}").write_bytes(raw_file(small, large, small, orientation=6, magic=magic))
    expected = gradient(80, 60).transpose(Image.Transpose.ROTATE_270)
    assert close(load_image(tmp_path / f"a.{ending}"), expected)
    assert close(load_image((tmp_path / f"a.{ending}").read_bytes(), name=f"a.{ending}"), expected)


def test_big_endian_and_canons_box() -> None:
    large = encoded(gradient(80, 60), quality=95)
    whole = raw_file(large, order=">", orientation=3, magic=b"MM\0*")
    upside_down = gradient(80, 60).transpose(Image.Transpose.ROTATE_180)
    assert close(load_image(whole, name="a.nef"), upside_down)
    assert close(load_image(b"\0\0\0\x18ftypcrx " + bytes(40) + b"CMT1" + whole, name="a.cr3"), upside_down)


def test_a_preview_that_says_itself_how_it_was_held_is_turned_once() -> None:
    exif = Image.Exif()
    exif[raw.ORIENTATION] = 6
    whole = raw_file(encoded(gradient(80, 60), exif=exif, quality=95), orientation=6)
    assert close(load_image(whole, name="a.raf"), gradient(80, 60).transpose(Image.Transpose.ROTATE_270))


def test_raw_data_that_are_a_lossless_jpeg_are_no_preview() -> None:
    preview = encoded(gradient(16, 12))
    lossless = encoded(gradient(400, 300)).replace(b"\xff\xc0", b"\xff\xc3")
    assert raw.preview(raw_file(lossless, preview)) == preview


def test_scans_in_the_raw_data_are_not_those_of_the_preview() -> None:
    assert load_image(raw_file(encoded(gradient(16, 12)), b"\xff\xda" * 1000), name="a.nef").size == (16, 12)


@pytest.mark.parametrize("content", [b"", b"II*\0", raw_file(), raw_file(b"\xff\xd8\xff" * 5000)], ids=len)
def test_raw_files_without_a_preview(content: bytes) -> None:
    with pytest.raises(ImageError, match=r"a\.dng: no preview in this RAW file"):
        load_image(content, name="a.dng")


def test_a_header_is_read_where_it_stands() -> None:
    content = encoded(gradient(33, 22), progressive=True)
    header = read_header(io.BytesIO(b"abc" + content), 3)
    assert header is not None
    assert (header.width, header.height, header.frame, header.one_pass) == (33, 22, 0xC2, False)
    plain = read_header(io.BytesIO(encoded(gradient(33, 22))))
    assert plain is not None
    assert plain.one_pass
    for cut in range(0, plain.coded - 9, 7):
        assert read_header(io.BytesIO(encoded(gradient(33, 22))[:cut])) is None


# ------------------------------------------------------------------------------------------------ large pictures


def test_a_large_jpeg_is_scaled_down_while_it_is_decoded(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[raw.ORIENTATION] = 6
    (tmp_path / "a.jpg").write_bytes(encoded(gradient(400, 300), exif=exif, quality=95))
    with pytest.raises(ImageTooLargeError, match="120,000 pixels"):
        load_image(tmp_path / "a.jpg", max_pixels=10_000)
    found = load_image(tmp_path / "a.jpg", max_pixels=10_000, shrink=True)
    assert found.size == (75, 100)
    assert full_size(found) == (300, 400)
    assert close(found, gradient(400, 300).resize((100, 75)).transpose(Image.Transpose.ROTATE_270))
    assert full_size(load_image(tmp_path / "a.jpg", shrink=True)) == (300, 400)  # within the limit: as it is


def test_larger_than_pillow_would_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20_000)
    content = encoded(gradient(400, 300))
    with pytest.raises(ImageTooLargeError, match="too many pixels"):
        load_image(content, max_pixels=10_000)
    assert load_image(content, max_pixels=10_000, shrink=True).size == (100, 75)
    with pytest.raises(ImageTooLargeError, match="too many pixels"):
        load_image(encoded(gradient(400, 300), "PNG"), max_pixels=10_000, shrink=True)


def test_what_would_be_held_whole_is_still_refused() -> None:
    for content in (encoded(gradient(400, 300), progressive=True), encoded(gradient(400, 300), "PNG")):
        with pytest.raises(ImageTooLargeError, match="120,000 pixels"):
            load_image(content, max_pixels=10_000, shrink=True)
    with pytest.raises(ImageTooLargeError, match="120,000 pixels"):  # more than an eighth of each side
        load_image(encoded(gradient(400, 300)), max_pixels=1_000, shrink=True)


def test_a_jpeg_that_claims_four_gigapixels_is_refused_from_its_header() -> None:
    content = bytearray(encoded(gradient(64, 64)))
    at = content.index(b"\xff\xc0") + 5
    content[at : at + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(ImageTooLargeError):
        load_image(bytes(content), shrink=True)


def test_a_callers_picture_is_not_scaled_down() -> None:
    with Image.open(io.BytesIO(encoded(gradient(400, 300)))) as picture:
        assert isinstance(picture, JpegImageFile)
        with pytest.raises(ImageTooLargeError):
            load_image(picture, max_pixels=10_000, shrink=True)
        assert picture.size == (400, 300)


def test_scans_of_a_picture_of_several_frames_are_counted() -> None:
    """Pillow calls a JPEG with more pictures behind it MPO: no way around the limit."""
    whole = encoded(gradient(160, 120), "MPO", save_all=True, append_images=[gradient(16, 12)], progressive=True)
    assert load_image(whole).size == (160, 120)
    end = whole.index(b"\xff\xd9", whole.index(b"\xff\xda"))
    scan = whole[whole.rindex(b"\xff\xda", 0, end) : end]
    with Image.open(io.BytesIO(hostile := whole[:end] + scan * 20_000 + whole[end:])) as picture:
        assert picture.format == "MPO"
    with pytest.raises(ImageTooLargeError, match="scans"):
        load_image(hostile)


# ------------------------------------------------------------------------------------------------------- videos


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """4.5 seconds that grow lighter by 50 every second."""
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(45):
            grey = np.full((48, 64, 3), 5 * i, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        container.mux(stream.encode())
    return tmp_path / "clip.mp4"


def test_frames_at_an_interval(clip: Path) -> None:
    names = video.frame_names(clip, 2)
    assert names == [f"{clip}#t={t}" for t in (0, 2, 4)]
    assert [load_image(name).getpixel((5, 5))[0] for name in names] == pytest.approx([0, 100, 200], abs=6)
    assert len(video.frame_names(clip, 0.5)) == 9
    assert video.frame_names(clip, 100) == [f"{clip}#t=0"]
    assert load_image(f"{clip}#t=99").getpixel((5, 5))[0] == pytest.approx(220, abs=6)  # the last one


def test_a_file_that_is_really_called_like_a_frame_is_that_file(clip: Path) -> None:
    Path(f"{clip}#t=2").write_bytes(encoded(Image.new("RGB", (8, 8), RED), "PNG"))
    assert load_image(f"{clip}#t=2").getpixel((1, 1)) == RED


def test_videos_that_cannot_be_read(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImageError, match=r"its frames have names: clip\.mp4#t=2"):
        load_image(clip)
    with pytest.raises(ImageError, match="No such file"):
        load_image(tmp_path / "none.mp4#t=2")
    (tmp_path / "bad.mov").write_bytes(b"no video at all")
    with pytest.raises(RamatchError, match="not a video that can be read"):
        video.frame_names(tmp_path / "bad.mov", 1)
    with pytest.raises(ImageError, match=r"bad\.mov#t=1: not a video"):
        load_image(tmp_path / "bad.mov#t=1")
    with pytest.raises(RamatchError, match="take fewer"):
        video.frame_names(clip, 1e-5)
    monkeypatch.setattr(video, "MAX_PIXELS", 3000)
    with pytest.raises(ImageError, match="64x48"):
        load_image(f"{clip}#t=1")
