"""What image files hold, made into uint8 RGB arrays [height, width, 3]: every format, mode and orientation.

JPEG's fast path stands in images.py. A file that is damaged, or whose pixels have no clear meaning, is refused by name.
"""

from __future__ import annotations

import io
import struct

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fasttrain.errors import UserError
from fasttrain.names import printable

Pixels = NDArray[np.uint8]

_ORIENTATION = 0x0112  # the EXIF tag


class ImageError(UserError):
    """A file that can't be read or decoded. The message is one line: the file and the reason."""

    def __init__(self, name: str, reason: str | None = None) -> None:
        super().__init__(name if reason is None else f"{printable(name)}: {reason}")


def by_pillow(data: bytes, name: str) -> Pixels:
    """Decode through Pillow: upright, RGB, full size."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            pixels = _rgb(image, name)
            return upright(pixels, image.getexif().get(_ORIENTATION, 1))
    except (ImageError, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(name, too_large(2 * (Image.MAX_IMAGE_PIXELS or 0), str(error))) from error
    except UnidentifiedImageError as error:
        reason = f"is not an image that can be read ({len(data)} bytes that begin with {data[:8]!r})"
        raise ImageError(name, reason) from error
    except Exception as error:  # a damaged file makes Pillow's readers raise almost anything
        raise ImageError(name, f"is damaged or cut off ({error or type(error).__name__})".replace("\n", " ")) from error


def _rgb(image: Image.Image, name: str) -> Pixels:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        gray = (np.asarray(image) >> 8).astype(np.uint8)  # as Pillow itself reads 16-bit RGB
        return np.repeat(gray[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        kind = "32-bit integers" if image.mode == "I" else "floating point numbers"
        raise ImageError(name, f"holds {kind}, whose range isn't known: convert it to 8 or 16 bits")
    if image.mode in ("P", "PA", "RGBa"):
        image = image.convert("RGBA")  # straight to RGB Pillow warns of the lost transparency
    return np.asarray(image.convert("RGB"))


def without_ink(stored: Pixels) -> Pixels:
    """CMYK [height, width, 4] to RGB. Every JPEG writer in use stores it inverted, as Adobe does: 255 is no ink."""
    product = stored[:, :, :3].astype(np.uint16) * stored[:, :, 3:]
    return ((product + 127) // 255).astype(np.uint8)


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Turn or mirror as EXIF's orientation (1 to 8) says; a view, nothing is copied."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    rows = slice(None, None, -1 if orientation in (3, 4, 7, 8) else 1)
    columns = slice(None, None, -1 if orientation in (2, 3, 6, 7) else 1)
    return pixels[rows, columns]


def jpeg_orientation(data: bytes) -> int:
    """EXIF's orientation of a JPEG, 1 (upright) if there is none or it makes no sense. Costs about 2 microseconds."""
    at = 2
    try:
        while (marker := data[at + 1]) != 0xDA:  # the pixels begin
            if marker == 0xE1 and data.startswith(b"Exif\0\0", at + 4):
                return _tiff_orientation(data, at + 10)
            at += 1 if marker == 0xFF else 2 + (data[at + 2] << 8) + data[at + 3]
    except (IndexError, struct.error):  # a length or a table that points behind the end
        return 1
    return 1


def _tiff_orientation(data: bytes, at: int) -> int:
    order = "<" if data[at : at + 2] == b"II" else ">"
    first = at + int(struct.unpack_from(order + "I", data, at + 4)[0])
    for entry in range(struct.unpack_from(order + "H", data, first)[0]):
        tag, _, _, value = struct.unpack_from(order + "HHIH", data, first + 2 + 12 * entry)
        if tag == _ORIENTATION:
            return int(value) if 1 <= value <= 8 else 1
    return 1


def too_large(most: int, found: str) -> str:
    return f"is too large ({found}; at most {most} pixels): shrink it, or raise PIL.Image.MAX_IMAGE_PIXELS in data.py"
