"""Image files to pixels, fast: decoding, cropping, mirroring. Pixels are uint8 RGB arrays [height, width, 3].

JPEG goes through simplejpeg, at 1/2, 1/4 or 1/8 of its size where the crop still keeps as many pixels as it is resized
to: most of the work of decoding a large photo is then never done. Every other format: decoding.py.
A file that is damaged or whose pixels have no clear meaning is refused by name; it never becomes half a picture.
"""

from __future__ import annotations

import math
import random
from typing import Any

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from fasttrain import decoding
from fasttrain.decoding import ImageError as ImageError
from fasttrain.decoding import Pixels as Pixels

Box = tuple[int, int, int, int]  # top, left, height, width in pixels of the upright image at full size

# What the JPEG library says when pixels are lost; it would fill them with gray. Its other complaints leave them whole.
_LOST = ("premature end", "bad huffman code", "bad arithmetic code", "instead of rst")


class Picture:
    """An image file in memory, decoded when its pixels are asked for and no finer than needed.

    Attributes:
        height, width: pixels of the upright image (as EXIF turns it) at full size.

    Raises:
        ImageError: the bytes are empty, not an image, damaged, or more pixels than Pillow's limit allows.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.name, self._data, self._turn = name, data, 1
        self._pixels: Pixels | None = None
        if not data:
            raise ImageError(name, "is empty (0 bytes)")
        try:
            if data[:2] != b"\xff\xd8":
                raise ValueError("not a JPEG")
            self.height, self.width, self._space, _ = simplejpeg.decode_jpeg_header(data)
        except ValueError:
            self._pixels = decoding.by_pillow(data, name)
            self.height, self.width = self._pixels.shape[:2]
            return
        most = Image.MAX_IMAGE_PIXELS
        if most is not None and self.height * self.width > 2 * most:
            raise ImageError(name, decoding.too_large(2 * most, f"{self.width}x{self.height}"))
        self._turn = decoding.jpeg_orientation(data)
        if self._turn >= 5:
            self.height, self.width = self.width, self.height

    @classmethod
    def of(cls, pixels: Pixels) -> Picture:
        """A picture that is decoded already: uint8 [height, width, 3], or [height, width] for gray."""
        picture = cls.__new__(cls)
        picture.name, picture._data = "", b""
        picture._pixels = np.repeat(pixels[:, :, None], 3, axis=2) if pixels.ndim == 2 else pixels
        picture.height, picture.width = pixels.shape[:2]
        return picture

    @property
    def jpeg(self) -> bytes | None:
        """The file's bytes if it is a JPEG that isn't decoded yet."""
        return self._data if self._pixels is None else None

    def pixels(self, reduction: int = 1) -> Pixels:
        """The whole image, upright.

        Args:
            reduction: 1, 2, 4 or 8: a JPEG is decoded at 1/reduction of its sides, rounded up, which is
                antialiased and cheap (other factors cost more than they save). Other formats come at full size.

        Raises:
            ImageError: the image is damaged.
        """
        if self._pixels is not None:
            return self._pixels
        stored = (self.height, self.width) if self._turn < 5 else (self.width, self.height)
        height, width = (0, 0) if reduction == 1 else (-(-side // reduction) for side in stored)
        ink = self._space in ("CMYK", "YCCK")
        try:
            colours = "CMYK" if ink else "RGB"
            decoded: Pixels = simplejpeg.decode_jpeg(self._data, colours, min_height=height, min_width=width)
        except ValueError as error:
            if any(words in str(error).lower() for words in _LOST):
                raise ImageError(self.name, f"is damaged or cut off ({error})") from error
            self._pixels = decoding.by_pillow(self._data, self.name)  # upright already
            return self._pixels
        return decoding.upright(decoding.without_ink(decoded) if ink else decoded, self._turn)


def decode(data: bytes, at_least: int | tuple[int, int], name: str) -> Pixels:
    """The pixels of an image file: any mode becomes RGB, EXIF's orientation is applied.

    Gray is repeated, 16 bits keep their upper 8, transparency is dropped (the colour beneath it stays), an animation
    gives its first picture.

    Args:
        data: the file's bytes.
        at_least: pixels that both sides (height, width) shall keep; a JPEG may come at 1/2, 1/4 or 1/8. 0: full size.
        name: names the file in errors.

    Raises:
        ImageError: empty, not an image, damaged, too large, or of a kind without a fixed range (32-bit, float).
    """
    picture = Picture(data, name)
    height, width = at_least if isinstance(at_least, tuple) else (at_least, at_least)
    if not height or not width:
        return picture.pixels()
    return picture.pixels(_reduction(min(picture.height / height, picture.width / width)))


def read(path: str) -> bytes:
    """All bytes of a file.

    Raises:
        ImageError: it can't be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ImageError(path, f"can't be read ({error.strerror})") from error


def load(path: str) -> Picture:
    """The image in a file, not decoded yet.

    Raises:
        ImageError: the file can't be read, or as `Picture` says.
    """
    return Picture(read(path), path)


class Crop:
    """A part of an image at size x size, drawn but not made yet: uint8 [size, size, 3] once it is.

    The loader makes the crops of a batch after all of them are drawn, each in its place in the batch. Drawing and
    reading is much Python, making a crop is much memory, and taking turns one would push the other out of the
    processor's caches: it costs 30 to 50 us for each sample.
    """

    __slots__ = ("box", "image", "mirrored", "size")
    dtype = np.dtype(np.uint8)

    def __init__(self, image: Picture, box: Box, size: int, mirrored: bool = False) -> None:
        self.image, self.box, self.size, self.mirrored = image, box, size, mirrored

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.size, self.size, 3

    def pixels(self) -> Pixels:
        """Make it now. Raises: ImageError: the image is damaged."""
        out: Pixels = np.empty(self.shape, np.uint8)
        self.write(out)
        return out

    def write(self, out: Pixels) -> None:
        """Make it in `out`: uint8 [size, size, 3] in one piece."""
        crop(self.image, self.box, self.size, out)
        if self.mirrored:
            flip(out, out)


def finished(image: Pixels | Crop) -> Pixels:
    """Pixels as they are, a crop made."""
    return image.pixels() if isinstance(image, Crop) else image


def random_resized_crop(
    image: Picture,
    size: int,
    scale: tuple[float, float],
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    rng: Any = random,
    flip: float = 0.0,
) -> Crop:
    """A random part of the image at size x size: torchvision's RandomResizedCrop, and RandomHorizontalFlip.

    The part is drawn before the image is decoded, so that it decides how finely to decode.

    Args:
        scale: area of the part, least and most, as a part of the image.
        ratio: width / height of the part.
        rng: where the draws come from: Python's `random`, which is seeded for each sample, or a `random.Random`.
        flip: chance that it is mirrored, left for right.
    """
    box = random_box(image.height, image.width, scale, ratio, rng)
    return Crop(image, box, size, mirrored=rng.random() < flip)


def center(image: Picture, size: int) -> Crop:
    """The middle of the image with its short side at `size`."""
    side = min(image.height, image.width)
    return Crop(image, ((image.height - side) // 2, (image.width - side) // 2, side, side), size)


def random_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float] = (3 / 4, 4 / 3), rng: Any = random
) -> Box:
    """Draw a crop as torchvision does: ten tries, else the largest part in the middle whose ratio is allowed."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    draw = rng.random  # uniform() and randint() are made of it, and cost three times as much
    for _ in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draw())
        shape = math.exp(low + (high - low) * draw())
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            return int(draw() * (height - h + 1)), int(draw() * (width - w + 1)), h, w
    w, h = min(width, round(height * ratio[1])), min(height, round(width / ratio[0]))
    return (height - h) // 2, (width - w) // 2, h, w


def crop(image: Picture, box: Box, size: int, out: Pixels | None = None) -> Pixels:
    """The part `box` of the image at size x size.

    Where a JPEG is decoded at a reduced scale, the box moves to whole pixels of that scale: by less than a pixel of
    the result.

    Args:
        out: a uint8 array [size, size, 3] in one piece, to be written to and returned. None makes a new one.
    """
    top, left, height, width = box
    pixels = image.pixels(_reduction(min(height, width) / size))
    if (factor := round(image.height / pixels.shape[0])) > 1:
        height, width = round(height / factor), round(width / factor)
        top = min(round(top / factor), pixels.shape[0] - height)
        left = min(round(left / factor), pixels.shape[1] - width)
    part = pixels[top : top + height, left : left + width]
    if part.strides[0] <= 0 or part.strides[1:] != (3, 1):  # a mirrored or turned view, which OpenCV doesn't read
        part = np.ascontiguousarray(part)
    # Linear reads 2x2 pixels: below half the size it would pass over pixels, and area, which averages all of them, is
    # right. Between half and full size area is a little closer to an antialiased result (0.5 instead of 1.1 of 255 on
    # photos), but costs a third more of the whole sample.
    shrink = max(height, width) >= 2 * size
    how = cv2.INTER_AREA if shrink else cv2.INTER_LINEAR
    result: Pixels = np.empty((size, size, 3), np.uint8) if out is None else out
    # Intel's library, which OpenCV brings along on x86, resizes 15 % faster than OpenCV's own code; a tenth of the
    # values differ, by 1 of 255. The setting is kept for each thread, so it is set here, for 0.3 us.
    cv2.ipp.setUseIPP_NotExact(True)
    cv2.resize(part, (size, size), dst=result, interpolation=how)
    return result


def flip(image: Pixels, out: Pixels | None = None) -> Pixels:
    """The image mirrored, left for right; `out` may be the image itself."""
    result: Pixels = np.empty(image.shape, np.uint8) if out is None else out
    cv2.flip(image, 1, dst=result)
    return result


def _reduction(shrink: float) -> int:
    """The largest of 1, 2, 4, 8 that is not more than `shrink`."""
    return 8 if shrink >= 8 else 4 if shrink >= 4 else 2 if shrink >= 2 else 1
