"""Pixels come out right from every kind of file, or the file is refused by name."""

from __future__ import annotations

import io
import random
import struct

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from PIL import Image, ImageOps
from torchvision.transforms.v2 import RandomResizedCrop

from fasttrain import images
from fasttrain.images import ImageError, Picture, Pixels, decode


def photo(height: int = 150, width: int = 200) -> Image.Image:
    """Smooth areas, edges and fine detail, no symmetry."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse).astype(int) + rng.normal(0, 8, (height, width, 1))
    pixels[height // 4 : height // 2, : width // 3] = (250, 30, 60)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def saved(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def difference(a: Pixels, b: Image.Image | ArrayLike) -> float:
    """Mean absolute difference of two images, of 255."""
    assert a.shape == np.asarray(b).shape
    return float(np.abs(a.astype(int) - np.asarray(b).astype(int)).mean())


def ycck(image: Image.Image) -> bytes:
    """A JPEG as Adobe writes it for print: inverted CMYK whose colours are stored as brightness and difference."""
    c, m, y, k = image.convert("CMYK").split()
    stored = Image.merge("RGB", (c, m, y)).convert("YCbCr").split()  # the inverse of what is stored: Pillow inverts too
    data = saved(Image.merge("CMYK", (*(ImageOps.invert(s) for s in stored), k)), "JPEG", quality=95, subsampling=0)
    at = data.index(b"Adobe")
    return data[: at + 11] + b"\2" + data[at + 12 :]  # the marker's last byte: 2 is YCCK


RGB = photo()
GRAY = RGB.convert("L")
PALETTE = RGB.quantize(64)
DEEP = (np.arange(150 * 200).reshape(150, 200) * 2).astype(np.uint16)
GRAY_OF_DEEP = Image.fromarray((DEEP >> 8).astype(np.uint8)).convert("RGB")
TRANSPARENT = np.dstack([np.asarray(RGB), np.full((150, 200), 90, np.uint8)])

KINDS = {  # file, expected, largest mean difference
    "jpeg": (saved(RGB, "JPEG", quality=95), RGB, 3),
    "gray jpeg": (saved(GRAY, "JPEG", quality=95), GRAY.convert("RGB"), 3),
    "progressive jpeg": (saved(RGB, "JPEG", quality=95, progressive=True), RGB, 3),
    "cmyk jpeg": (saved(RGB.convert("CMYK"), "JPEG", quality=95), RGB, 3),
    "ycck jpeg": (ycck(RGB), RGB, 3),
    "png": (saved(RGB, "PNG"), RGB, 0),
    "16-bit png": (saved(Image.fromarray(DEEP), "PNG"), GRAY_OF_DEEP, 0),
    "16-bit tiff": (saved(Image.fromarray(DEEP), "TIFF"), GRAY_OF_DEEP, 0),
    "16-bit big-endian tiff": (
        saved(Image.frombytes("I;16B", (200, 150), DEEP.astype(">u2").tobytes()), "TIFF"),
        GRAY_OF_DEEP,
        0,
    ),
    "16-bit pgm": (b"P5 200 150 65535\n" + DEEP.astype(">u2").tobytes(), GRAY_OF_DEEP, 0),
    "gray and alpha": (saved(GRAY.convert("LA"), "PNG"), GRAY.convert("RGB"), 0),
    "rgba": (saved(Image.fromarray(TRANSPARENT), "PNG"), RGB, 0),
    "one bit": (saved(GRAY.convert("1"), "PNG"), GRAY.convert("1").convert("RGB"), 0),
    "palette": (saved(PALETTE, "PNG"), PALETTE.convert("RGB"), 0),
    "palette with transparency": (saved(PALETTE, "PNG", transparency=bytes(range(64))), PALETTE.convert("RGB"), 0),
    "gif": (saved(PALETTE, "GIF"), PALETTE.convert("RGB"), 0),
    "animated gif": (saved(PALETTE, "GIF", save_all=True, append_images=[GRAY.quantize(9)]), PALETTE.convert("RGB"), 0),
    "bmp": (saved(RGB, "BMP"), RGB, 0),
    "ppm": (saved(RGB, "PPM"), RGB, 0),
    "webp": (saved(RGB, "WEBP", lossless=True), RGB, 0),
    "cmyk tiff": (saved(RGB.convert("CMYK"), "TIFF"), RGB, 1),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_becomes_three_right_channels(kind: str) -> None:
    data, expected, most = KINDS[kind]
    pixels = decode(data, 0, "x")
    assert pixels.dtype == np.uint8
    assert difference(pixels, expected) <= most


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_range_are_refused(mode: str) -> None:
    with pytest.raises(ImageError, match=r"deep/a\.tif: .*range"):
        decode(saved(GRAY.convert(mode), "TIFF"), 0, "deep/a.tif")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_orientation_of_exif_is_applied(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(RGB, form, exif=exif, **({"quality": 95} if form in ("JPEG", "WEBP") else {}))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    picture = Picture(data, "x")
    assert (picture.height, picture.width) == expected.size[::-1]
    assert difference(picture.pixels(), expected) < 1.5
    box = (10, 20, 96, 80)  # top, left, height, width
    part = expected.crop((20, 10, 100, 106)).resize((40, 40), Image.Resampling.BILINEAR)
    assert difference(images.crop(Picture(data, "x"), box, 40), part) < 4


def test_exif_that_points_nowhere_is_passed_over() -> None:
    data = saved(RGB, "JPEG")
    for table in (b"II*\0\xff\xff\xff\x7f", b"MM\0*\0\0\0\x08\x99\x99", b"garbage"):
        segment = b"Exif\0\0" + table
        broken = data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]
        assert difference(decode(broken, 0, "x"), decode(data, 0, "x")) == 0


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "animated gif"])  # whose first picture is whole
@pytest.mark.parametrize("left", [0.0, 0.02, 0.5, 0.9])
def test_a_file_that_is_cut_off_is_refused_by_name(kind: str, left: float) -> None:
    data = KINDS[kind][0]
    with pytest.raises(
        ImageError, match=r"^some/file\.img: (is damaged or cut off|is empty|is not an image)"
    ) as caught:
        decode(data[: int(left * len(data))], 0, "some/file.img")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["jpeg", "progressive jpeg", "cmyk jpeg", "ycck jpeg"])
def test_a_hole_in_a_jpeg_is_refused_even_where_the_file_ends_well(kind: str) -> None:
    data = KINDS[kind][0]
    half = len(data) // 2
    with pytest.raises(ImageError, match="damaged"):
        decode(data[:half] + b"\xff\xd9", 64, "x")


def test_an_empty_file_is_called_empty() -> None:
    with pytest.raises(ImageError, match=r"^x: is empty \(0 bytes\)$"):
        decode(b"", 0, "x")


def test_other_bytes_are_refused_and_an_odd_name_stays_one_line() -> None:
    with pytest.raises(ImageError, match=r"^a\\nb\\xff: is not an image that can be read \(5 bytes"):
        decode(b"hello", 0, "a\nb\udcff")


def test_too_many_pixels_are_refused_before_they_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    for kind in ("jpeg", "png"):
        with pytest.raises(ImageError, match="too large"):
            decode(KINDS[kind][0], 0, "x")


def test_a_wrong_extension_does_not_matter() -> None:
    assert difference(decode(KINDS["png"][0], 0, "photo.jpg"), RGB) == 0


@pytest.mark.parametrize(
    ("at_least", "shape"),
    [(0, (600, 800)), (301, (600, 800)), (300, (300, 400)), (100, (150, 200)), ((60, 100), (75, 100)), (1, (75, 100))],
)
def test_a_jpeg_is_decoded_at_a_half_a_quarter_or_an_eighth_but_never_below_what_is_needed(
    at_least: int | tuple[int, int], shape: tuple[int, int]
) -> None:
    assert decode(saved(photo(600, 800), "JPEG"), at_least, "x").shape[:2] == shape


@pytest.mark.parametrize("sides", [(150, 200), (375, 500), (601, 799), (1066, 1600)])
def test_pixels_stay_close_to_an_antialiased_resize_of_the_whole_image(sides: tuple[int, int]) -> None:
    big = photo(*sides)
    data = saved(big, "JPEG", quality=95)
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    side = min(sides)
    left, top = (sides[1] - side) // 2, (sides[0] - side) // 2
    reference = whole.resize((112, 112), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    assert difference(images.center(Picture(data, "x"), 112).pixels(), reference) < 3
    for seed in range(20):
        top, left, height, width = images.random_box(*sides, (0.3, 1.0), rng=random.Random(seed))
        reference = whole.resize((112, 112), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
        found = images.random_resized_crop(Picture(data, "x"), 112, (0.3, 1.0), rng=random.Random(seed)).pixels()
        assert difference(found, reference) < 5


def test_fine_detail_does_not_alias_when_it_is_shrunk_a_lot() -> None:
    lines = np.zeros((400, 400, 3), np.uint8)
    lines[:, ::4] = lines[:, 1::4] = 255  # would turn into wide bands
    assert (
        np.ptp(images.center(Picture(saved(Image.fromarray(lines), "PNG"), "x"), 30).pixels()[:, 2:-2].astype(int))
        < 100
    )


def test_random_crops_are_distributed_as_torchvisions() -> None:
    for height, width, scale in ((375, 500, (0.08, 1.0)), (64, 640, (0.5, 1.0))):
        torch.manual_seed(0)
        rng, maker, blank = random.Random(0), RandomResizedCrop(8, scale=scale), torch.empty(3, height, width)
        drawn = [maker.make_params([blank]) for _ in range(4000)]
        theirs = np.array([[d["top"], d["left"], d["height"], d["width"]] for d in drawn], dtype=float)
        ours = np.array([images.random_box(height, width, scale, rng=rng) for _ in range(4000)], dtype=float)
        for at in (10, 50, 90):  # per cent
            gap = np.abs(np.percentile(ours, at, axis=0) - np.percentile(theirs, at, axis=0))
            assert (gap <= 0.03 * np.array([height, width, height, width])).all()
        areas = ours[:, 2:].prod(1), theirs[:, 2:].prod(1)
        assert abs(areas[0].mean() / areas[1].mean() - 1) < 0.03


@pytest.mark.parametrize("sides", [(1, 1), (1, 500), (500, 1), (3, 2)])
def test_tiny_and_narrow_images_are_cropped_too(sides: tuple[int, int]) -> None:
    data = saved(Image.new("RGB", sides[::-1], (9, 99, 200)), "JPEG")
    for seed in range(30):
        found = images.random_resized_crop(Picture(data, "x"), 16, (0.08, 1.0), rng=random.Random(seed)).pixels()
        assert found.shape == (16, 16, 3)
        assert difference(found, np.full((16, 16, 3), (9, 99, 200))) < 3
    assert images.center(Picture(data, "x"), 16).pixels().shape == (16, 16, 3)


def test_flip_mirrors_left_and_right() -> None:
    pixels = np.asarray(RGB)
    assert (images.flip(pixels) == pixels[:, ::-1]).all()


def test_pixels_in_memory_are_a_picture_too() -> None:
    assert (
        difference(
            images.center(Picture.of(np.asarray(GRAY)[:100, :100]), 100).pixels(),
            GRAY.convert("RGB").crop((0, 0, 100, 100)),
        )
        == 0
    )
