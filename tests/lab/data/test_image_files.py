"""Images of every odd kind, from folders and archives."""

import io
import os
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from regard_lab.data.images import ImageFileError, decode_image, open_images, read_image, resize_image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def quarters(size: int = 16) -> Image.Image:
    """Red, green in the upper row; blue, white in the lower."""
    image = Image.new("RGB", (size, size))
    half = size // 2
    for place, colour in zip(((0, 0), (half, 0), (0, half), (half, half)), (RED, GREEN, BLUE, WHITE)):
        image.paste(colour, (*place, place[0] + half, place[1] + half))
    return image


def corners(pixels: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(pixels[at].tolist()) for at in ((0, 0), (0, -1), (-1, 0), (-1, -1))]


@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "TIFF", "PPM"])
def test_formats_without_loss(kind: str) -> None:
    assert corners(decode_image(encoded(quarters(), kind), "some")) == [RED, GREEN, BLUE, WHITE]


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_formats_with_loss(kind: str) -> None:
    pixels = decode_image(encoded(quarters(64), kind, quality=95), "some")
    assert np.abs(pixels.astype(int) - np.asarray(quarters(64)).astype(int)).mean() < 4


def test_one_pixel() -> None:
    assert decode_image(encoded(Image.new("RGB", (1, 1), RED)), "one").tolist() == [[list(RED)]]


def test_palette_and_transparency_are_seen_over_white() -> None:
    assert corners(decode_image(encoded(quarters().convert("P")), "palette")) == [RED, GREEN, BLUE, WHITE]
    clear = quarters().convert("RGBA")
    clear.putalpha(Image.new("L", clear.size, 0))
    assert corners(decode_image(encoded(clear), "clear")) == [WHITE] * 4
    half = Image.new("LA", (4, 4), (0, 128))
    assert decode_image(encoded(half), "half")[0, 0].tolist() == [127] * 3
    named = quarters().convert("P")
    red = np.asarray(named)[0, 0]
    data = encoded(named, transparency=int(red))
    assert corners(decode_image(data, "named")) == [WHITE, GREEN, BLUE, WHITE]


def test_cmyk() -> None:
    data = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    assert np.abs(decode_image(data, "cmyk")[8, 8].astype(int) - RED).max() < 12


@pytest.mark.parametrize("value", [0, 1, 257, 32896, 65535])
def test_sixteen_bits_keep_the_range(value: int) -> None:
    image = Image.fromarray(np.full((4, 4), value, np.uint16))
    for kind in ("PNG", "TIFF"):
        assert decode_image(encoded(image, kind), "deep").tolist() == [[[round(value / 257)] * 3] * 4] * 4


def test_wide_grey_and_floats() -> None:
    wide = Image.fromarray(np.full((2, 2), (1 << 31) - 1, np.int32))
    assert decode_image(encoded(wide, "TIFF"), "wide").tolist() == [[[255] * 3] * 2] * 2
    with pytest.raises(ImageFileError, match="floating-point pixels"):
        decode_image(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"), "floats")


def test_the_first_frame_of_an_animation() -> None:
    others = [Image.new("RGB", (16, 16), RED)] * 2
    for kind in ("GIF", "WEBP", "PNG"):
        lossless = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(quarters(), kind, save_all=True, append_images=others, **lossless)
        assert corners(decode_image(data, "moving")) == [RED, GREEN, BLUE, WHITE]


def test_exif_turns_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    data = encoded(quarters(64).crop((0, 0, 64, 32)), "JPEG", exif=exif, quality=95)
    pixels = decode_image(data, "turned")
    assert pixels.shape == (64, 32, 3)
    assert np.abs(pixels[2, 2].astype(int) - RED).max() < 40  # left became top
    assert np.abs(pixels[-3, 2].astype(int) - GREEN).max() < 40
    at = data.index(b"Exif\0\0") + 6
    damaged = data[:at] + b"\xff" * 8 + data[at + 8 :]
    assert decode_image(damaged, "damaged tag").shape == (32, 64, 3)


def test_truncated_and_damaged() -> None:
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"):
        data = encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)), kind)
        for keep in (0.9, 0.5):
            with pytest.raises(ImageFileError, match=r"^train: cut\.\w+ must be a(n| whole) image"):
                decode_image(data[: int(keep * len(data))], f"cut.{kind}", function="train")
        for seed in range(20):
            random = np.random.default_rng(seed)
            noisy = bytearray(data)
            for at in random.integers(0, len(noisy), 30):
                noisy[at] = int(random.integers(0, 256))
            try:
                assert decode_image(bytes(noisy), "noisy").dtype == np.uint8
            except ImageFileError as error:
                assert "noisy must" in str(error)


@pytest.mark.parametrize("data", [b"no image at all", b"\x80\x02pickle", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"<svg/>"])
def test_no_image(data: bytes) -> None:
    with pytest.raises(ImageFileError, match=r"text\.jpg must be an image \(JPEG, PNG, .*\), got b'"):
        decode_image(data, "text.jpg")


def test_nothing() -> None:
    with pytest.raises(ImageFileError, match=r"^read_image: no\.png must be an image, got an empty file\.$"):
        decode_image(b"", "no.png")


def png_of(width: int, height: int) -> bytes:
    """Return a PNG of a few kilobytes that says it has so many pixels, all black."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(20_000, 20_000), (12_000, 12_000), (1 << 30, 1 << 30)])
def test_bombs_are_refused_before_they_are_decoded(size: tuple[int, int]) -> None:
    with pytest.raises(
        ImageFileError, match=r"bomb\.png must have at most 134,217,728 pixels, got [\d,]+( × [\d,]+)?\."
    ):
        decode_image(png_of(*size), "bomb.png", side=224)


def test_a_large_jpeg_is_decoded_at_a_smaller_size() -> None:
    data = encoded(quarters(4096), "JPEG")
    assert decode_image(data, "large").shape == (4096, 4096, 3)
    pixels = decode_image(data, "large", side=224)
    assert pixels.shape == (512, 512, 3)
    assert np.abs(pixels[0, 0].astype(int) - RED).max() < 4
    assert decode_image(encoded(quarters(300), "JPEG"), "small", side=224).shape == (300, 300, 3)


def test_resizing_keeps_the_middle() -> None:
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 255
    assert (resize_image(pixels, 5) == 255).all()
    assert resize_image(pixels[:1, :1], 7).shape == (7, 7, 3)
    assert resize_image(pixels[:1], 4).shape == (4, 4, 3)
    square = np.asarray(quarters())
    assert resize_image(square, 16) is square


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    (root / "cats").mkdir(parents=True)
    (root / "dogs").mkdir()
    quarters().save(root / "cats" / "one.png")
    quarters().save(root / "dogs" / "one.png")
    quarters().save(root / "dogs" / "two.PNG", "PNG")
    (root / "notes.txt").write_text("no image")
    return root


def test_a_folder_and_an_archive_of_it_are_alike(folder: Path, tmp_path: Path) -> None:
    for name, mode in (("images.tar", "w"), ("images.tar.gz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as archive:
            archive.add(folder, ".")
        with open_images(tmp_path / name) as images, open_images(folder) as others:
            assert sorted(images.names) == list(others.names) == ["cats/one.png", "dogs/one.png", "dogs/two.PNG"]
            for each in (images, others):
                assert len(each) == 3
                assert each.find("./cats/one.png") == "cats/one.png"
                assert each.find("two.PNG") == each.find("elsewhere/two.PNG") == "dogs/two.PNG"
                assert each.find("one.png") is None, "there are two"
                assert corners(each.read("dogs/two.PNG")) == [RED, GREEN, BLUE, WHITE]


def test_nothing_outside_a_folder_is_read(folder: Path, tmp_path: Path) -> None:
    quarters().save(tmp_path / "secret.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "inner.png").symlink_to(folder / "cats" / "one.png")
    with open_images(folder) as images:
        assert images.find("../secret.png") is None
        assert images.find("link.png") is None
        assert images.find(str(tmp_path / "secret.png")) is None
        assert corners(images.read("inner.png"))[0] == RED


def test_an_archive_of_hostile_names_is_only_read(tmp_path: Path) -> None:
    data = encoded(quarters())
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        for name in ("../../evil.png", "/etc/evil2.png"):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        device = tarfile.TarInfo("device.png")
        device.type = tarfile.CHRTYPE
        archive.addfile(device)
    before = sorted(tmp_path.rglob("*"))
    with open_images(tmp_path / "evil.tar") as images:
        assert len(images) == 2
        assert all(images.read(name).shape == (16, 16, 3) for name in images.names)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_source_of_images(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tar").write_text("no archive")
    whole = tmp_path / "whole.tar"
    with tarfile.open(whole, "w") as archive:
        archive.add(__file__, "code.py")
    expected = {
        "missing": "be a folder of images, or a tar archive of them, got nothing there",
        "empty": r"have files that end in one of .*, got none",
        "text.tar": "be a folder of images, or a tar archive that is whole, got ",
        "whole.tar": r"have files that end in one of .*, got none",
    }
    for name, message in expected.items():
        with pytest.raises(ValueError, match=f"^train: .*{name} must {message}"):
            open_images(tmp_path / name, "train")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe must be a folder of images, or a tar archive of them, got something"):
        open_images(tmp_path / "pipe", "train")


def test_a_truncated_archive(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        archive.add(folder, ".")
    data = (tmp_path / "whole.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: data.index(b"\x89PNG") + 20])
    with pytest.raises(ValueError, match=r"(whole|readable|bytes), got"), open_images(tmp_path / "cut.tar") as images:
        images.read(images.names[-1])


def test_files_by_themselves(tmp_path: Path) -> None:
    with pytest.raises(ImageFileError, match=r"none\.png must exist, got no such file\."):
        read_image(tmp_path / "none.png")
    with pytest.raises(ImageFileError, match="must be a file, got a folder"):
        read_image(tmp_path)
    quarters().save(tmp_path / "some.png")
    assert read_image(tmp_path / "some.png").shape == (16, 16, 3)
